"""Recorded launches of a pass, which are repeated by one call instead of hundreds: CUDA graphs.

A recording reads and writes fixed addresses. The caller changes the contents of its inputs in place, replays it, and
reads the same output tensors again. On a machine without CUDA, `CallingRecorder` has the same contract and calls the
function at every replay, so that a test finds padding that leaks and outputs that are kept too long.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
GRAPHS_VARIABLE = "FOREDRAFT_GRAPHS"  # environment variable: 0 = no CUDA graphs
WARM_UP_RUNS = 2  # before a capture: the first compiles kernels and creates handles, the second allocates as usual


class RecordedLaunches(Protocol):
    """Recorded pass. `outputs` are overwritten by every replay."""

    outputs: Outputs

    def __call__(self) -> None: ...


class Recorder(Protocol):
    """Makes recordings of one device."""

    def record(self, run: Callable[[], Outputs]) -> RecordedLaunches:
        """Record a function.

        Args:
            run: launches kernels on fixed inputs and returns its outputs. It must not wait for the device, and must
                allow repeated runs: it is run several times before it is recorded.

        Raises:
            RuntimeError: the function cannot be recorded, such as one that waits for the device.
        """

    def count_bytes(self) -> int:
        """Return the memory of the device in use or held by its allocator, in bytes."""


@dataclass
class CallingReplay:
    """RecordedLaunches that calls the function and copies the results to the outputs of its first call."""

    run: Callable[[], Outputs]
    outputs: Outputs

    def __call__(self) -> None:
        for output in self.outputs:
            output.fill_(torch.nan if output.is_floating_point() else -1)  # a stale reader fails
        for output, result in zip(self.outputs, self.run(), strict=True):
            output.copy_(result)


class CallingRecorder:
    """Recorder without CUDA, for tests."""

    def record(self, run: Callable[[], Outputs]) -> CallingReplay:
        return CallingReplay(run, tuple(output.clone() for output in run()))

    def count_bytes(self) -> int:
        return 0


@dataclass
class CapturedReplay:
    """CUDA graph with its outputs."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class CUDARecorder:
    """Recorder of CUDA graphs. They share one memory pool: only one of them runs at a time, on one stream."""

    device: torch.device
    _pool: Any = None  # handle of the memory pool, after the first recording

    def record(self, run: Callable[[], Outputs]) -> CapturedReplay:
        with torch.cuda.device(self.device):
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # other threads may allocate or copy meanwhile: only this thread's waits are errors
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = run()
        return CapturedReplay(graph, outputs)

    def _warm_up(self, run: Callable[[], Outputs]) -> None:
        """Run outside of a capture, on a stream of its own as a capture does."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)

    def count_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def make_recorder(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None if it has no graphs, as a CPU, or with FOREDRAFT_GRAPHS=0."""
    has_graphs = device.type == "cuda" and os.environ.get(GRAPHS_VARIABLE) != "0"
    return CUDARecorder(device) if has_graphs else None


@dataclass
class GraphMemory:
    """Memory that the recordings of one engine may take together. Target and drafters share it."""

    limit: int  # bytes
    used: int = 0  # bytes


@dataclass
class ReplayCache:
    """Recordings of one function at several sizes, made on first use.

    Above the limit of memory, the recordings of this cache that were not used for the longest time are dropped.
    """

    recorder: Recorder
    memory: GraphMemory
    _replays: OrderedDict[Hashable, tuple[RecordedLaunches, int]] = field(default_factory=OrderedDict)  # with its bytes

    def __len__(self) -> int:
        return len(self._replays)

    def get(self, key: Hashable, run: Callable[[], Outputs]) -> RecordedLaunches:
        """Return the recording of a key. It is made from `run` if there is none. Raises as `Recorder.record`."""
        if key in self._replays:
            self._replays.move_to_end(key)
            return self._replays[key][0]
        before = self.recorder.count_bytes()
        replay = self.recorder.record(run)
        size = max(self.recorder.count_bytes() - before, 0)
        self._replays[key] = replay, size
        self.memory.used += size
        while self.memory.used > self.memory.limit and len(self._replays) > 1:
            _, (_, dropped) = self._replays.popitem(last=False)
            self.memory.used -= dropped
        return replay

    def clear(self) -> None:
        """Drop all recordings, such as before the tensors that they read are freed."""
        self.memory.used -= sum(size for _, size in self._replays.values())
        self._replays.clear()
