"""Options of the replicas of `foredraft serve`, and the settings that each replica gets."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.engine_options import EngineOptions
from foredraft.cli.shell import UsageError
from foredraft.errors import ForedraftError, format_install_command

if TYPE_CHECKING:
    import socket

    from foredraft.engine.worker import WorkerLimits
    from foredraft.llm import LLM
    from foredraft.ray_serve.spec import ReplicaSpec
    from foredraft.server.settings import ServerSettings

REPLICA_PANEL = "Replicas"
INSTALL_ERROR = f"replicas need Ray Serve: {format_install_command('ray')}"
THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ReplicaOptions(EngineOptions):
    """Options of the replicas."""

    replicas: Annotated[
        int | None,
        typer.Option(
            help="Number of replicas on Ray Serve, each with its own model. Default: one model, without Ray.",
            rich_help_panel=REPLICA_PANEL,
            min=1,
        ),
    ] = None
    max_replicas: Annotated[
        int | None,
        typer.Option(
            help="Most replicas; above --replicas, their number follows the load. Default: --replicas.",
            rich_help_panel=REPLICA_PANEL,
            min=1,
        ),
    ] = None
    replica_load: Annotated[
        float | None,
        typer.Option(
            help="Requests per replica that --max-replicas aims at. Default: half of --max-batch.",
            rich_help_panel=REPLICA_PANEL,
            min=0.1,
        ),
    ] = None

    def check_replicas(self) -> None:
        """Raise UsageError for options of replicas that contradict each other."""
        if self.replicas is None and (self.max_replicas is not None or self.replica_load is not None):
            raise UsageError("--max-replicas and --replica-load need --replicas; give --replicas 1")
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            raise UsageError("--max-replicas is smaller than --replicas; give a larger number or leave it out")
        if self.replica_load is not None and self.max_replicas is None:
            raise UsageError("--replica-load needs --max-replicas; a fixed number of replicas has no load to aim at")


def build_replica_spec(
    options: ReplicaOptions,
    settings: "ServerSettings",
    limits: "WorkerLimits",
    loader: "Callable[[], LLM]",
    max_batch: int,
) -> "ReplicaSpec":
    """Return the settings of each replica. Raises ForedraftError if Ray is not installed.

    Args:
        options: of the command.
        settings: of the server.
        limits: of each replica's queue.
        loader: returns the LLM; can be pickled.
        max_batch: most requests that run at the same time in one replica.
    """
    import_ray()
    import torch

    from foredraft.ray_serve.spec import ReplicaSpec

    number = options.replicas or 1
    most = options.max_replicas or number
    uses_gpu = options.device != "cpu" and torch.cuda.is_available()
    return ReplicaSpec(
        settings,
        limits,
        loader,
        secret=secrets.token_hex(),
        num_threads=count_threads(most),
        num_gpus=int(uses_gpu),
        min_replicas=number,
        max_replicas=most,
        target_load=options.replica_load or max_batch / 2,
    )


def import_ray() -> None:
    """Import Ray Serve. Raises ForedraftError if it is not installed."""
    # Ray reads it while it is imported. Its handler of signals would end this process at SIGTERM, without a drain.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    try:
        import ray.serve  # noqa: F401
    except ModuleNotFoundError:
        raise ForedraftError(INSTALL_ERROR) from None


def count_threads(num_replicas: int) -> int:
    """Return the threads of one replica: OMP_NUM_THREADS if it is set, else the cores divided by the replicas."""
    given = os.environ.get(THREADS_VARIABLE, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) // num_replicas)


def serve_replicas(spec: "ReplicaSpec", sock: "socket.socket", on_ready: Callable[[], None]) -> None:
    """Serve on Ray until a signal.

    Args:
        spec: settings of the replicas.
        sock: listening socket.
        on_ready: called when the replicas run.
    """
    from foredraft.ray_serve.launch import serve_replicas as run

    run(spec, sock, on_ready)
