"""Medusa's heads as one recorded pass: states to the chosen tokens of all heads, with one transfer each way."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.common.device_loop.plan import MAX_REQUESTS, round_up
from foredraft.drafters.common.tree_builder import NodeLogits
from foredraft.drafters.draft import Draft
from foredraft.drafters.medusa.request_tree import MedusaRequest
from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.graphs import Outputs, ReplayCache
from foredraft.kernels.gpu.staging import StagingBlock
from foredraft.sampling import rng
from foredraft.sampling.row_settings import FilterSizes, RowSettings

log = logging.getLogger(__name__)
HeadFunction = Callable[[Tensor, int], Tensor]  # states [R, H], number of heads D -> logits [R, D, W]


@dataclass(frozen=True)
class HeadPlan:
    """Sizes of a recorded pass of the heads."""

    num_requests: int  # rounded up
    depth: int
    width: int  # tokens per head or race
    num_races: int  # of a request, rounded up; 0 = no request samples
    filters: FilterSizes

    @classmethod
    def make(cls, requests: Sequence[MedusaRequest]) -> "HeadPlan":
        random = [entry for entry in requests if entry.is_random]
        # a request that samples, and whose rule has neither q nor common noise, drafts the likeliest tokens
        return cls(
            round_up(len(requests)),
            max(entry.tree.depth for entry in requests),
            max(entry.tree.width for entry in requests),
            round_up(max((len(entry.list_races()) for entry in random), default=0)),
            FilterSizes.measure([entry.request.spec.sampling for entry in random]),
        )


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a recorded pass."""

    plan: HeadPlan
    states: Tensor  # [B, H]
    block: StagingBlock

    @classmethod
    def make(cls, plan: HeadPlan, state: Tensor) -> "HeadInputs":
        """Make the inputs of a plan; `state` [H] is a sample."""
        b, races = plan.num_requests, plan.num_races
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "rows": ((b, races), torch.int64),
            "keys": ((b, races), torch.int64),
            "temperature": ((b,), torch.float64),
            "top_k": ((b,), torch.int64),
            "top_p": ((b,), torch.float64),
            "min_p": ((b,), torch.float64),
        }
        return cls(plan, state.new_zeros(b, len(state)), StagingBlock.make(fields, state.device))

    def fill(self, requests: Sequence[MedusaRequest]) -> None:
        """Write the states, settings and noise keys of some requests."""
        host: Any = {name: x.numpy() for name, x in self.block.host.items()}
        self.block.host_block.zero_()
        host["temperature"].fill(1.0)
        host["top_p"].fill(1.0)
        for b, entry in enumerate(requests):
            if not entry.is_random:
                continue
            s, races = entry.request.spec.sampling, entry.list_races()
            host["temperature"][b], host["top_k"][b] = s.temperature, s.top_k
            host["top_p"][b], host["min_p"][b] = s.top_p, s.min_p
            host["rows"][b, : len(races)] = [b * self.plan.depth + level for _, level in races]
            host["keys"][b, : len(races)] = [entry.derive_key(*race) for race in races]
        self.block.upload()
        torch.stack([entry.state for entry in requests], out=self.states[: len(requests)])


@dataclass(frozen=True)
class HeadPass:
    """The recorded pass. Outputs: all tokens as int64 numbers, and the distributions [B, D, V] if a request samples."""

    compute_logits: HeadFunction
    vocab_size: int
    inputs: HeadInputs

    def __call__(self) -> Outputs:
        plan = self.inputs.plan
        logits = self.compute_logits(self.inputs.states, plan.depth)
        likeliest = self._choose_likeliest(logits)
        if not plan.num_races:
            return (likeliest.flatten(),)
        given, depth = self.inputs.block.device, plan.depth
        names = ("temperature", "top_k", "top_p", "min_p")
        expanded = [given[name][:, None].expand(-1, depth).reshape(-1) for name in names]
        full = NodeLogits(logits.flatten(0, 1), self.vocab_size).to_full_vocab()
        probs = RowSettings(plan.filters, *expanded).compute_probs(full)
        raced = rng.exponential_race(probs.index_select(0, given["rows"].flatten()), given["keys"].flatten())
        best = raced.topk(min(plan.width, raced.shape[-1]), -1)
        sampled = torch.where(best.values > 0, best.indices, -1)
        return torch.cat([likeliest.flatten(), sampled.flatten()]), probs.view(plan.num_requests, depth, -1)

    def _choose_likeliest(self, logits: Tensor) -> Tensor:
        x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if self.inputs.plan.width <= 1:
            top, index = x.max(-1)
            return torch.where(top.isfinite(), index, -1)[:, :, None]
        return x.topk(min(self.inputs.plan.width, x.shape[-1]), -1).indices


@dataclass
class MedusaLoop:
    """Recorded passes of Medusa's heads.

    Args:
        compute_logits: the heads.
        vocab_size: V of the target.
        cache: recordings.
    """

    compute_logits: HeadFunction
    vocab_size: int
    cache: ReplayCache
    num_replays: int = 0
    _inputs: dict[HeadPlan, HeadInputs] = field(default_factory=dict)
    _is_refused: bool = False  # whether a recording failed

    @torch.inference_mode()
    def draft(self, requests: Sequence[MedusaRequest]) -> list[Draft] | None:
        """Draft for some requests; None if the pass does not take them."""
        if self._is_refused or len(requests) > MAX_REQUESTS or any(map(_is_special, requests)):
            return None
        plan = HeadPlan.make(requests)
        if plan not in self._inputs:
            self._inputs[plan] = HeadInputs.make(plan, requests[0].state)
        inputs = self._inputs[plan]
        inputs.fill(requests)
        try:
            replay = self.cache.get(plan, HeadPass(self.compute_logits, self.vocab_size, inputs))
        except (RuntimeError, ForedraftError) as error:
            log.warning("the heads run one operator after another, because they cannot be recorded: %s", error)
            self._is_refused = True
            return None
        replay()
        self.num_replays += 1
        return _fill_drafts(plan, requests, replay.outputs)


def _is_special(entry: MedusaRequest) -> bool:
    return entry.shapes_logits or (entry.is_random and entry.request.spec.sampling.typical_p < 1)


def _fill_drafts(plan: HeadPlan, requests: Sequence[MedusaRequest], outputs: Outputs) -> list[Draft]:
    """Make the draft of every request from the outputs of a pass."""
    numbers = outputs[0].cpu()
    b, heads = plan.num_requests, plan.num_requests * plan.depth
    rows = heads + b * plan.num_races
    width = len(numbers) // rows
    likeliest = numbers[: heads * width].view(b, plan.depth, width).tolist()
    if not plan.num_races:
        return [entry.fill_likeliest(ids) for entry, ids in zip(requests, likeliest, strict=False)]
    sampled = numbers[heads * width :].view(b, plan.num_races, width).tolist()
    q = outputs[1]  # `fill_sampled` copies the rows
    return [
        entry.fill_sampled(sampled[i], q[i]) if entry.is_random else entry.fill_likeliest(likeliest[i])
        for i, entry in enumerate(requests)
    ]
