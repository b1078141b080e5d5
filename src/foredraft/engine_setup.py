"""Setup of an engine: a target, a drafter and limits in, an engine with KV memory for both out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.length_table import AUTO_LENGTHS
from foredraft.draft_length.loss_budget import LossBudgetPolicy
from foredraft.draft_length.policy import DraftLengthPolicy, FixedLengthPolicy
from foredraft.drafter_factory import DrafterFactory
from foredraft.drafters.interface import Drafter
from foredraft.drafters.spec import NO_DRAFT_SPEC
from foredraft.drafters.user_spec import (
    DraftLength,
    UserDrafterSpec,
    get_max_draft_length,
    names_method,
    parse_length_table,
)
from foredraft.engine.engine import Engine
from foredraft.engine.scheduler import SchedulerLimits
from foredraft.kernels.gpu.graphs import GraphMemory
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import KVPool
from foredraft.kv.sizing import MemoryLimits
from foredraft.kv.state_sizing import StatePlan

log = logging.getLogger(__name__)

MAX_GRAPH_BYTES = 2 << 30  # memory of the CUDA graphs of an engine


@dataclass(frozen=True)
class EngineSetup:
    """Engine of one target with one drafter."""

    engine: Engine
    drafter: Drafter | None  # as the user gave it, without a sandbox; None = plain decoding
    drafter_name: str
    is_adaptive: bool  # draft lengths are chosen at every step

    @classmethod
    def make(
        cls,
        drafters: DrafterFactory,
        user_spec: UserDrafterSpec,
        num_tokens: DraftLength,
        limits: MemoryLimits,
        is_debug: bool,
    ) -> "EngineSetup":
        """Make the drafter of a specification and an engine for it, and size the KV memory of both.

        Args:
            drafters: factory for the target.
            user_spec: method name, dict of options, drafter object or None.
            num_tokens: draft lengths in tokens, as `LengthTable.parse` takes them.
            limits: sizes of KV memory and steps.
            is_debug: whether to check invariants after every step.

        Raises:
            ForedraftError: for a drafter that cannot be used, or a model that does not fit into memory.
        """
        target = drafters.target
        lengths = parse_length_table(user_spec, num_tokens)
        longest = get_max_draft_length(user_spec) if lengths.most is None else lengths.most
        drafter, name = drafters.make(user_spec, longest)
        spec = NO_DRAFT_SPEC if drafter is None else drafter.spec
        if spec.attach is not None:  # the drafter uses the KV pool of the target
            spec.attach(target)
        # Lengths of a drafter object adapt only if bounds are given: all its lengths may be those of its author.
        has_author = not names_method(user_spec) and lengths == AUTO_LENGTHS
        is_adaptive = drafter is not None and not lengths.is_fixed and not has_author
        memory = spec.draft_kv
        per_token = target.bytes_per_token() + (0 if memory is None else memory.bytes_per_token)
        pools = [target.pool, *([] if memory is None else [memory.pool])]
        states = _plan_states(pools, limits, spec.max_nodes, target.device)
        num_pages = limits.num_pages(target.context_length, per_token, target.device, states.num_bytes)
        graph_memory = GraphMemory(MAX_GRAPH_BYTES)
        for pool in pools:
            pool.capacity = num_pages * limits.page_size
            pool.graph_memory = graph_memory
        engine = Engine(
            target,
            drafters.with_predictions(drafter, name),
            PageAllocator(num_pages, limits.page_size),
            SchedulerLimits(
                states.max_batch,
                limits.max_step_tokens,
                draft_limits=lengths.lift(longest) if names_method(user_spec) else lengths,
            ),
            target.device,
            is_debug=is_debug,
            prefix_cache=limits.prefix_cache,
            length_policy=FixedLengthPolicy() if not is_adaptive else create_length_policy(drafter, target.row_buckets),
        )
        return cls(engine, drafter, name, is_adaptive)


def _plan_states(pools: Sequence[KVPool], limits: MemoryLimits, max_nodes: int, device: torch.device) -> StatePlan:
    """Divide the memory of recurrent states, and bound those that the prefix cache keeps."""
    state_pools = [states for pool in pools for states in pool.state_pools]
    if not state_pools:
        return StatePlan.make(0, 0, limits.max_batch, max_nodes)
    bytes_per_state = sum(states.bytes_per_state for states in state_pools)
    plan = StatePlan.make(bytes_per_state, limits.get_memory(device), limits.max_batch, max_nodes)
    if plan.max_batch < limits.max_batch:
        log.warning(
            "recurrent states of %.1f MiB limit the batch to %d of %d requests; give more kv_memory (--kv-memory) or "
            "shorter drafts",
            bytes_per_state / 2**20,
            plan.max_batch,
            limits.max_batch,
        )
    for states in state_pools:
        states.max_page_ends, states.capacity = plan.max_page_ends, plan.num_states + 1  # and the null state
    return plan


def create_length_policy(
    drafter: Drafter | None, row_buckets: Sequence[int] = (), points: Sequence[tuple[int, float]] = ()
) -> DraftLengthPolicy:
    """Create the policy of adaptive draft lengths for a drafter.

    Args:
        drafter: the drafter; None = plain decoding.
        row_buckets: numbers of rows that the target's passes are padded to; () = they are not padded.
        points: measured (rows, seconds) of the target's passes; () = learnt from steps.
    """
    curve = CostCurve(points, row_buckets)
    decides_length = drafter is not None and drafter.spec.decides_length
    return LossBudgetPolicy(curve) if decides_length else AdaptiveLengthPolicy(curve)
