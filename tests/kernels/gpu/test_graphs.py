"""Recordings: fixed inputs and outputs, made once per size, dropped above a limit of memory."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foredraft.kernels.gpu.graphs import (
    CallingRecorder,
    CallingReplay,
    GraphMemory,
    Outputs,
    ReplayCache,
    make_recorder,
)  # fmt: skip

HAS_GPU = torch.cuda.is_available()


@dataclass
class Doubling:
    """Function of a fixed input, with a count of its runs."""

    x: Tensor = field(default_factory=lambda: torch.zeros(3))
    num_runs: int = 0

    def __call__(self) -> Outputs:
        self.num_runs += 1
        return (2 * self.x,)


class LargeReplay(CallingReplay):
    """Recording that takes 10 bytes."""

    num_bytes = 10  # type: ignore[assignment]


class LargeRecorder(CallingRecorder):
    """Recorder of such recordings."""

    def record(self, run: Callable[[], Outputs]) -> CallingReplay:
        replay = super().record(run)
        return LargeReplay(replay.run, replay.outputs)


def test_replay_overwrites_the_same_outputs() -> None:
    run = Doubling()
    replay = CallingRecorder().record(run)
    (output,) = replay.outputs
    run.x += 3
    assert output.tolist() == [0, 0, 0]  # of the time of the recording
    replay()
    assert replay.outputs[0] is output
    assert output.tolist() == [6, 6, 6]


@pytest.mark.skipif(not HAS_GPU, reason="needs CUDA")
def test_captured_graph_overwrites_the_same_outputs() -> None:
    recorder = make_recorder(torch.device("cuda:0"))
    assert recorder is not None
    run = Doubling(torch.zeros(3, device="cuda:0"))
    replay = recorder.record(run)
    count = run.num_runs
    run.x += 3
    replay()
    assert replay.outputs[0].tolist() == [6, 6, 6]
    assert run.num_runs == count  # a replay calls no Python


def test_cpu_has_no_recorder() -> None:
    assert make_recorder(torch.device("cpu")) is None


def test_cache_records_once_per_key() -> None:
    run = Doubling()
    cache = ReplayCache(CallingRecorder(), GraphMemory(100))
    first = cache.get(4, run)
    count = run.num_runs
    assert cache.get(4, run) is first
    assert run.num_runs == count
    assert cache.get(8, run) is not first
    assert len(cache) == 2


def test_cache_drops_what_was_not_used_for_longest() -> None:
    memory = GraphMemory(30)
    cache = ReplayCache(LargeRecorder(), memory)
    replays = {key: cache.get(key, Doubling()) for key in range(3)}
    cache.get(0, Doubling())
    cache.get(3, Doubling())
    assert (len(cache), memory.used) == (3, 30)
    assert cache.get(0, Doubling()) is replays[0]
    assert cache.get(1, Doubling()) is not replays[1]  # it was dropped for 3
    cache.clear()
    assert (len(cache), memory.used) == (0, 0)


def test_caches_share_the_limit() -> None:
    memory = GraphMemory(30)
    first, second = (ReplayCache(LargeRecorder(), memory) for _ in range(2))
    for key in range(3):
        first.get(key, Doubling())
    second.get(0, Doubling())
    assert len(second) == 1  # the recording in use is never dropped
    second.get(1, Doubling())
    assert len(second) == 1
