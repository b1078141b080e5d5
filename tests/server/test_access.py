"""Keys, names, methods: who may ask for what, over every route there is."""

import base64
from collections.abc import Iterator

import httpx
import pytest

from foredraft.server.settings import Settings
from serving import NAME, Running, fresh, running

KEY = "sk-canary-5f1e"
OPEN = {"/health", "/ready"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(fresh(), Settings(names=(NAME, "also"), api_key=KEY)) as found:
        found.headers = {"Authorization": f"Bearer {KEY}"}
        yield found


def routes(server: Running) -> list[tuple[str, str]]:
    """Every method and path, from the application's own table, mounts included."""
    found, todo = [], list(server.server.config.app.routes)
    while todo:
        route = todo.pop()
        todo += getattr(route, "routes", None) or []
        todo += getattr(getattr(route, "original_router", None), "routes", None) or []  # FastAPI keeps routers whole
        path = getattr(route, "path", None)
        if path is not None:
            found += [
                (method, path.replace("{name:path}", NAME)) for method in getattr(route, "methods", None) or ["GET"]
            ]
    return found


def test_no_route_is_open_but_two(locked: Running):
    seen = routes(locked)
    paths = {path for _, path in seen}
    assert paths >= {
        "/",
        "/static/{name}",
        "/v1/completions",
        "/v1/chat/completions",
        "/metrics",
        "/docs",
        "/openapi.json",
        *OPEN,
    }
    for method, path in [*seen, ("GET", "/nowhere"), ("POST", "/v1"), ("OPTIONS", "/v1/models"), ("HEAD", "/metrics")]:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"}):
            answer = httpx.request(method, locked.url + path, headers=headers)
            assert (answer.status_code == 401) == (path not in OPEN), (method, path)
            assert KEY not in answer.text
            if answer.status_code == 401 and method != "HEAD":
                assert answer.json()["error"]["type"] == "authentication_error"
                assert "WWW-Authenticate" in answer.headers


def test_the_key_opens(locked: Running):
    assert locked.get("/v1/models", headers=locked.headers).status_code == 200
    body = {"prompt": "the", "max_tokens": 2}
    assert locked.post("/v1/completions", body, headers=locked.headers).status_code == 200
    basic = base64.b64encode(f"me:{KEY}".encode()).decode()
    assert locked.get("/v1/models", headers={"Authorization": f"Basic {basic}"}).status_code == 200
    assert locked.get("/v1/models", headers={"Authorization": "Basic %%%"}).status_code == 401


def test_names(locked: Running):
    listed = locked.get("/v1/models", headers=locked.headers).json()
    assert [card["id"] for card in listed["data"]] == [NAME, "also"]
    assert listed["data"][0]["max_model_len"] == 256
    for name in (NAME, "also"):
        assert locked.get(f"/v1/models/{name}", headers=locked.headers).json()["id"] == name
        body = {"prompt": "the", "max_tokens": 2, "model": name}
        assert locked.post("/v1/completions", body, headers=locked.headers).json()["model"] == name
    for path in ("/v1/completions", "/tokenize"):
        answer = locked.post(path, {"prompt": "a", "model": "gpt"}, headers=locked.headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert locked.get("/v1/models/gpt", headers=locked.headers).status_code == 404


def test_methods_and_types(server: Running):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, 405)
    assert server.post("/v1/models").status_code == 405
    assert server.get("/nowhere").json()["error"]["code"] == 404
    answer = server.raw("/v1/completions", b'{"prompt": "a"}', **{"content-type": "text/plain"})
    assert answer.status_code == 415


def test_no_other_site_may_ask(server: Running):
    """No CORS headers: a browser keeps what another site asked for to itself."""
    answer = server.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_other_routes(server: Running):
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert set(server.get("/version").json()) == {"version"}
    made = server.ok("/tokenize", prompt="the end <end>", return_token_strs=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["tokens"][-1] == 0  # a completion's prompt is the client's own, control tokens included
    assert server.ok("/detokenize", tokens=made["tokens"])["prompt"] == "the end <end>"
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<end>"
    document = server.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in body["properties"]
    for reference in ("ResponseFormat", "StreamOptions"):
        assert reference in document["components"]["schemas"]


def test_nothing_runs_while_the_model_loads():
    with running(settings=Settings(names=(NAME,)), is_open=False) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        for answer in (server.post("/v1/completions", {"prompt": "a"}), server.get("/v1/models")):
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
            assert "loading" in answer.json()["error"]["message"]
        assert server.get("/metrics").status_code == 200
