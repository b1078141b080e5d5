"""A batch job over a cluster by Ray Data: each replica loads the model and processes blocks of lines."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from foredraft.batch.line import BatchLine
from foredraft.batch.processor import LineProcessor
from foredraft.batch.result import LineResult
from foredraft.errors import ForedraftError, format_install_command

Block = dict[str, Any]  # column -> array of objects


@dataclass(frozen=True)
class RayOptions:
    """Options of the user for a cluster.

    Attributes:
        replicas: number of replicas; None = one for each GPU, or for each machine of a cluster without GPUs.
        threads: CPU cores of each replica; None = the cores of the cluster, divided by the replicas.
        device: device of the models, as in `LLM`; "cpu" takes no GPU.
    """

    replicas: int | None = None
    threads: int | None = None
    device: str = "auto"


@dataclass(frozen=True)
class RayPlan:
    """Replicas of a job, with the cores and GPUs of each."""

    replicas: int
    cpus: int
    gpus: int


def plan_replicas(options: RayOptions, num_cpus: int, num_gpus: int, num_machines: int) -> RayPlan:
    """Divide a cluster among replicas.

    Raises:
        ForedraftError: the cluster has too few cores or GPUs.
    """
    has_gpus = num_gpus > 0 and options.device != "cpu"
    replicas = options.replicas or (num_gpus if has_gpus else num_machines)
    cpus = options.threads or num_cpus // replicas
    if cpus < 1 or cpus * replicas > num_cpus:
        raise ForedraftError(
            f"{replicas} replicas of {max(cpus, 1)} threads need more than the {num_cpus} cores of the cluster; give "
            "fewer --replicas or --threads"
        )
    if options.device.startswith("cuda") and not has_gpus:
        raise ForedraftError(f"--device {options.device} needs GPUs and the cluster has none; leave it out")
    if has_gpus and replicas > num_gpus:
        raise ForedraftError(
            f"{replicas} replicas need {replicas} GPUs, the cluster has {num_gpus}; give fewer --replicas"
        )
    return RayPlan(replicas, cpus, int(has_gpus))


class LineReplica:
    """Process of a cluster with a loaded model, which Ray Data gives blocks of lines.

    Args:
        load: loads the model; called in the process of the replica.
    """

    def __init__(self, load: Callable[[], LineProcessor]) -> None:
        self._processor = load()

    def __call__(self, block: Block) -> Block:
        """Process a block of encoded lines, and return their encoded results."""
        lines = [decode_line(text) for text in block["line"]]
        results = asyncio.run(self._process(lines))
        return {"result": np.array([encode_result(result) for result in results], dtype=object)}

    async def _process(self, lines: Iterable[BatchLine]) -> list[LineResult]:
        slots = asyncio.Semaphore(self._processor.concurrency)

        async def process(line: BatchLine) -> LineResult:
            async with slots:
                return await self._processor.process(line)

        results = list(await asyncio.gather(*map(process, lines)))
        if not self._processor.is_healthy:
            raise ForedraftError("the engine of a replica stopped; the same command goes on after the last result")
        return results


def process_with_ray(
    lines: Iterable[BatchLine],
    load: Callable[[int], LineProcessor],
    options: RayOptions,
    block_lines: int,
    is_ordered: bool,
) -> Iterator[LineResult]:
    """Process lines on a cluster, and yield the results as they come.

    It joins the cluster of the environment variable RAY_ADDRESS, or else starts Ray on this machine.

    Args:
        lines: lines without results; the cluster holds their texts.
        load: loads the model of a replica with a number of threads; it is pickled.
        options: options of the user.
        block_lines: lines that a replica gets at a time.
        is_ordered: yield the blocks in the order of the lines.

    Raises:
        ForedraftError: Ray is missing, the cluster is too small, or a replica failed.
    """
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise ForedraftError(f"--ray needs Ray: {format_install_command('ray')}") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    found = ray.cluster_resources()
    plan = plan_replicas(options, int(found.get("CPU", 0)), int(found.get("GPU", 0)), len(ray.nodes()))
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = is_ordered
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the command shows its own progress
    results = ray.data.from_items([{"line": encode_line(line)} for line in lines]).map_batches(
        LineReplica,
        fn_constructor_args=(partial(load, plan.cpus),),
        batch_size=block_lines,
        compute=ray.data.ActorPoolStrategy(size=plan.replicas),
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
    )
    try:
        for row in results.iter_rows():
            yield decode_result(row["result"])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ForedraftError(f"a replica failed ({reason}); the same command goes on after the last result") from None


def encode_line(line: BatchLine) -> str:
    """Encode a line as JSON."""
    return json.dumps(asdict(line))


def decode_line(text: str) -> BatchLine:
    """Decode a line that `encode_line` encoded."""
    return BatchLine(**json.loads(text))


def encode_result(result: LineResult) -> str:
    """Encode a result as JSON."""
    return json.dumps(asdict(result))


def decode_result(text: str) -> LineResult:
    """Decode a result that `encode_result` encoded."""
    value = json.loads(text)
    return LineResult(BatchLine(**value["line"]), value["status"], value["body"])
