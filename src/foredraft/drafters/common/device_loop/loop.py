"""Draft loop of a drafter on a device: plans, records and replays it, and rebuilds the drafts on the host.

The whole loop is one transfer to the device, one replay and one transfer back. The host then gives the children to the
same `TreeBuilder` that grows drafts level by level, and asserts that the device expanded the nodes that it expands.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.common.device_loop.inputs import DraftLoopInputs
from foredraft.drafters.common.device_loop.plan import LoopPlan, plan_loop
from foredraft.drafters.common.device_loop.recording import LoopFunction, LoopNetwork, read_results
from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.level_loop import GrowingDraft
from foredraft.drafters.common.tree_builder import ScoredChild, TreeSpec
from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.graphs import GraphMemory, Outputs, Recorder, ReplayCache, make_recorder
from foredraft.kv.pool import KVPool

log = logging.getLogger(__name__)
GRAPH_MEMORY = 1 << 30  # bytes that the recordings of a drafter may take


@dataclass
class DraftLoop:
    """Recorded loops of one drafter.

    Args:
        network: the draft network.
        tree_spec: shape of the drafter's trees.
        recorder: recorder of the device.
        pool: its KV cache; None = it has none.
    """

    network: LoopNetwork
    tree_spec: TreeSpec
    recorder: Recorder
    pool: KVPool | None = None
    num_replays: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # reason -> number of proposals that grew level by level
    _inputs: dict[LoopPlan, DraftLoopInputs] = field(default_factory=dict)
    _cache: ReplayCache | None = None  # made at the first recording
    _layout_version: int = -1  # of the KV cache, when the recordings were made
    _is_refused: bool = False  # whether a recording failed

    @torch.inference_mode()
    def grow(self, drafts: Sequence[GrowingDraft], roots: Sequence[Tensor], page_size: int = 0) -> bool:
        """Grow all drafts to their end.

        Args:
            drafts: drafts with their roots only; with KV entries if the network has a KV cache.
            roots: what the network reads of every root, in the order of the drafts: [b, ..] each.
            page_size: tokens per KV page. Default 0 = no KV cache.

        Returns:
            False if these drafts have to grow level by level. They are as before then.
        """
        starts = None if self.pool is None else [d.start for d in drafts if isinstance(d, GrowingKVDraft)]
        plan = self._make_plan(drafts, starts)
        if isinstance(plan, LoopPlan):
            outputs = self._run(plan, drafts, starts, roots, page_size)
            if outputs is not None:
                self._rebuild(plan, drafts, outputs)
                return True
            plan = "a pass that cannot be recorded"
        self.refusals[plan] = self.refusals.get(plan, 0) + 1
        return False

    def _make_plan(self, drafts: Sequence[GrowingDraft], starts: Sequence[int] | None) -> LoopPlan | str:
        if self._is_refused:
            return "a pass that cannot be recorded"
        if self.pool is not None and not self._keeps_addresses(self.pool):
            return "a KV cache that may still grow"
        ends = None if starts is None else [start + 1 for start in starts]
        return plan_loop([draft.builder for draft in drafts], self.tree_spec, ends, self.network.vocab_size)

    def _keeps_addresses(self, pool: KVPool) -> bool:
        """Return whether the KV cache is whole and has kernels; drop the recordings if it has moved."""
        if self._cache is not None and self._layout_version != pool.layout_version:
            self._cache.clear()
        self._layout_version = pool.layout_version
        return bool(pool.layers) and pool.is_whole and pool.kernels is not None

    def _run(
        self, plan: LoopPlan, drafts: Sequence[GrowingDraft], starts: Sequence[int] | None, roots: Sequence[Tensor],
        page_size: int,
    ) -> Outputs | None:  # fmt: skip
        """Replay the recording of a plan. The outputs last until the next replay; None if it cannot be recorded."""
        if plan not in self._inputs:
            self._inputs[plan] = DraftLoopInputs.make(plan, page_size, roots)
        inputs = self._inputs[plan]
        inputs.fill([draft.builder for draft in drafts], starts, roots)
        try:
            replay = self._find_cache().get(plan, LoopFunction(self.network, inputs))
        except (RuntimeError, ForedraftError) as error:  # a wait for the device, an operator that cannot be captured
            log.warning("drafts grow level by level, because their loop cannot be recorded: %s", error)
            self._is_refused = True
            return None
        replay()
        self.num_replays += 1
        return replay.outputs

    def _find_cache(self) -> ReplayCache:
        """Return the recordings. They share the memory of the engine's, if the KV cache has it."""
        if self._cache is None:
            memory = None if self.pool is None else self.pool.graph_memory
            self._cache = ReplayCache(self.recorder, memory or GraphMemory(GRAPH_MEMORY))
        return self._cache

    def _rebuild(self, plan: LoopPlan, drafts: Sequence[GrowingDraft], outputs: Outputs) -> None:
        """Give the children that the device chose to the builders, level by level."""
        numbers, *q = outputs
        shapes = plan.list_level_shapes()
        levels = read_results(numbers.cpu(), shapes, plan.num_requests)
        probs = [x.view(plan.num_requests, -1, x.shape[-1]) for x in q]  # `to_draft` copies the rows
        for i, level in enumerate(levels):
            for b, draft in enumerate(drafts):
                places = [place for place, node in enumerate(level.nodes[b]) if node >= 0]
                builder = draft.builder
                assert [level.nodes[b][place] for place in places] == builder.frontier, "other nodes were expanded"
                if not places:
                    continue
                if i and isinstance(draft, GrowingKVDraft):
                    offsets = [level.offsets[b][place] for place in places]
                    assert offsets == draft.assign_offsets(), "other KV positions were used"
                if builder.uses_q:
                    builder.draft_probs |= {level.nodes[b][place]: probs[i][b, place] for place in places}
                builder.add_children([_pair_up(level.tokens[b][p], level.log_probs[b][p]) for p in places])
        assert not any(draft.builder.frontier for draft in drafts), "a draft is not at its end"


def _pair_up(tokens: Sequence[int], log_probs: Sequence[float]) -> list[ScoredChild]:
    return [pair for pair in zip(tokens, log_probs, strict=True) if pair[0] >= 0]


def make_replay_cache(device: torch.device) -> ReplayCache | None:
    """Make the cache of a drafter's recordings; None if the device has none, as a CPU."""
    recorder = make_recorder(device)
    return None if recorder is None else ReplayCache(recorder, GraphMemory(GRAPH_MEMORY))


def make_draft_loop(
    network: LoopNetwork, tree_spec: TreeSpec, device: torch.device, pool: KVPool | None = None
) -> DraftLoop | None:
    """Make the recorded loop of a drafter.

    Args:
        network: the draft network.
        tree_spec: shape of the drafter's trees.
        device: device of the network.
        pool: its KV cache. Default None = it has none.

    Returns:
        The loop; None if the drafts grow level by level: on a CPU, and on a GPU without Triton kernels for the cache.
    """
    recorder = make_recorder(device) if pool is None else pool.recorder
    return None if recorder is None else DraftLoop(network, tree_spec, recorder, pool)
