"""Native form of the small networks that draft from the target's last state: one call per step, or one for all steps.

The networks are the MLP speculator with an MLP or an LSTM cell, Hydra's heads, and blockwise heads. A step reads a
state and a token per row, and computes the next states and the logits of the next tokens. Whole chains have the bits of
single steps. Products have the bits of the network on torch's operators; norms and activations differ by rounding.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.kernels.cpu.records import (
    HeadStepRecord,
    NormRecord,
    StepNetworkRecord,
    StepPassRecord,
    StepRootsRecord,
    WeightRecord,
)
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight
from foredraft.kernels.scratch import ScratchPool
from foredraft.models.native.draft_plans import DraftPlan, DraftTokens, PackedDrafts


class StepKind(IntEnum):
    """Kinds of networks, with the values of foredraft.h."""

    MLP = 0
    LSTM = 1
    HEADS = 2
    PARALLEL = 3


@dataclass(frozen=True)
class StepWeights:
    """Weights of one step. Those that its kind does not have are None or empty."""

    head: PackedWeight
    input: PackedWeight | None = None  # product with the state, or with the state and all embeddings
    blocks: tuple[PackedWeight, ...] = ()  # products after it
    norm: tuple[Tensor, Tensor] | None = None  # scale and shift, float32
    cell_norm: tuple[Tensor, Tensor] | None = None  # of the LSTM's candidate
    embedding: Tensor | None = None  # [V, width] bfloat16 or float32; those of all steps have one dtype

    def list_tensors(self) -> list[Tensor]:
        """List the tensors to which a record points beside the packed weights."""
        return [*(self.norm or ()), *(self.cell_norm or ()), *([] if self.embedding is None else [self.embedding])]

    def build_record(self) -> HeadStepRecord:
        """Build the record, which is valid as long as the weights live."""
        blocks = (WeightRecord * len(self.blocks))(*(weight.record for weight in self.blocks))
        norm, cell_norm = (
            NormRecord(*(x.data_ptr() for x in tensors or ())) for tensors in (self.norm, self.cell_norm)
        )
        return HeadStepRecord(
            input=WeightRecord() if self.input is None else self.input.record,
            norm=norm,
            cell_norm=cell_norm,
            embedding=None if self.embedding is None else self.embedding.data_ptr(),
            blocks=ctypes.cast(blocks, ctypes.POINTER(WeightRecord)),
            head=self.head.record,
            num_blocks=len(self.blocks),
        )


@dataclass(frozen=True)
class NativeStepNetwork:
    """Step network in the native layout. Thread-safe: every call has its own scratch memory."""

    native: NativeLibrary
    record: StepNetworkRecord
    kind: StepKind
    num_tokens: int | None  # tokens with an embedding; None = the network reads no tokens
    num_logits: int  # W
    widths: tuple[int, ...]  # by step, width of the states that it reads; then that of the last step's states
    kept: tuple[Any, ...]  # memory to which the record points
    scratch: ScratchPool = field(default_factory=ScratchPool)

    @classmethod
    def from_steps(
        cls,
        kind: StepKind,
        steps: Sequence[StepWeights],
        hidden: int,
        inner: int = 0,
        num_heads: int | None = None,
        input_weight: Tensor | None = None,
        token_share: float = 0.0,
        eps: float = 0.0,
    ) -> "NativeStepNetwork":
        """Build the network.

        Args:
            kind: kind of the network.
            steps: weights of every step. PARALLEL has one for all.
            hidden: H, width of the target's states.
            inner: width of the cell's states. Default 0 = no cell.
            num_heads: heads of PARALLEL. Default None = as many as there are steps.
            input_weight: [H] float32 factor of the normed target state. Default None = no norm.
            token_share: factor of an embedding that is added to a state.
            eps: of the norms.
        """
        native = load_library()
        assert native is not None, "the caller has packed weights for the library"
        if not all(tensor.is_contiguous() for step in steps for tensor in step.list_tensors()):
            raise ValueError("norms and embeddings of a native step network are contiguous")
        records = (HeadStepRecord * len(steps))(*(step.build_record() for step in steps))
        embeddings = [step.embedding for step in steps if step.embedding is not None]
        num_steps = len(steps) if num_heads is None else num_heads
        record = StepNetworkRecord(
            steps=ctypes.cast(records, ctypes.POINTER(HeadStepRecord)),
            input_weight=None if input_weight is None else input_weight.data_ptr(),
            kind=kind,
            num_steps=num_steps,
            hidden=hidden,
            inner=inner,
            has_bf16_embedding=bool(embeddings) and embeddings[0].dtype == torch.bfloat16,
            token_share=token_share,
            eps=eps,
        )
        widths = {
            StepKind.MLP: [hidden, *[inner] * num_steps],
            StepKind.LSTM: [hidden, *[2 * inner] * num_steps],
            StepKind.HEADS: [hidden * step for step in range(1, num_steps + 2)],
            StepKind.PARALLEL: [hidden] * (num_steps + 1),
        }
        num_tokens = min(map(len, embeddings)) if embeddings else None
        kept = (*steps, records, input_weight)
        return cls(native, record, kind, num_tokens, steps[0].head.n, tuple(widths[kind]), kept)

    @property
    def num_steps(self) -> int:
        return len(self.widths) - 1

    def forward(self, step: int, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one step; of PARALLEL heads, all heads.

        Args:
            step: index of the step.
            states: states [R, width] that it reads, float32.
            tokens: R tokens after them; PARALLEL reads none.

        Returns:
            The next states [R, width], and logits [R, W] of the next tokens. Of PARALLEL heads its states, and logits
            [R, D, W].

        Raises:
            IndexError: a token has no embedding.
            ValueError: `states` has another shape or dtype.
        """
        self._check_tokens(tokens)
        size = len(states)
        if states.shape != (size, self.widths[step]) or states.dtype != torch.float32:
            raise ValueError(f"step {step} reads float32 states of width {self.widths[step]}")
        states, is_block = states.contiguous(), self.kind is StepKind.PARALLEL
        following = states if is_block else torch.empty(size, self.widths[step + 1])
        logits = torch.empty(size, *([self.num_steps] if is_block else []), self.num_logits)
        numbers = array("i", tokens)
        self.native.sync_threads()
        scratch = self.scratch.take(self.native.handle.fd_step_scratch(self.record, size))
        job = StepPassRecord(
            states.data_ptr(),
            numbers.buffer_info()[0],
            following.data_ptr(),
            logits.data_ptr(),
            scratch.data_ptr(),
            step,
            size,
        )
        self.native.handle.fd_forward_step(self.record, job)
        self.scratch.give_back(scratch)
        return following, logits

    def draft(
        self, plans: Sequence[DraftPlan], states: Sequence[Tensor], tokens: Sequence[int], vocab_size: int
    ) -> DraftTokens | None:
        """Draft a chain for every request.

        Args:
            plans: B plans, at most as deep as there are steps.
            states: B target states [H], bfloat16 or float32.
            tokens: B tokens after them, the roots.
            vocab_size: V.

        Returns:
            The tokens; None if rounding decides one of them, which is left to the reference.

        Raises:
            IndexError: a token has no embedding.
            MemoryError: there is no memory to sample.
        """
        self._check_tokens(tokens)
        dtype = states[0].dtype
        if dtype not in DTYPE_KINDS or not all(state.is_contiguous() for state in states):
            dtype, states = torch.float32, [state.float().contiguous() for state in states]
        drafts = PackedDrafts.pack(plans, min(self.num_logits, vocab_size), vocab_size)
        addresses = array("q", [state.data_ptr() for state in states])
        numbers = array("i", tokens)
        self.native.sync_threads()
        handle = self.native.handle
        scratch = self.scratch.take(handle.fd_step_chain_scratch(self.record, drafts.record))
        job = StepRootsRecord(
            addresses.buffer_info()[0], numbers.buffer_info()[0], scratch.data_ptr(), dtype == torch.bfloat16
        )
        status = handle.fd_draft_steps(self.record, drafts.record, job)
        self.scratch.give_back(scratch)
        return drafts.read(status)

    def can_draft(self, vocab_size: int) -> bool:
        """Return whether the network has an embedding for every token that it drafts."""
        return self.num_tokens is None or min(self.num_logits, vocab_size) <= self.num_tokens

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if self.num_tokens is not None and not all(0 <= token < self.num_tokens for token in tokens):
            raise IndexError(f"a token id is outside the vocabulary of {self.num_tokens} tokens")
