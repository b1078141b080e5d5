"""Several models behind one server: choice by name, loading and unloading while streams run, and the admin key."""

import asyncio
import gc
import json
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import httpx
import pytest

from foredraft import LLM, ForedraftError
from foredraft.llm import MemoryLimits
from foredraft.server.admin import AdminRoutes, LoadModelRequest
from foredraft.server.kv_shares import KVShare, KVShares
from foredraft.server.model_host import ModelHost, ModelSource
from foredraft.server.settings import ServerSettings
from tests.support import tiny_models
from tests.support.server.hostile_corpus import WRONG, keys
from tests.support.server.hostile_wire import HostileRequest, exchange, find_fault, get, post
from tests.support.server.live_server import PLAIN_HTTP, RunningServer, run_models

KEY, ADMIN_KEY = "sk-canary-77aa-key", "adm-canary-55cc-key"
SETTINGS = ServerSettings(api_key=KEY, admin_key=ADMIN_KEY, drain_timeout=60)
COMPLETE, ADMIN = "/v1/completions", "/admin/models"
BODY = {"prompt": "the end", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = BODY | {"max_tokens": 240, "stream": True}


def make_llm(seed: int, share: KVShare) -> LLM:
    tokenizer = tiny_models.tokenizer()
    limits = MemoryLimits(kv_memory=share.num_bytes)
    return LLM(tiny_models.llama(len(tokenizer), seed=seed), None, tokenizer=tokenizer, limits=limits)


@dataclass
class SeveralModels:
    """Server with the models a and b. A request to load a model waits until `may_load` is set."""

    host: ModelHost
    server: RunningServer
    may_load: threading.Event = field(default_factory=threading.Event)

    def complete(self, **body) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(self.server.url + COMPLETE, json=BODY | body, headers=headers, **PLAIN_HTTP)

    def admin(self, method: str, path: str = "", body=None, key: str = ADMIN_KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.server.url + ADMIN + path, json=body, headers=headers, **PLAIN_HTTP)

    def names(self) -> list[str]:
        return [card["id"] for card in self.server.get("/v1/models", headers=self.server.headers).json()["data"]]


def make_source(name: str, seed: int, weight: float = 1.0, base_name: str | None = None) -> ModelSource:
    settings = replace(SETTINGS, model_names=(name,))
    return ModelSource(settings, lambda share, base: make_llm(seed, share), weight=weight, base_name=base_name)


@pytest.fixture(scope="module")
def several() -> Iterator[SeveralModels]:
    host = ModelHost(SETTINGS, [make_source("a", 5, weight=3), make_source("b", 6)], kv_total=4 << 20)
    found: list[SeveralModels] = []

    def build(request: LoadModelRequest) -> ModelSource:
        if request.model == "broken":
            raise ForedraftError("broken/folder is no model; give another one")
        assert found[0].may_load.wait(60)
        source = make_source(request.name, 7, request.weight)
        return replace(source, kv_memory=None if request.kv_memory is None else int(request.kv_memory))

    host.load_first()
    with run_models(host.models, AdminRoutes(host, build)) as server:
        server.headers = {"Authorization": f"Bearer {KEY}"}
        found.append(SeveralModels(host, server))
        found[0].may_load.set()
        yield found[0]


def read_text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_the_field_model_chooses(several: SeveralModels):
    texts = {name: read_text(several.complete(model=name)) for name in ("a", "b")}
    assert texts["a"] != texts["b"]
    assert read_text(several.complete()) == texts["a"]  # the first model
    assert several.names() == ["a", "b"]
    assert several.complete(model="b").json()["model"] == "b"
    error = several.complete(model="c").json()["error"]
    assert (error["code"], error["param"]) == (404, "model")
    assert error["message"] == "the model 'c' does not exist here; the models are: a, b"


def test_every_route_takes_the_name(several: SeveralModels):
    headers = several.server.headers
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    bodies = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [9]}, "/v1/chat/completions": chat}
    for path, body in bodies.items():
        for name, status in (("b", 200), ("c", 404)):
            answer = several.server.post(path, body | {"model": name}, headers=headers)
            assert answer.status_code == status, path
    for query, status in (("", 200), ("?model=b", 200), ("?model=c", 404)):
        assert several.server.get("/tokenizer_info" + query, headers=headers).status_code == status
    assert several.server.get("/v1/models/b", headers=headers).json()["id"] == "b"
    assert several.server.get("/v1/models/c", headers=headers).status_code == 404


