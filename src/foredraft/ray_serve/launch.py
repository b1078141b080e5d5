"""`foredraft serve --replicas N`: the front in this process, the replicas on a local Ray or on that of RAY_ADDRESS."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from foredraft.errors import ForedraftError
from foredraft.ray_serve.deployments import APP_NAME, DIRECTORY, build_model
from foredraft.ray_serve.spec import ReplicaSpec
from foredraft.replicas.directory import WATCH_SECONDS, Listing
from foredraft.replicas.front import Front
from foredraft.replicas.front_server import serve_front

log = logging.getLogger(__name__)
CLOSE_SECONDS = 30.0  # seconds that Ray has to stop
WATCH_TIMEOUT = WATCH_SECONDS + 10.0  # seconds until the directory must have answered
ADDRESS_VARIABLE = "RAY_ADDRESS"
LOOPBACK = "127.0.0.1"
# Ray's controller looks at its replicas ten times a second by default, which takes a share of a core.
LOCAL_ENVIRONMENT = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class RayApplication:
    """The application on Ray, from `deploy` to `close`.

    All calls of Ray run on one thread: some of them block, and would stop the streams on an event loop.

    Args:
        spec: settings of the replicas.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._address = os.environ.get(ADDRESS_VARIABLE, "local")
        self._spec = replace(spec, host=LOOPBACK) if self._is_local else spec
        self._thread = ThreadPoolExecutor(1, "foredraft-ray")
        self._directory: Future[Any] = Future()  # handle of the directory

    def deploy(self) -> None:
        """Start the replicas and wait until they run. Raises ForedraftError if they cannot start."""
        self._thread.submit(self._deploy).result()

    async def watch(self, version: int) -> Listing:
        """Wait until the directory has another version, and return its listing."""
        handle = await asyncio.wrap_future(self._directory)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _watch, handle, version)

    def close(self) -> None:
        """Stop the replicas. A Ray that was started here ends too: the front has drained its replicas before."""
        try:
            self._thread.submit(self._close).result(CLOSE_SECONDS)
        except TimeoutError:  # Ray does not answer, and would keep this process
            log.warning("Ray did not stop within %g seconds", CLOSE_SECONDS)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._thread.shutdown()

    def _deploy(self) -> None:
        if self._is_local:
            for name, value in LOCAL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its progress would stand between the lines here
        try:
            self._connect()
            serve.start(proxy_location="Disabled")
            serve.run(build_model(self._spec), name=APP_NAME, route_prefix=None)
            self._directory.set_result(serve.get_deployment_handle(DIRECTORY, APP_NAME))
        except (RuntimeError, ConnectionError) as error:
            raise ForedraftError(f"the replicas cannot start: {self._find_reason(error)}") from None

    def _close(self) -> None:
        if not ray.is_initialized():
            return
        if self._is_local:
            serve.shutdown()
        else:
            serve.delete(APP_NAME)
        ray.shutdown()

    @property
    def _is_local(self) -> bool:
        return self._address == "local"

    def _connect(self) -> None:
        if not self._is_local:
            ray.init(address=self._address, namespace=APP_NAME, log_to_driver=False, logging_level=logging.ERROR)
            return
        spec = self._spec
        ray.init(
            address="local",
            # Ray starts no more replicas than this number allows, and a user may want more threads than cores.
            num_cpus=max(os.cpu_count() or 1, spec.max_replicas * spec.num_threads),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def _find_reason(self, error: Exception) -> str:
        """Return the last line of a replica's error, if Ray has one."""
        try:
            status = serve.status().applications[APP_NAME]
            messages = [status.message, *(deployment.message for deployment in status.deployments.values())]
        except Exception:
            messages = []
        lines = [line.strip() for text in (*messages, str(error)) for line in text.splitlines() if "Error: " in line]
        return lines[-1].partition("Error: ")[2] if lines else str(error)


def _watch(handle: Any, version: int) -> Listing:
    listing: Listing = handle.watch.remote(version).result(timeout_s=WATCH_TIMEOUT)
    return listing


def serve_replicas(spec: ReplicaSpec, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until a signal. Raises ForedraftError if the replicas cannot start.

    Args:
        spec: settings of the replicas.
        sock: listening socket.
        on_ready: called when the replicas run.
    """
    application = RayApplication(spec)
    front = Front(spec.settings, spec.secret, application.watch)

    try:
        serve_front(front, sock, application.deploy, on_ready)
    finally:
        application.close()
