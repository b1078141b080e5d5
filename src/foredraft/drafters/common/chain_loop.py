"""Chains that a native loop drafts, in place of `level_loop` and with the same tokens and q."""

from collections.abc import Sequence

from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.draft import chain_noise_keys
from foredraft.models.native.draft_chain import ChainPlan
from foredraft.models.native.draft_plans import DraftPlan, DraftTokens


def is_native_chain(builder: TreeBuilder) -> bool:
    """Return whether the native loop drafts this request.

    It has no trees, no shaped logits and no confidence threshold. A sampled draft uses q or shares the target's noise.
    """
    spec, request = builder.tree_spec, builder.request.spec
    if not spec.is_chain or spec.min_confidence or request.sampling.shapes_logits:
        return False
    return builder.is_greedy or builder.uses_q or builder.shares_noise


def plan_sampling(builder: TreeBuilder) -> DraftPlan:
    """Make the plan of a draft without KV entries that `is_native_chain`."""
    request, depth = builder.request, builder.tree_spec.max_depth
    keys = chain_noise_keys(request, 0 if builder.is_greedy else depth, builder.draft_stream)
    return DraftPlan(depth, request.spec.sampling.filter_settings, keys, request.spec.end_ids, builder.uses_q)


def plan_chain(draft: GrowingKVDraft) -> ChainPlan:
    """Make the plan of a draft that `is_native_chain`."""
    plan = plan_sampling(draft.builder)
    return ChainPlan(
        plan.depth, plan.settings, plan.keys, plan.end_ids, plan.uses_q, draft.builder.request.pages, draft.start
    )


def finish_chains(drafts: Sequence[GrowingKVDraft], plans: Sequence[ChainPlan], found: DraftTokens) -> None:
    """Store the tokens in the drafts."""
    for b, (draft, plan) in enumerate(zip(drafts, plans, strict=True)):
        tokens = found.tokens[b]
        # A draft that ends before its depth, without an end token, has failed to sample after its last token.
        has_last_entry = len(tokens) < plan.depth and not (tokens and tokens[-1] in plan.end_ids)
        draft.finish_chain(tokens, found.get_q(b, plan), has_last_entry)