def test_metrics_have_one_family_with_samples_of_every_model(several: SeveralModels):
    several.complete(model="b")
    lines = several.server.get("/metrics").text.splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    for name in ("a", "b"):
        [line] = [
            x for x in lines if x.startswith("foredraft:generation_tokens_total{") and f'model_name="{name}"' in x
        ]
        assert float(line.split()[-1]) > 0


def test_kv_memory_is_divided_by_weight(several: SeveralModels):
    sizes = {card["id"]: card["kv_tokens"] for card in several.admin("GET").json()["data"]}
    assert sizes["a"] == pytest.approx(3 * sizes["b"], rel=0.1)


def test_a_model_is_loaded_while_streams_run_and_unloaded_after_its_own(several: SeveralModels):
    body = {"name": "c", "model": "x", "kv_memory": str(1 << 20)}
    several.may_load.clear()
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(several.admin, "POST", body=body)
        read_text(several.complete(model="a"))  # requests are served while the load waits
        assert several.names() == ["a", "b"]
        assert not loading.done()
        several.may_load.set()
        card = loading.result().json()
        assert (card["id"], several.names()) == ("c", ["a", "b", "c"])
        assert several.admin("POST", body=body).status_code == 409  # the name is taken
        lines: list[str] = []
        has_begun = threading.Event()
        stream = pool.submit(read_stream, several, lines, has_begun)
        assert has_begun.wait(30)
        answer = several.admin("DELETE", "/c")
        stream.result(60)
    assert answer.json() == {"id": "c", "object": "model", "deleted": True}
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert several.names() == ["a", "b"]
    assert several.complete(model="c").status_code == 404


def read_stream(several: SeveralModels, lines: list[str], has_begun: threading.Event, name: str = "c") -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = LONG | {"model": name}
    with httpx.stream("POST", several.server.url + COMPLETE, json=body, headers=headers, **PLAIN_HTTP) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                has_begun.set()


def test_an_unloaded_model_is_freed_without_the_collector(several: SeveralModels):
    several.admin("POST", body={"name": "c", "model": "x", "kv_memory": str(1 << 20)}).raise_for_status()
    read_text(several.complete(model="c", logprobs=1))
    service = several.host.models.find("c")
    parts = [weakref.ref(part) for part in (service, service.llm, service.worker, service.worker.engine,
                                            service.llm.target, service.llm.target.model)]  # fmt: skip
    del service
    gc.collect()
    gc.disable()
    try:
        several.admin("DELETE", "/c").raise_for_status()
        end = time.monotonic() + 10
        while any(part() is not None for part in parts) and time.monotonic() < end:
            time.sleep(0.01)  # the last task of the event loop ends after the response
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_a_change_that_is_impossible_is_refused_with_the_reason(several: SeveralModels):
    full = several.admin("POST", body={"name": "c", "model": "x"})
    assert full.status_code == 409
    assert "all of --kv-memory is shared out" in full.json()["error"]["message"]
    broken = several.admin("POST", body={"name": "c", "model": "broken"}).json()["error"]
    assert (broken["code"], broken["param"]) == (400, "model")
    tiny = several.admin("POST", body={"name": "c", "model": "x", "kv_memory": "1"}).json()["error"]
    assert (tiny["code"], "holds no page" in tiny["message"]) == (400, True)
    assert several.admin("DELETE", "/c").status_code == 404
    assert several.names() == ["a", "b"]
    for path in ("/health", "/ready"):
        assert several.server.get(path).status_code == 200


