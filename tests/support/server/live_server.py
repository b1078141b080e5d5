"""A server in a thread of the test's own process, on a free port, over a small fp64 model."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from foredraft import LLM
from foredraft.engine.worker import WorkerLimits
from foredraft.llm import MemoryLimits
from foredraft.server.admin import AdminRoutes
from foredraft.server.lifecycle import ModelServer, listen
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings
from tests.support import tiny_models

NAME = "small"
JSON = {"content-type": "application/json"}
PLAIN_HTTP: dict[str, Any] = {"timeout": 60, "verify": False}  # loading certificates would take 17 ms a request
CHATML = (
    "{% for m in messages %}<stop>{{ m.role }}: {{ m.content }}<pad>{% endfor %}"
    "{% if add_generation_prompt %}<stop>assistant:{% endif %}"
)


@cache
def make_small_llm() -> LLM:
    """Text in and out, drafts accepted and rejected, integrity checked after every step."""
    tokenizer = tiny_models.tokenizer()
    target = tiny_models.llama(len(tokenizer), seed=5)
    drafter = tiny_models.draft_model(3, model=tiny_models.perturb(target, 0.04))
    return LLM(target, drafter, tokenizer=tokenizer, is_debug=True, limits=MemoryLimits(kv_tokens=4096))


def make_fresh_llm() -> LLM:
    """Make a new engine over the same weights: no prefix cache of an earlier test, no shared worker."""
    return make_small_llm().with_drafter(make_small_llm().drafter)


@dataclass
class RunningServer:
    """A server, and how to talk to it."""

    service: Service
    server: ModelServer
    port: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Any:
        return self.service.worker.engine

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **PLAIN_HTTP | options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **PLAIN_HTTP | options)

    def post_raw(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, content=content, headers=JSON | headers, **PLAIN_HTTP)

    def post_ok(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any = "the end", **body: Any) -> dict[str, Any]:
        return self.post_ok("/v1/completions", prompt=prompt, **body)

    def chat(self, content: Any = "the end", **body: Any) -> dict[str, Any]:
        return self.post_ok("/v1/chat/completions", **{"messages": [{"role": "user", "content": content}]} | body)

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which must end with [DONE]."""
        with httpx.stream("POST", self.url + path, json=body | {"stream": True}, **PLAIN_HTTP) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        """Name with labels -> value, without the two labels that every one has."""
        found = {}
        for line in self.get("/metrics", headers=self.headers).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.replace('engine="0",', "").replace('engine="0"', "")
                name = name.replace(f',model_name="{NAME}"', "").replace(f'model_name="{NAME}"', "")
                found[name.replace(",}", "}").replace("{}", "")] = float(value)
        return found

    def is_idle(self, seconds: float = 20) -> bool:
        """True if nothing runs, waits or holds a page that cannot be freed, and every ended request is counted."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            worker = self.service.worker
            has_requests = worker.num_running or worker.num_waiting or self.engine.scheduler.has_work
            # The thread sends and counts what its last step ended before it waits for a command.
            if not has_requests and (worker._heartbeat.is_idle or not worker._thread.is_alive()):
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def run_server(
    llm: LLM | None = None,
    settings: ServerSettings | None = None,
    limits: WorkerLimits | None = None,
    is_open: bool = True,
) -> Iterator[RunningServer]:
    service = Service(settings or ServerSettings(model_names=(NAME,), chat_template=CHATML), limits)
    if is_open:
        service.open(llm or make_fresh_llm())
    with run_models(ServedModels.single(service)) as server:
        yield server


@contextlib.contextmanager
def run_models(models: ServedModels, admin: AdminRoutes | None = None) -> Iterator[RunningServer]:
    server = ModelServer(models, admin)
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield RunningServer(models.services[0], server, port)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
