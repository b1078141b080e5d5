"""A front with replicas, all in threads of the test's own process."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from foredraft.drafters.spec import DrafterSpec
from foredraft.replicas.directory import Listing, ReplicaCard
from foredraft.replicas.front import Front
from foredraft.replicas.front_server import FrontServer
from foredraft.replicas.replica_server import ReplicaServer
from foredraft.server.lifecycle import listen
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings
from tests.support.server.live_server import CHATML, NAME, PLAIN_HTTP, make_fresh_llm, make_small_llm

SECRET = "between us"


class SlowDrafter:
    """Drafter without drafts that takes `seconds` per step, so that a test can act while a stream runs."""

    spec = DrafterSpec(max_nodes=1)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def propose(self, batch):
        from foredraft.drafters.draft import to_token_tree

        time.sleep(self.seconds)
        return to_token_tree(batch, {})

    def observe(self, batch, commit) -> None: ...

    def forget(self, slots) -> None: ...


@dataclass
class RunningFront:
    """A front, its replicas by name, and how to talk to it."""

    front: Front
    server: FrontServer
    replicas: dict[str, ReplicaServer]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, **PLAIN_HTTP | options)

    def post(self, path: str, **options) -> httpx.Response:
        return httpx.post(self.url + path, **PLAIN_HTTP | options)

    def complete(self, prompt: str = "the end", headers: dict[str, str] | None = None, **body) -> httpx.Response:
        return self.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8} | body, headers=headers)

    def service(self, name: str) -> Service:
        return self.replicas[name]._service

    def kill(self, name: str) -> None:
        """Close all sockets of a replica at once, as the end of its process does."""
        replica = self.replicas[name]

        def close() -> None:
            replica._listener.close()
            for task in replica._exchanges:
                task.get_coro().cr_frame.f_locals["writer"].transport.abort()

        closed = concurrent.futures.Future()
        replica._loop.call_soon_threadsafe(lambda: closed.set_result(close()))
        closed.result()


@contextlib.contextmanager
def run_front(
    names: str = "ab",
    settings: ServerSettings | None = None,
    step_seconds: float = 0.0,
) -> Iterator[RunningFront]:
    settings = settings or ServerSettings(model_names=(NAME,), chat_template=CHATML)
    replicas = {}
    for name in names:
        service = Service(settings)
        service.open(make_small_llm().with_drafter(SlowDrafter(step_seconds)) if step_seconds else make_fresh_llm())
        replicas[name] = ReplicaServer(service, "127.0.0.1", SECRET)
        replicas[name].start()
    cards = tuple(ReplicaCard(name, replica.host, replica.port, 0) for name, replica in replicas.items())

    async def watch(version: int) -> Listing:
        if version:
            await asyncio.sleep(3600)
        return Listing(1, cards)

    front = Front(settings, SECRET, watch)
    server = FrontServer(front)
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            while not (server.started and len(front.pool.cards) == len(names)):
                assert thread.is_alive()
                time.sleep(0.005)
            yield RunningFront(front, server, replicas, sock.getsockname()[1])
        finally:
            server._loop.call_soon_threadsafe(server._abort_and_exit)
            thread.join(60)
            for replica in replicas.values():
                replica.stop()
            assert not thread.is_alive()
