"""Recorded launches of a pass, which are repeated by one call instead of hundreds: CUDA graphs.

A recording reads and writes fixed addresses. The caller changes the contents of its inputs in place, replays it, and
reads the same output tensors again. On a machine without CUDA, `CallingRecorder` has the same contract and calls the
function at every replay, so that a test finds padding that leaks and outputs that are kept too long.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
GRAPHS_VARIABLE = "FOREDRAFT_GRAPHS"  # environment variable: 0 = no CUDA graphs
WARM_UP_RUNS = 2  # before a capture: the first compiles kernels and creates handles, the second allocates as usual


class RecordedLaunches(Protocol):
    """Recorded pass. `outputs` are overwritten by every replay."""

    @property
    def outputs(self) -> Outputs: ...

    @property
    def num_bytes(self) -> int: ...  # memory of the device that the recording keeps

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


@dataclass
class CallingReplay:
    """RecordedLaunches that calls the function and copies the results to the outputs of its first call."""

    run: Callable[[], Outputs]
    outputs: Outputs

    @property
    def num_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)

    def __call__(self) -> None:
        for output in self.outputs:
            output.fill_(torch.nan if output.is_floating_point() else -1)  # a stale reader fails
        for output, result in zip(self.outputs, self.run(), strict=True):
            output.copy_(result)


class CallingRecorder:
    """Recorder without CUDA, for tests."""

    def record(self, run: Callable[[], Outputs]) -> CallingReplay:
        return CallingReplay(run, tuple(output.clone() for output in run()))


@dataclass
class CapturedReplay:
    """CUDA graph with its outputs."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs
    num_bytes: int

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class CUDARecorder:
    """Recorder of CUDA graphs. They share one memory pool: only one of them runs at a time, on one stream."""

    device: torch.device
    _pool: Any = None  # handle of the memory pool, after the first recording
    _stream: Any = None  # of warm-ups and captures, after the first recording
    CAPTURE_LOCK: ClassVar[Lock] = Lock()  # torch allows one capture at a time in a process

    def record(self, run: Callable[[], Outputs]) -> CapturedReplay:
        current = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device), self.CAPTURE_LOCK:
                if self._stream is None:
                    self._pool, self._stream = torch.cuda.graph_pool_handle(), _make_stream()
                self._warm_up(run)
                return self._capture(run)
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its own stream as the current one

    def _warm_up(self, run: Callable[[], Outputs]) -> None:
        """Run outside of a capture, on the stream of the capture, and free what the runs have cached."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _capture(self, run: Callable[[], Outputs]) -> CapturedReplay:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        # other threads may allocate or copy meanwhile: only this thread's waits are errors
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return CapturedReplay(graph, outputs, max(torch.cuda.memory_reserved() - before, 0))


def _make_stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


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
    _replays: OrderedDict[Hashable, RecordedLaunches] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._replays)

    def get(self, key: Hashable, run: Callable[[], Outputs]) -> RecordedLaunches:
        """Return the recording of a key. It is made from `run` if there is none. Raises as `Recorder.record`."""
        if key in self._replays:
            self._replays.move_to_end(key)
            return self._replays[key]
        replay = self._replays[key] = self.recorder.record(run)
        self.memory.used += replay.num_bytes
        while self.memory.used > self.memory.limit and len(self._replays) > 1:
            _, dropped = self._replays.popitem(last=False)
            self.memory.used -= dropped.num_bytes
        return replay

    def clear(self) -> None:
        """Drop all recordings, such as before the tensors that they read are freed."""
        self.memory.used -= sum(replay.num_bytes for replay in self._replays.values())
        self._replays.clear()
