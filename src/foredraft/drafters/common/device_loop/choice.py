"""Choice of the children of a level on a device: what `tree_level` does, with fixed shapes and without a wait."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafters.common.device_loop.frontier import Children, Frontier, Growth
from foredraft.drafters.common.device_loop.inputs import DraftLoopInputs
from foredraft.drafters.common.device_loop.plan import ChildChoice
from foredraft.drafters.common.device_loop.shape import DynamicShape, FixedShape
from foredraft.drafters.common.tree_builder import MIN_PROBABILITY, NodeLogits
from foredraft.sampling import rng


@dataclass(frozen=True)
class LevelChoice:
    """Children of a level, and the distributions that they were sampled from."""

    children: Children
    q: Tensor | None  # [B * F, V]; None = no rule reads q


def choose_children(level: int, growth: Growth, frontier: Frontier, logits: NodeLogits) -> LevelChoice:
    """Choose the children of a frontier, as many places as the shape has.

    Args:
        level: depth of the frontier.
        growth: drafts before the level.
        frontier: B drafts with F places.
        logits: logits after the places, B * F rows.
    """
    choice = _choose(level, growth, frontier, logits)
    return LevelChoice(_pad(choice.children, _get_width(level, growth)), choice.q)


def _choose(level: int, growth: Growth, frontier: Frontier, logits: NodeLogits) -> LevelChoice:
    plan = growth.plan
    x = logits.logits if logits.logits.dtype == torch.float64 else logits.logits.float()
    if plan.choice is ChildChoice.ARGMAX:
        top, columns = x.max(-1)
        children = _shape_children(frontier, _to_ids(logits, columns[:, None]), torch.zeros_like(top.double())[:, None])
        return LevelChoice(_keep(children, frontier, top.isfinite().view_as(children.is_chosen)), None)
    widths = _list_widths(level, growth, frontier)
    if plan.choice is ChildChoice.LIKELIEST:
        top_k = x.log_softmax(-1).topk(min(_get_width(level, growth), x.shape[-1]), -1)
        children = _shape_children(frontier, _to_ids(logits, top_k.indices), top_k.values.double())
        return LevelChoice(_limit(children, frontier, widths), None)
    return _sample_children(level, growth, frontier, logits.to_full_vocab(), widths)


def _sample_children(level: int, growth: Growth, frontier: Frontier, logits: Tensor, widths: Tensor) -> LevelChoice:
    """Choose children under each request's settings from logits [B * F, V]."""
    inputs, plan = growth.inputs, growth.plan
    expand = _make_expansion(frontier)
    q = inputs.select_settings(expand).compute_probs(logits)
    scores = q
    if plan.is_raced:
        keys = _derive_keys(level, inputs, frontier).flatten()
        is_raced = expand(inputs["is_raced"])[:, None] > 0
        scores = torch.where(is_raced, rng.exponential_race(q, keys), q.double())
    if plan.uses_q and isinstance(plan.shape, DynamicShape):
        allocated = _allocate_widths(level, plan.shape, growth, frontier, q)
        widths = torch.where(inputs["uses_q"][:, None] > 0, allocated, widths)
    top = scores.topk(min(_get_width(level, growth), scores.shape[-1]), -1)
    log_probs = (top.values.double() / scores.double().sum(-1, keepdim=True)).log()
    children = _shape_children(frontier, top.indices, log_probs)
    return LevelChoice(_limit(children, frontier, widths), q if plan.uses_q else None)


def _derive_keys(level: int, inputs: DraftLoopInputs, frontier: Frontier) -> Tensor:
    """Derive the noise key [B, F] of every place; see `draft_noise_key`."""
    uses_q = inputs["uses_q"][:, None] > 0
    counters = torch.where(uses_q, frontier.nodes, inputs["counter"][:, None] + level)
    keys = rng.extend_keys(inputs["key"][:, None], counters)
    if not inputs.plan.has_stream:
        return keys
    streams = inputs["stream"][:, None]
    return torch.where(uses_q & (streams > 0), rng.extend_keys(keys, streams), keys)


def _get_width(level: int, growth: Growth) -> int:
    """Return the most children of a place."""
    shape = growth.plan.shape
    return shape.levels[level].width if isinstance(shape, FixedShape) else shape.width


def _list_widths(level: int, growth: Growth, frontier: Frontier) -> Tensor:
    """Return the number of children [B, F] that every place gets."""
    shape = growth.plan.shape
    if isinstance(shape, DynamicShape):
        return torch.full_like(frontier.nodes, shape.width)
    first = sum(len(above.paths) for above in shape.levels[:level])
    return growth.inputs["counts"][:, first : first + frontier.nodes.shape[1]]


def _allocate_widths(level: int, shape: DynamicShape, growth: Growth, frontier: Frontier, q: Tensor) -> Tensor:
    """Allocate the children [B, F] of sampled drafts, before any is sampled; see `TreeBuilder.allocate_children`."""
    b, places = frontier.nodes.shape
    tops = q.topk(min(shape.width, q.shape[-1]), -1).values.double().view(b, places, -1)
    scores = frontier.log_probs[:, :, None] + tops.clamp_min(MIN_PROBABILITY).log()
    scores = torch.where(frontier.is_valid[:, :, None], scores, -torch.inf).flatten(1)
    ranked = scores.sort(dim=1, descending=True, stable=True)  # ties: the first place
    left = growth.inputs["max_nodes"] - growth.num_nodes
    levels = growth.inputs["max_depth"] - level
    share = torch.minimum((2 * left + levels) // (levels + 1).clamp_min(1), left)
    is_allocated = (growth.inputs.count_up(scores.shape[1]) < share[:, None]) & (ranked.values > -torch.inf)
    widths = torch.zeros_like(frontier.nodes)
    return widths.scatter_add(1, ranked.indices // tops.shape[2], is_allocated.long())


def _make_expansion(frontier: Frontier) -> Callable[[Tensor], Tensor]:
    """Return the function that repeats a value [B] for every place [B * F]."""
    shape = frontier.nodes.shape
    return lambda x: x[:, None].expand(shape).reshape(-1)


def _to_ids(logits: NodeLogits, columns: Tensor) -> Tensor:
    return columns if logits.token_ids is None else logits.token_ids[columns]


def _shape_children(frontier: Frontier, ids: Tensor, log_probs: Tensor) -> Children:
    """Arrange children [B * F, k] by place. Those of probability 0 or NaN are not chosen."""
    shape = (*frontier.nodes.shape, ids.shape[-1])
    values = log_probs.view(shape)
    return Children(ids.view(shape), values.clamp_max(0.0), values > -torch.inf)


def _pad(children: Children, width: int) -> Children:
    """Fill up to `width` children per place, if the vocabulary is smaller."""
    missing = (0, width - children.tokens.shape[2])
    if not missing[1]:
        return children
    return Children(*(F.pad(x, missing) for x in (children.tokens, children.log_probs, children.is_chosen)))


def _limit(children: Children, frontier: Frontier, widths: Tensor) -> Children:
    """Keep the first `widths` [B, F] children of every place."""
    ranks = torch.arange(children.tokens.shape[2], device=widths.device)
    return _keep(children, frontier, ranks < widths[:, :, None])


def _keep(children: Children, frontier: Frontier, is_kept: Tensor) -> Children:
    """Keep some of the children, and none of an empty place."""
    is_chosen = children.is_chosen & is_kept & frontier.is_valid[:, :, None]
    return Children(children.tokens, children.log_probs, is_chosen)
