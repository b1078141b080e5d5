"""Recurrent parts of layers by the native kernel: gated delta nets, Mamba-2 and short convolutions."""

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.cpu.records import MixerRecord, MixingRecord, RunsRecord

DELTA, MAMBA2, SHORT_CONV = range(3)  # kinds, as in foredraft.h
MAX_TAPS = 8  # inputs of a convolution, as in recurrent.h


@dataclass(frozen=True)
class NativeRuns:
    """Runs of packed rows in the layout of the native code."""

    record: RunsRecord
    numbers: Tensor  # [6, n] keeps the record's memory alive

    @classmethod
    def pack(
        cls, first_rows: Sequence[int], lengths: Sequence[int], start_states: Sequence[int], end_states: Sequence[int]
    ) -> "NativeRuns":
        """Pack n runs. A run whose end state is the start state of another one stands before it.

        Args:
            first_rows: [n] first packed row.
            lengths: [n] number of rows, which are consecutive.
            start_states: [n] ids of the states before the first rows; 0 = the null state.
            end_states: [n] ids of the states after the last rows.
        """
        slots = _choose_slots(lengths, start_states, end_states)
        numbers = torch.tensor([first_rows, lengths, start_states, end_states, *slots], dtype=torch.int32)
        first, stride = numbers.data_ptr(), numbers.shape[1] * numbers.itemsize
        return cls(RunsRecord(numbers.shape[1], *(first + i * stride for i in range(len(numbers)))), numbers)


def _choose_slots(
    lengths: Sequence[int], start_states: Sequence[int], end_states: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Choose slots for the states that later rows of the pass read.

    Returns:
        [n] slot of the state after each run, and slot of the state before it; -1 = none.
    """
    readers: dict[int, int] = Counter(start_states)  # start state -> runs that have not read it
    slots, start_slots = [], []
    places: dict[int, int] = {}  # state -> its slot
    free: list[int] = []
    num_slots = 0
    for length, start, end in zip(lengths, start_states, end_states, strict=True):
        start_slots.append(places.get(start, -1))
        readers[start] -= 1
        if start in places and not readers[start]:
            free.append(places.pop(start))  # this run may write its own state over that
        slot = -1
        if length > 1 or readers[end]:
            slot = free.pop() if free else num_slots
            num_slots = max(num_slots, slot + 1)
        if slot >= 0 and readers[end]:
            places[end] = slot
        elif slot >= 0:
            free.append(slot)
        slots.append(slot)
    return slots, start_slots


@dataclass(frozen=True)
class MixerKernel:
    """Recurrent part of one layer, without its projections."""

    record: MixerRecord
    tensors: tuple[Tensor, ...]  # keep the record's memory alive

    @property
    def conv_size(self) -> tuple[int, int]:
        """Size of a state of the convolution: inputs before the next one, the oldest first, and channels."""
        return self.record.taps - 1, self.record.channels

    @property
    def state_size(self) -> tuple[int, int, int] | None:
        """Size of a state of the recurrence, in the order of the native code; None = there is none."""
        if self.record.kind == SHORT_CONV:
            return None
        return self.record.heads, self.record.key_dim, self.record.value_dim

    def run(self, projected: Tensor, runs: NativeRuns, conv_states: Tensor, states: Tensor | None) -> Tensor:
        """Advance the states of all runs.

        Args:
            projected: [T, width], float32, contiguous; its inputs of the convolution are overwritten.
            runs: runs of the T rows.
            conv_states: [S, *conv_size], float32. The end states are written.
            states: [S, *state_size], float32; None for a short convolution.

        Returns:
            Inputs [T, inner] of the output projection, float32.

        Raises:
            ForedraftError: the native kernels are not installed.
        """
        native = load_library()
        if native is None:
            raise ForedraftError("the native kernels are not installed; run: python -m foredraft.kernels.cpu.build")
        assert projected.is_contiguous(), "rows are contiguous"
        assert projected.dtype == torch.float32, "rows are float32"
        out = torch.empty(len(projected), self.record.inner, dtype=torch.float32)
        native.sync_threads()
        job = MixingRecord(
            mixer=ctypes.pointer(self.record),
            runs=ctypes.pointer(runs.record),
            projected=projected.data_ptr(),
            conv_states=conv_states.data_ptr(),
            states=None if states is None else states.data_ptr(),
            out=out.data_ptr(),
            num_rows=len(projected),
        )
        native.handle.fd_mix(job)
        return out
