"""Front as a process of its own: listen, deploy the replicas, serve, drain on a signal.

first SIGTERM or SIGINT   /ready turns to 503; requests may finish for drain_timeout seconds, then they are ended
second signal             all requests are ended at once
"""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

from foredraft.replicas.front import Front, create_front_app
from foredraft.server.lifecycle import HttpServer

log = logging.getLogger(__name__)


class FrontServer(HttpServer):
    """Server of one front. It runs until a signal, or until the deployment fails.

    Args:
        front: state of all routes.
    """

    def __init__(self, front: Front) -> None:
        super().__init__(create_front_app(front), front.settings)
        self.front = front
        self.deploy_error: Exception | None = None
        self._drain_task: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end all requests at the second."""
        is_again, self.front.is_stopping = self.front.is_stopping, True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._abort_and_exit if is_again else self._start_drain)

    def deploy(self, deploy: Callable[[], None], on_ready: Callable[[], None]) -> threading.Thread:
        """Run `deploy` on a thread, and `on_ready` when a replica is listed.

        The exception of `deploy` stops the server and is stored in `deploy_error`.
        """
        arguments = (deploy, on_ready)
        thread = threading.Thread(target=self._run_deploy, args=arguments, name="foredraft-deploy", daemon=True)
        thread.start()
        return thread

    def _run_deploy(self, deploy: Callable[[], None], on_ready: Callable[[], None]) -> None:
        try:
            deploy()
            self.front.pool.has_started.wait()
            on_ready()
        except Exception as error:  # `serve_front` raises it again
            self.deploy_error = error
            self.should_exit = True

    def _start_drain(self) -> None:
        self._drain_task = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        seconds = self.front.settings.drain_timeout
        if not await self.front.drain(seconds):
            log.warning("requests that still ran after %g seconds are ended", seconds)
            self.front.abort_all()
        self.should_exit = True

    def _abort_and_exit(self) -> None:
        self.front.abort_all()
        self.should_exit = True


def serve_front(front: Front, sock: socket.socket, deploy: Callable[[], None], on_ready: Callable[[], None]) -> None:
    """Serve until a signal. Raises the exception of `deploy`, if any.

    Args:
        front: state of all routes.
        sock: listening socket.
        deploy: starts the replicas; called on another thread.
        on_ready: called when a replica is listed.
    """
    server = FrontServer(front)
    thread = server.deploy(deploy, on_ready)
    server.run(sockets=[sock])
    if thread.is_alive():  # it waits for replicas, which end with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if server.deploy_error is not None:
        raise server.deploy_error
