"""Deployments of Ray Serve: the model's replicas, their directory, and the front behind Ray's HTTP proxy.

    client -> front -> replica          requests and responses, on sockets of their own
    replica -> directory -> front       addresses of the replicas, as Ray calls

Ray places, starts, checks, counts and stops the replicas. Tokens do not pass through Ray: one call of a stream costs
Ray about one millisecond of processor time per chunk, as much as a token of a small model.
"""

import asyncio
import gc
import logging
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.applications import Starlette

from foredraft.ray_serve.autoscaling import LOAD
from foredraft.ray_serve.spec import ReplicaSpec
from foredraft.replicas.directory import BEAT_SECONDS, Directory, Listing, ReplicaCard

log = logging.getLogger(__name__)
APP_NAME, DIRECTORY, FRONT = "foredraft", "Directory", "Front"
ANNOUNCE_SECONDS = 10.0  # seconds that the directory has to take an announcement
KILL_SECONDS = 15.0  # seconds beyond the drain time, after which Ray kills a replica
MAX_CALLS = 10_000  # calls that a deployment takes at the same time; the replicas have their own limits
POLICY = "foredraft.ray_serve.autoscaling:scale_by_requests"


class ModelReplica:
    """One replica: its own model, engine and server.

    Args:
        spec: settings.
        directory: handle of the directory.
    """

    def __init__(self, spec: ReplicaSpec, directory: Any) -> None:
        import torch

        from foredraft.replicas.replica_server import ReplicaServer
        from foredraft.server.service import Service

        torch.set_num_threads(spec.num_threads)
        self._directory, self._beat = directory, 0
        self._id = str(serve.get_replica_context().replica_id.unique_id)
        self._service = Service(replace(spec.settings, has_access_log=False), spec.limits)
        self._service.open(spec.loader())
        gc.freeze()
        self._server = ReplicaServer(self._service, spec.host or ray.util.get_node_ip_address(), spec.secret)
        self._server.start()

    async def check_health(self) -> None:
        """Announce the replica. Raises RuntimeError if its engine makes no progress; Ray then replaces it."""
        if not self._service.is_healthy:
            raise RuntimeError("the engine makes no progress")
        card = ReplicaCard(self._id, self._server.host, self._server.port, self._beat)
        self._beat += 1
        await _call_directory(self._directory.announce.remote(card))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load, which `scale_by_requests` reads."""
        worker = self._service.worker
        return {LOAD: float(worker.num_running + worker.num_waiting)}

    async def __del__(self) -> None:
        """Drain. Ray awaits it before it stops the process."""
        await _call_directory(self._directory.withdraw.remote(self._id))
        await asyncio.to_thread(self._server.stop)


async def _call_directory(response: Any) -> None:
    """Wait for a call. A directory that does not answer is restarted by Ray and must not stop a replica."""
    try:
        async with asyncio.timeout(ANNOUNCE_SECONDS):
            await response
    except Exception as error:
        log.warning("the directory of replicas does not answer: %s", error)


def build_model(spec: ReplicaSpec) -> Any:
    """Return the application of Ray Serve with the model's replicas and their directory, without a front."""
    control = serve.deployment(
        name=DIRECTORY, num_replicas=1, max_ongoing_requests=MAX_CALLS, ray_actor_options={"num_cpus": 0}
    )
    model = serve.deployment(
        name="Model",
        health_check_period_s=BEAT_SECONDS,
        graceful_shutdown_timeout_s=spec.settings.drain_timeout + KILL_SECONDS,
        ray_actor_options={"num_cpus": spec.num_threads, "num_gpus": spec.num_gpus},
        **_build_scaling(spec),
    )
    return model(ModelReplica).bind(spec, control(Directory).bind())


def build_app(spec: ReplicaSpec) -> Any:
    """Return the application of Ray Serve with a front behind Ray's HTTP proxy, for `serve run` and `serve deploy`."""

    def build_front() -> Starlette:
        from foredraft.replicas.front import Front, create_front_app

        handle = serve.get_deployment_handle(DIRECTORY, serve.get_replica_context().app_name)

        async def watch(version: int) -> Listing:
            listing: Listing = await handle.watch.remote(version)
            return listing

        return create_front_app(Front(spec.settings, spec.secret, watch))

    front = serve.deployment(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=MAX_CALLS,
        graceful_shutdown_timeout_s=spec.settings.drain_timeout + KILL_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    # The front gets the model only so that Ray deploys both.
    return front(serve.ingress(build_front)()).bind(build_model(spec))


def _build_scaling(spec: ReplicaSpec) -> dict[str, Any]:
    if spec.is_fixed:
        return {"num_replicas": spec.min_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            target_ongoing_requests=spec.target_load,
            policy=AutoscalingPolicy(policy_function=POLICY),
        )
    }
