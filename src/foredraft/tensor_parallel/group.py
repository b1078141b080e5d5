"""Rank 0's access to all ranks: messages, passes of all together, and whole parameters."""

import itertools
import signal
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from foredraft.models.hf import HFModel
from foredraft.models.truncated_modules import Adapter
from foredraft.tensor_parallel.messages import AddExit, DropPool, GatherParameter, Message
from foredraft.tensor_parallel.process_group import wait_for_device
from foredraft.tensor_parallel.processes import RankProcesses
from foredraft.tensor_parallel.shard import broadcast_weights, gather_parameter
from foredraft.tensor_parallel.task import RankTask


class RankGroup:
    """All ranks of one model, for rank 0.

    The processes end with the last KV pool that is closed, with the last reference, and with the interpreter.

    Ranks are in step only if each pass of this process is one of all others. So after an error in the middle of a pass
    the group is lost: every later use raises TargetLostError.
    """

    def __init__(self, size: int) -> None:
        """Start the other processes; `load` gives them the model.

        Args:
            size: number of ranks.
        """
        self.size = size
        self._processes = RankProcesses(size)
        weakref.finalize(self, self._processes.end)
        self._lock = threading.RLock()  # one pass at a time: collectives have an order
        self._device = torch.device("cpu")
        self._pool_indices = itertools.count()
        self._open_pools: set[int] = set()
        self._exit_indices = itertools.count()
        self._dropped_pools: deque[int] = deque()  # the garbage collector appends, the next message goes first
        self._whole_parameters: dict[str, Tensor] = {}

    @property
    def process_ids(self) -> list[int]:
        """Operating-system ids of the other processes, by rank."""
        return self._processes.process_ids

    def load(self, model: str, name: str, dtype: str | torch.dtype, device: torch.device) -> HFModel:
        """Load the model, a part of it in each process. Returns the part of this process.

        Args:
            model: folder or hub id.
            name: name of the model in errors.
            dtype: dtype of the weights or its name.
            device: device of rank 0.

        Raises:
            ForedraftError: the model cannot be loaded, or a process has failed.
        """
        self._device = device
        with tempfile.TemporaryDirectory(prefix="foredraft-") as folder:
            store, num_threads = str(Path(folder) / "store"), max(1, torch.get_num_threads() // self.size)
            tasks = [
                RankTask(rank, self.size, model, name, dtype, device.type, store, num_threads)
                for rank in range(self.size)
            ]
            self._processes.load(tasks[1:])
            with self.run_together():
                lm = tasks[0].load()
            self._processes.wait_for_reports()
        return lm

    @contextmanager
    def run_together(self, message: Message | None = None) -> Iterator[None]:
        """Run something with collectives, together with the other ranks.

        Args:
            message: what the other ranks run. Default None = they run it already.

        Raises:
            TargetLostError: a process has failed, or this one in the middle.
        """
        with self._lock, _defer_interrupts():
            try:
                if message is not None:
                    self._send(message)
                yield
                wait_for_device(self._device)
            except BaseException as error:
                self._processes.record_failure(error)
                if isinstance(error, RuntimeError):  # how torch reports a collective whose other side is gone
                    self._processes.check()
                raise
            self._processes.check()

    def send(self, message: Message) -> None:
        """Let the other ranks run something without collectives."""
        with self._lock:
            self._send(message)

    def add_pool(self) -> int:
        """Return the index of a new KV pool."""
        index = next(self._pool_indices)
        self._open_pools.add(index)
        return index

    def close_pool(self, index: int) -> None:
        """End the processes if no other pool is open."""
        with self._lock:
            self._open_pools.discard(index)
            if not self._open_pools.difference(self._dropped_pools):
                self._processes.end()

    def drop_pool_with(self, owner: object, index: int) -> None:
        """Let the other ranks forget a pool once its owner is gone."""
        weakref.finalize(owner, self._dropped_pools.append, index).atexit = False

    def add_exit(self, num_layers: int, adapter: Adapter | None) -> int:
        """Prepare passes through the first layers on all ranks, with the same adapter. Returns their index."""
        index = next(self._exit_indices)
        sizes = None if adapter is None else adapter.sizes
        with self.run_together(AddExit(index, num_layers, sizes)):
            if adapter is not None:
                broadcast_weights(adapter)
        return index

    def gather(self, model: Any, parameter: Tensor) -> Tensor:
        """Return a whole parameter of the model, which stays on rank 0 from then on."""
        name = next(name for name, value in model.named_parameters() if value is parameter)
        with self._lock:
            if name not in self._whole_parameters:
                with self.run_together(GatherParameter(name)):
                    self._whole_parameters[name] = gather_parameter(parameter)
            return self._whole_parameters[name]

    def _send(self, message: Message) -> None:
        self._processes.check()
        while self._dropped_pools:
            index = self._dropped_pools.popleft()
            self._open_pools.discard(index)
            self._processes.send(DropPool(index))
        self._processes.send(message)


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Let Ctrl-C act after the block: an interrupted pass could not be finished together with the other ranks."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