def test_health_and_ready_cover_every_model(several: SeveralModels):
    service = several.host.models.find("b")
    service.worker._engine_loop.is_broken = True
    try:
        answer = several.server.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "the engine makes no progress: b")
    finally:
        service.worker._engine_loop.is_broken = False
    service.is_stopping = True
    try:
        answer = several.server.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading, full or shutting down: b")
        assert several.complete(model="b").status_code == 503
    finally:
        service.is_stopping = False


def test_one_change_at_a_time(several: SeveralModels):
    begun, goes_on = threading.Event(), threading.Event()

    def load(share: KVShare, base: LLM | None) -> LLM:
        begun.set()
        assert goes_on.wait(60)
        raise ForedraftError("this load ends without a model")

    source = replace(make_source("d", 8), load=load, kv_memory=1 << 20)
    loop = several.server.server._loop
    assert loop is not None
    first = asyncio.run_coroutine_threadsafe(several.host.load(source), loop)
    assert begun.wait(30)
    second = several.admin("DELETE", "/b")
    goes_on.set()
    with pytest.raises(ForedraftError, match="ends without a model"):
        first.result(30)
    assert (second.status_code, "try again" in second.json()["error"]["message"]) == (409, True)
    assert several.names() == ["a", "b"]


def test_the_last_model_stays():
    host = ModelHost(SETTINGS, [make_source("a", 5)], None)
    host.load_first()
    with run_models(host.models, AdminRoutes(host, lambda request: make_source(request.name, 6))) as server:
        one = SeveralModels(host, server)
        error = one.admin("DELETE", "/a").json()["error"]
        assert (error["code"], "the last model" in error["message"]) == (409, True)
        assert one.complete(model="z").json()["error"]["message"].endswith("GET the list of models")  # as ever


def test_a_signal_drains_every_model():
    host = ModelHost(SETTINGS, [make_source("a", 5), make_source("b", 6)], None)
    host.load_first()
    with run_models(host.models) as server, ThreadPoolExecutor(2) as pool:
        streams = []
        for name in ("a", "b"):
            lines, has_begun = [], threading.Event()
            streams.append((pool.submit(read_stream, SeveralModels(host, server), lines, has_begun, name), lines))
            assert has_begun.wait(30)
        server.server.handle_exit(signal.SIGTERM, None)
        for stream, lines in streams:
            stream.result(60)
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_hostile_requests_to_the_admin_routes_change_nothing(several: SeveralModels):
    bearer = {"authorization": f"Bearer {ADMIN_KEY}".encode()}
    found = []
    for one in (*wrong_keys(), *wrong_bodies(bearer), *wrong_targets(bearer)):
        fault = find_fault(one, exchange(several.server.port, one.data), ADMIN_KEY)
        found += [] if fault is None else [f"{one.name}: {fault}"]
    assert not found, "\n".join(found)
    assert several.names() == ["a", "b"]


def wrong_keys() -> Iterator[HostileRequest]:
    for one in keys(ADMIN_KEY):
        data = one.data.replace(b"/v1/models HTTP", ADMIN.encode() + b" HTTP")
        yield replace(one, data=data)
    for key in (KEY, ""):
        bearer = {"authorization": f"Bearer {key}".encode()}
        yield HostileRequest("the API key", get(ADMIN, **bearer))
        yield HostileRequest("the API key, load", post(ADMIN, {"name": "c", "model": "x"}, **bearer))
        yield HostileRequest("the API key, unload", get(f"{ADMIN}/b", "DELETE", **bearer))
    admin = {"authorization": f"Bearer {ADMIN_KEY}".encode()}
    yield HostileRequest("the admin key elsewhere", post(COMPLETE, BODY, **admin))
    for path in ("//admin/models", "/v1/../admin/models", "/ADMIN/models", "/admin;/models", "/health/../admin/models"):
        yield HostileRequest(path, get(path, **admin), may_close=True)


