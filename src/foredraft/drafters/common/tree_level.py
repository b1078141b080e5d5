"""Addition of one level to growing drafts: the children of all frontier nodes, from the logits after them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.drafters.common.tree_builder import NodeLogits, ScoredChild, TreeBuilder
from foredraft.drafters.draft import draft_noise_key
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.filters import argmax_tokens
from foredraft.sampling.params import Sampling


def add_level(builders: Sequence[TreeBuilder], node_logits: NodeLogits) -> None:
    """Add one level to every draft.

    Args:
        builders: growing drafts, each with a frontier.
        node_logits: logits after all frontier nodes, builder by builder.
    """
    nodes = [(g, node) for g in builders for node in g.frontier]
    if all(g.is_greedy and not g.request.spec.sampling.shapes_logits for g in builders):
        scored = _select_likeliest(nodes, node_logits)
    else:
        scored = _select_children(nodes, node_logits.to_full_vocab())
    children = iter(scored)
    for g in builders:
        g.add_children([next(children) for _ in g.frontier])


def _select_likeliest(nodes: Sequence[tuple[TreeBuilder, int]], node_logits: NodeLogits) -> list[list[ScoredChild]]:
    """Return the likeliest tokens after every node, without regard to sampling settings."""
    x = node_logits.logits.float() if node_logits.logits.dtype != torch.float64 else node_logits.logits
    # a chain without a confidence threshold needs no probabilities
    if all(g.tree_spec.width == 1 and not g.tree_spec.min_confidence for g, _ in nodes):
        best = argmax_tokens(x)
        ids = node_logits.to_token_ids([[max(column, 0)] for column in best])
        return [[(row[0], 0.0)] if column >= 0 else [] for row, column in zip(ids, best, strict=True)]
    widths = [g.num_children(node) for g, node in nodes]
    top = x.log_softmax(-1).topk(min(max(widths), x.shape[-1]), -1)  # measured at a third of the time of logsumexp
    log_probs, ids = top.values.tolist(), node_logits.to_token_ids(top.indices.tolist())
    return [_drop_impossible(row, values, width) for row, values, width in zip(ids, log_probs, widths, strict=True)]


def _select_children(nodes: Sequence[tuple[TreeBuilder, int]], logits: Tensor) -> list[list[ScoredChild]]:
    """Choose children from logits [R, V] under each request's sampling settings.

    They are sampled from q (`reject`, `block`), sampled with the target's noise (`match`), or the likeliest otherwise.
    """
    samplings = [_relax_greedy_sampling(g) for g, _ in nodes]
    history = None
    if any(s.shapes_logits for s in samplings):
        history = [g.request.build_history(g.collect_path(node)) for g, node in nodes]
    q = distribution(logits, samplings, history)
    races = [(row, repeat) for row, (g, node) in enumerate(nodes) for repeat in range(g.num_races(node))]
    scores = q if len(races) == len(nodes) else q[[row for row, _ in races]]
    if any(not g.is_greedy for g, _ in nodes):
        scores = _race(nodes, races, scores)
    widths = _allocate_widths(nodes, q)
    widths = [1 if nodes[row][0].samples_independently else widths[row] for row, _ in races]
    top = scores.topk(min(max(1, *widths), scores.shape[-1]), -1)
    log_probs = (top.values.double() / scores.double().sum(-1, keepdim=True)).log().tolist()
    for row, (g, node) in enumerate(nodes):
        if g.uses_q:
            g.draft_probs[node] = q[row]
    children: list[list[ScoredChild]] = [[] for _ in nodes]
    for (row, _), ids, values, width in zip(races, top.indices.tolist(), log_probs, widths, strict=True):
        children[row] += _drop_impossible(ids, values, width)
    return children


def _race(nodes: Sequence[tuple[TreeBuilder, int]], races: Sequence[tuple[int, int]], q: Tensor) -> Tensor:
    """Return the scores [R, V] of races over q [R, V]; q itself for drafts that rank tokens without noise.

    Args:
        nodes: builders and frontier nodes.
        races: R pairs: index into `nodes`, and index of the sample below the node.
        q: distribution of each race.
    """
    keys = []
    for row, repeat in races:
        g, node = nodes[row]
        keys.append(draft_noise_key(g.request, node, g.depths[node], g.draft_stream, repeat))
    is_raced = torch.tensor([nodes[row][0].uses_q or nodes[row][0].shares_noise for row, _ in races], device=q.device)
    return torch.where(is_raced[:, None], rng.exponential_race(q, torch.tensor(keys, device=q.device)), q.double())


def _allocate_widths(nodes: Sequence[tuple[TreeBuilder, int]], q: Tensor) -> list[int]:
    """Return the number of children of every node, from q [R, V] for sampled dynamic trees."""
    widths: list[int] = []
    while len(widths) < len(nodes):
        g, first = nodes[len(widths)][0], len(widths)
        rows = q[first : first + len(g.frontier)]
        if g.uses_q and not g.tree_spec.is_static:
            widths += g.allocate_children(rows.topk(min(g.tree_spec.width, rows.shape[-1]), -1).values.tolist())
        else:
            widths += [g.num_children(node) for node in g.frontier]
    return widths


def _drop_impossible(ids: Sequence[int], log_probs: Sequence[float], width: int) -> list[ScoredChild]:
    """Keep at most `width` children, without those of probability 0 or NaN (NaN compares false)."""
    pairs = zip(ids[:width], log_probs[:width], strict=True)
    return [(token, min(log_prob, 0.0)) for token, log_prob in pairs if log_prob > -math.inf]


def _relax_greedy_sampling(g: TreeBuilder) -> Sampling:
    """Return the sampling settings for a draft. A greedy draft ranks tokens, so it drops temperature and filters."""
    s = g.request.spec.sampling
    return replace(s, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0) if s.is_greedy else s
