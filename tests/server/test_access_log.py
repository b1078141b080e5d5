"""Keys, names, methods: the permitted requests of every route."""

import base64
import logging
import re
from collections.abc import Iterator

import httpx
import pytest

from foredraft.errors import ForedraftError
from foredraft.server.settings import ServerSettings
from tests.support.server.hostile_wire import exchange
from tests.support.server.live_server import NAME, RunningServer, make_fresh_llm, run_server

KEY = "sk-canary-5f1e"
OPEN = {"/health", "/ready", "/metrics", "/version"}


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME, "also"), api_key=KEY)) as found:
        found.headers = {"Authorization": f"Bearer {KEY}"}
        yield found


def routes(server: RunningServer) -> list[tuple[str, str]]:
    """List every method and path of the application's own table, mounts included."""
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


def test_no_route_is_open_but_those_that_probes_and_prometheus_read(locked: RunningServer):
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
    for method, path in [*seen, ("GET", "/nowhere"), ("POST", "/v1"), ("OPTIONS", "/v1/models"), ("HEAD", "/nowhere")]:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"}):
            answer = httpx.request(method, locked.url + path, headers=headers, verify=False)
            assert (answer.status_code == 401) == (path not in {*OPEN, "/"}), (method, path)
            assert KEY not in answer.text
            if answer.status_code == 401 and method != "HEAD":
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["WWW-Authenticate"].startswith("Bearer ")


def test_the_page_opens_without_the_key_and_can_ask_for_it(locked: RunningServer):
    """Fault: the page itself was a 401, so that it could not request the key."""
    page = locked.get("/")
    assert page.status_code == 200
    assert '<input id="key" type="password"' in page.text
    files = re.findall(r"static/[\w.]+", page.text)
    assert len(files) >= 3
    for name in [*files, "static/api.js", "static/form.js"]:
        assert locked.get(f"/{name}").status_code == 200, name
    for path in ("/static/nothing.js", "/static/..%2fv1/models", "/static/../v1/models", "//", "/v1/models"):
        assert locked.get(path).status_code == 401, path
    assert locked.post("/", {}).status_code == 405


def test_the_figures_can_be_protected_too():
    settings = ServerSettings(model_names=(NAME,), api_key=KEY, protects_metrics=True)
    with run_server(settings=settings, is_open=False) as server:
        for path in ("/metrics", "/version"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize("key", ["", " k", "k\n", "schlüssel", "a\0b"])
def test_a_key_that_no_client_could_send_is_refused(key: str):
    with pytest.raises(ForedraftError, match="printable ASCII"):
        ServerSettings(api_key=key)


LOCAL_NAMES = ["localhost", "LOCALHOST:8000", "app.localhost", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3"]
FOREIGN_NAMES = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "x",
    "[x]",
    "",
]


def test_a_server_for_this_machine_alone_does_not_answer_to_other_names():
    settings = ServerSettings(model_names=(NAME,), allowed_hosts=("box",))
    with run_server(settings=settings, is_open=False) as server:

        def status(path: str, **headers: str) -> int:
            return server.get(path, headers=headers).status_code

        for name in [*LOCAL_NAMES, "box", "Box:80"]:
            assert status("/version", Host=name) == 200, name
        for name in FOREIGN_NAMES:
            answer = server.get("/version", headers={"Host": name})
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error"), name
            assert "--allowed-host" in answer.json()["error"]["message"]
            assert status("/health", Host=name) == 200
        answer = exchange(server.port, b"GET /version HTTP/1.0\r\n\r\n")
        assert answer.status == 200
    with run_server(is_open=False) as server:
        assert server.get("/version", headers={"Host": "evil.example"}).status_code == 200


def test_the_access_log_has_a_line_for_every_request(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "foredraft.access")
    with run_server(settings=ServerSettings(model_names=(NAME,), api_key=KEY, has_access_log=True)) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"prompt": "the canary", "max_tokens": 5, "ignore_eos": True, "request_id": "mine"}
        used = server.post("/v1/completions?secret=canary", body, headers=headers).json()["usage"]
        server.post("/v1/completions", body | {"stream": True}, headers=headers)
        chat = {"messages": [{"role": "user", "content": "canary"}], "max_tokens": 3, "ignore_eos": True}
        server.post("/v1/chat/completions", chat | {"request_id": "other"}, headers=headers)
        server.post("/v1/completions", {"prompt": 3}, headers=headers)
        server.get("/v1/models")
        server.get("/no%0Awhere%20there", headers=headers)
    lines = [record.getMessage() for record in caplog.records if record.name == "foredraft.access"]
    shown = [re.sub(r" ms=\d+\.\d ", " ", line) for line in lines]
    tokens = f"prompt_tokens={used['prompt_tokens']} completion_tokens=5"
    assert shown[:2] == [f"method=POST path=/v1/completions status=200 {tokens} id=cmpl-mine"] * 2
    assert re.fullmatch(
        r"method=POST path=/v1/chat/completions status=200 .* completion_tokens=3 id=chatcmpl-other", shown[2]
    )
    none = "prompt_tokens=- completion_tokens=- id=-"
    assert shown[3:] == [
        f"method=POST path=/v1/completions status=400 {none}",
        f"method=GET path=/v1/models status=401 {none}",
        f"method=GET path=/no?where?there status=404 {none}",
    ]
    for secret in ("canary", KEY):
        assert secret not in "".join(lines)


def test_no_access_log_unless_it_is_wanted(server: RunningServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "foredraft.access")
    server.complete("the", max_tokens=1)
    assert not [record for record in caplog.records if record.name == "foredraft.access"]


def test_the_key_opens(locked: RunningServer):
    assert locked.get("/v1/models", headers=locked.headers).status_code == 200
    body = {"prompt": "the", "max_tokens": 2}
    assert locked.post("/v1/completions", body, headers=locked.headers).status_code == 200
    basic = base64.b64encode(f"me:{KEY}".encode()).decode()
    assert locked.get("/v1/models", headers={"Authorization": f"Basic {basic}"}).status_code == 200
    assert locked.get("/v1/models", headers={"Authorization": "Basic %%%"}).status_code == 401


def test_names(locked: RunningServer):
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


def test_methods_and_types(server: RunningServer):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, 405)
    assert server.post("/v1/models").status_code == 405
    assert server.get("/nowhere").json()["error"]["code"] == 404
    answer = server.post_raw("/v1/completions", b'{"prompt": "a"}', **{"content-type": "text/plain"})
    assert answer.status_code == 415


def test_no_other_site_may_ask(server: RunningServer):
    """There are no CORS headers: a browser hides the answer from another site."""
    answer = server.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_other_routes(server: RunningServer):
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert set(server.get("/version").json()) == {"version"}
    made = server.post_ok("/tokenize", prompt="the end <end>", return_token_strs=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["tokens"][-1] == 0  # a completion's prompt is the client's own, control tokens included
    assert server.post_ok("/detokenize", tokens=made["tokens"])["prompt"] == "the end <end>"
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<end>"
    document = server.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in body["properties"]
    for reference in ("ResponseFormat", "StreamOptions"):
        assert reference in document["components"]["schemas"]


def test_nothing_runs_while_the_model_loads():
    with run_server(settings=ServerSettings(model_names=(NAME,)), is_open=False) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        for answer in (server.post("/v1/completions", {"prompt": "a"}), server.get("/v1/models")):
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
            assert "loading" in answer.json()["error"]["message"]
        assert server.get("/metrics").status_code == 200
