"""Batch jobs over a cluster: how it is divided, and lines that go through real replicas."""

import os

import pytest

from foredraft.batch.line import BatchLine
from foredraft.batch.ray_job import (
    RayOptions,
    RayPlan,
    decode_line,
    decode_result,
    encode_line,
    encode_result,
    plan_replicas,
    process_with_ray,
)
from foredraft.batch.result import LineResult
from foredraft.errors import ForedraftError

LINE = BatchLine(3, "id ü", "/v1/completions", {"prompt": "x", "seed": 2})


@pytest.mark.parametrize(
    ("options", "cluster", "plan"),
    [
        (RayOptions(), (16, 0, 2), RayPlan(2, 8, 0)),
        (RayOptions(), (16, 4, 2), RayPlan(4, 4, 1)),
        (RayOptions(device="cpu"), (16, 4, 1), RayPlan(1, 16, 0)),
        (RayOptions(replicas=3), (16, 0, 1), RayPlan(3, 5, 0)),
        (RayOptions(replicas=2, threads=1, device="cuda"), (4, 2, 1), RayPlan(2, 1, 1)),
    ],
)
def test_a_cluster_is_divided_among_replicas(options, cluster, plan):
    assert plan_replicas(options, *cluster) == plan


@pytest.mark.parametrize(
    ("options", "cluster", "message"),
    [
        (RayOptions(replicas=3), (2, 0, 1), "3 replicas of 1 threads need more than the 2 cores"),
        (RayOptions(replicas=2, threads=8), (8, 0, 1), "2 replicas of 8 threads need more than the 8 cores"),
        (RayOptions(device="cuda"), (8, 0, 1), "needs GPUs and the cluster has none"),
        (RayOptions(replicas=2), (8, 1, 1), "need 2 GPUs, the cluster has 1"),
    ],
)
def test_what_does_not_fit_is_refused(options, cluster, message):
    with pytest.raises(ForedraftError, match=message):
        plan_replicas(options, *cluster)


def test_lines_and_results_survive_their_encoding():
    result = LineResult(LINE, None, {"a": [1, None]})
    assert decode_line(encode_line(LINE)) == LINE
    assert decode_result(encode_result(result)) == result


class FakeProcessor:
    """Processor that reports its process and its threads."""

    concurrency, is_healthy = 2, True

    def __init__(self, threads):
        self.threads = threads

    async def process(self, line):
        return LineResult(line, 200, {"process": os.getpid(), "threads": self.threads})


class FailingProcessor(FakeProcessor):
    """Processor of an engine that stopped."""

    is_healthy = False


def run_on_ray(load):
    pytest.importorskip("ray", reason="pip install 'ray[data]'")
    lines = [BatchLine(number, f"id-{number}") for number in range(1, 21)]
    return list(process_with_ray(lines, load, RayOptions(replicas=1, threads=1), 4, is_ordered=True))


def test_replicas_of_a_local_cluster_process_every_line_in_order():
    results = run_on_ray(FakeProcessor)
    assert [result.line.number for result in results] == list(range(1, 21))
    assert {result.body["process"] for result in results}.isdisjoint({os.getpid()})
    assert {result.body["threads"] for result in results} == {1}


def test_a_replica_whose_engine_stopped_ends_the_job_with_one_line():
    with pytest.raises(ForedraftError, match=r"a replica failed .*the same command goes on") as caught:
        run_on_ray(FailingProcessor)
    assert "\n" not in str(caught.value)