def wrong_bodies(bearer: dict[str, bytes]) -> Iterator[HostileRequest]:
    good = {"name": "c", "model": "x"}
    kinds: dict[str, str] = dict.fromkeys(("name", "model", "lora", "spec_method", "dtype", "kv_memory"), "str")
    kinds |= {"weight": "float", "spec_option": "list", "max_batch": "int", "max_model_len": "int"}
    for name, kind in kinds.items():
        for value in WRONG[kind]:
            yield HostileRequest(f"{name} = {str(value)[:20]}", post(ADMIN, good | {name: value}, **bearer), (name,))
    for value in ("", " ", "a b", "../c", "/c", "c/", "c//d", ".c", "c\n", "ü", "c" * 200, "c?x", "c\\d", "{}", "c,d"):
        yield HostileRequest(f"name {value!r}", post(ADMIN, good | {"name": value}, **bearer), ("name",))
    yield HostileRequest("a module", post(ADMIN, good | {"spec_method": "os:METHOD"}, **bearer), ("spec_method",))
    for value in (0, -1, 1e9, -0.0):
        yield HostileRequest(f"weight {value}", post(ADMIN, good | {"weight": value}, **bearer), ("weight",))
    raw = (b"", b"[]", b"{", b"null", b"\xff", b"[" * 5000, b'{"name": "c", "name": "d", "model": "x"}')
    extras = ({"x": 1}, {"lora": "y"}, {"model": None}, {"model": "x" * (1 << 20)}, {"spec_model": ["a"] * 99})
    for body in (*raw, {}, *(good | extra for extra in extras)):
        yield HostileRequest(f"body {str(body)[:30]}", post(ADMIN, body, **bearer))
    yield HostileRequest("a form", post(ADMIN, good, b"application/x-www-form-urlencoded", **bearer))


def wrong_targets(bearer: dict[str, bytes]) -> Iterator[HostileRequest]:
    for name in ("", "%00", "..", "../../v1/models", "b/", "B", "b%20", "x" * 7000, "%ff%fe", "b?x=1/../a/"):
        if not name.startswith("b?"):
            yield HostileRequest(f"unload {name[:20]}", get(f"{ADMIN}/{name}", "DELETE", **bearer), may_close=True)
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "DELETE"):
        yield HostileRequest(f"{method} all", get(ADMIN, method, **bearer))
    yield HostileRequest("post to a name", post(f"{ADMIN}/b", {"name": "c", "model": "x"}, **bearer))


def test_without_an_admin_key_there_are_no_such_routes(server: RunningServer):
    for method in ("GET", "POST", "DELETE"):
        assert httpx.request(method, f"{server.url}/admin/models", **PLAIN_HTTP).status_code == 404


@pytest.mark.parametrize(
    ("keys_of", "words"),
    [
        ({"api_key": "k", "admin_key": "k"}, "equals the API key"),
        ({"admin_key": ""}, "admin key must be"),
        ({"admin_key": " k"}, "admin key must be"),
        ({"admin_key": "schlüssel"}, "admin key must be"),
    ],
)
def test_keys_that_cannot_be_used(keys_of: dict[str, str], words: str):
    with pytest.raises(ForedraftError, match=words):
        ServerSettings(**keys_of)


class TestShares:
    def test_the_first_shares_add_up_to_the_total(self):
        shares = KVShares(1001)
        first = shares.divide({"a": 1, "b": 2, "c": 4})
        assert [share.num_bytes for share in first.values()] == [143, 286, 572]
        assert shares.num_free == 0
        with pytest.raises(ForedraftError, match="unload a model first"):
            shares.assign("d", 1)
        assert shares.assign("d", 1, 77) == KVShare(77)  # beside the total
        shares.release("c")
        assert shares.assign("e", 1).num_bytes == 251  # its share by weight of 1 + 1 + 2
        assert shares.assign("f", 4).num_bytes == 321  # what is free
        shares.release("nothing")

    def test_without_a_total_it_is_a_part_of_the_default(self):
        shares = KVShares(None)
        assert shares.divide({"a": 1})["a"] == KVShare()
        assert shares.assign("b", 3) == KVShare(share=0.75)
