"""Seeded faults: each is a small function with one fault that occurred in a real implementation.

The rules are variations of two short programs, `chain_like` and `block_like`. Their unchanged forms are equal to
the real rules in `test_teeth`, so the tests can only detect the fault of a mutant.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.sampling import rng
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.rule import VerifyFunction
from tests.support.statistical_checks import sample_from_mass


def _normalize(probs: Tensor, fallback: Tensor) -> Tensor:
    return probs / probs.sum() if probs.sum() > 0 else fallback


def _right_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return _normalize((p - q).clamp_min(0), p)


def make_reject_rule(
    accepts: Callable[[float, float, float], bool] = lambda u, p, q: u * q < p,
    residual: Callable[[Tensor, Tensor, int, Tensor], Tensor] = _right_residual,
    bonus_row: int = 0,  # how many rows above the right one the bonus token is sampled from
    first_free: bool = False,
    renormalises_q: bool = True,
    updates_residual: bool = True,
    removes_elder: bool = True,
) -> VerifyFunction:
    """Make a rule of token verification with the given faults."""

    def rule(tree: TokenTree, p: Tensor, noise: NoiseTable) -> Commit:
        paths, following = [], []
        for b in range(len(tree.sizes)):
            node, nodes, tokens = 0, [0], []
            while True:
                residual_probs = probs = p[tree.get_row(b, node)].double()
                q = None if tree.q is None else tree.q[tree.get_row(b, node)].double()
                is_guess = q is None or not q.any()
                taken = None
                for child in tree.children[b][node]:
                    x = tree.tokens[b][child]
                    left = torch.eye(len(probs), dtype=torch.float64)[x] if is_guess else q
                    if left[x] <= 0:
                        break
                    is_free = first_free and not nodes[1:]
                    if is_free or accepts(
                        float(noise.accept_table[b, child]), float(residual_probs[x]), float(left[x])
                    ):
                        taken = child
                        break
                    if updates_residual or child == tree.children[b][node][-1]:
                        residual_probs = residual(residual_probs, left, x, p[tree.get_row(b, child)].double())
                    if not is_guess and removes_elder:
                        q = q.clone()
                        q[x] = 0
                        q = _normalize(q, q) if renormalises_q else q
                if taken is None:
                    if not tree.children[b][node] and bonus_row:
                        residual_probs = p[max(tree.get_row(b, node) - bonus_row, tree.get_row(b, 0))].double()
                    last = sample_from_mass(residual_probs, float(noise.sample_table[b, node]))
                    break
                nodes.append(taken)
                tokens.append(tree.tokens[b][taken])
                node = taken
            paths.append(nodes)
            following.append([*tokens, last])
        return Commit.from_lists(paths, following)

    return rule


def make_block_rule(
    has_block_residual: bool = True, has_block_bar: bool = True, keeps_last: bool = True, caps: bool = True
) -> VerifyFunction:
    """Make a rule of block verification for chains with the given faults."""

    def rule(tree: TokenTree, p: Tensor, noise: NoiseTable) -> Commit:
        paths, following = [], []
        for b, size in enumerate(tree.sizes):
            drafted = tree.tokens[b]
            distributions = [p[tree.get_row(b, n)].double() for n in range(size)]
            drawn = [_default_to_one_hot(tree, b, n, len(distributions[0])) for n in range(size - 1)]
            weights, survived = [1.0], 0
            for i in range(size - 1):
                x = drafted[i + 1]
                weight = weights[-1] * float(distributions[i][x]) / float(drawn[i][x])
                weights.append(min(1.0, weight) if caps else weight)
                bar = weights[-1]
                if i + 1 < size - 1 and has_block_bar:
                    rest = float((bar * distributions[i + 1] - drawn[i + 1]).clamp_min(0).sum())
                    bar = rest / (rest + 1 - bar) if rest + 1 - bar > 0 else 1.0
                if float(noise.accept_table[b, i + 1]) < bar:
                    survived = i + 1
                elif not keeps_last:
                    break
            probs = distributions[survived]
            if survived < size - 1:
                weight = weights[survived] if has_block_residual else 1.0
                probs = _normalize((weight * probs - drawn[survived]).clamp_min(0), probs)
            paths.append(list(range(survived + 1)))
            following.append(
                [*drafted[1 : survived + 1], sample_from_mass(probs, float(noise.sample_table[b, survived]))]
            )
        return Commit.from_lists(paths, following)

    return rule


def _default_to_one_hot(tree: TokenTree, b: int, node: int, size: int) -> Tensor:
    q = torch.zeros(size).double() if tree.q is None else tree.q[tree.get_row(b, node)].double()
    return q if q.any() else torch.eye(size, dtype=torch.float64)[tree.tokens[b][node + 1]]


def _softmax_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return (p - q).clamp_min(0).softmax(-1)


def _target_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return p


def _onehot_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return _normalize(p.index_fill(0, torch.tensor([x]), 0), p)


def _next_row_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return _normalize((following - q).clamp_min(0), following)


def _share_uniform(rule: VerifyFunction) -> VerifyFunction:
    def share_uniforms(tree: TokenTree, p: Tensor, noise: NoiseTable) -> Commit:
        return rule(tree, p, replace(noise, accept_table=noise.accept_table[:, 1:2].expand_as(noise.accept_table)))

    return share_uniforms


def _reuse_accept_uniform(rule: VerifyFunction) -> VerifyFunction:
    def same(tree: TokenTree, p: Tensor, noise: NoiseTable) -> Commit:
        return rule(tree, p, replace(noise, sample_table=noise.accept_table))

    return same


REJECTS: dict[str, VerifyFunction] = {
    "resid_softmax": make_reject_rule(residual=_softmax_residual),  # transformers 28508
    "resid_target": make_reject_rule(residual=_target_residual),
    "resid_onehot": make_reject_rule(residual=_onehot_residual),  # EAGLE 20
    "resid_wrong_pos": make_reject_rule(residual=_next_row_residual),
    "bonus_off1": make_reject_rule(bonus_row=1),
    "thr_0.95": make_reject_rule(accepts=lambda u, p, q: u * q < 0.95 * p),
    "thr_0.99": make_reject_rule(accepts=lambda u, p, q: u * q < 0.99 * p),
    "generous": make_reject_rule(accepts=lambda u, p, q: u * q < 1.01 * p),
    "target alone accepts": make_reject_rule(accepts=lambda u, p, q: u < p),
    "first_free": make_reject_rule(first_free=True),  # lattice 243
    "shared_u": _share_uniform(make_reject_rule()),
    "draw_is_accept_u": _reuse_accept_uniform(make_reject_rule()),
}
TREES: dict[str, VerifyFunction] = {
    "no sibling residual": make_reject_rule(updates_residual=False),
    "q not renormalised between siblings": make_reject_rule(renormalises_q=False),
    "siblings drawn with replacement": make_reject_rule(removes_elder=False),
}
BLOCKS: dict[str, VerifyFunction] = {
    "block with token-wise residual": make_block_rule(has_block_residual=False),  # vllm-ascend 7807
    "block with token-wise bar": make_block_rule(has_block_bar=False),
    "block that stops at the first failure": make_block_rule(keeps_last=False),
    "block without the cap": make_block_rule(caps=False),
}
NON_STRICT = make_reject_rule(accepts=lambda u, p, q: u * q <= p)  # SGLang 35771


# the distributions handed to a rule

Rows, Histories = Sequence[Sampling], Sequence[TokenHistory]


def _drop_filters(s: Sampling) -> Sampling:
    return replace(s, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)


def skip_filters(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, [_drop_filters(s) for s in rows], history)


def skip_draft_filters(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Filters on the bonus row alone (vLLM 10198)."""
    return distribution(
        logits, [s if len(h.draft_path) == 2 else _drop_filters(s) for s, h in zip(rows, history, strict=True)], history
    )


def skip_bonus_filters(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(
        logits, [_drop_filters(s) if len(h.draft_path) == 2 else s for s, h in zip(rows, history, strict=True)], history
    )


def raise_temperature(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, [replace(s, temperature=s.temperature * 1.02) for s in rows], history)


def round_to_bfloat16(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """bfloat16 distributions."""
    return distribution(logits, rows, history).bfloat16().double()


def ignore_draft(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Penalties, bad words and min_tokens by the committed text alone (SGLang 33643)."""
    return distribution(logits, rows, [replace(h, draft_path=()) for h in history])


def count_last_draft_only(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Only the last token of a step is counted."""
    return distribution(logits, rows, [replace(h, draft_path=h.draft_path[-1:]) for h in history])


def count_min_tokens_by_step(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Count the drafted path as one step, however long."""
    late = [
        replace(s, min_tokens=s.min_tokens + max(len(h.draft_path) - 1, 0)) for s, h in zip(rows, history, strict=True)
    ]
    return distribution(logits, [replace(s, max_tokens=99) for s in late], history)


def claim_softmax(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Return the softmax as the distribution of a greedy draft (transformers 32867)."""
    return distribution(logits, Sampling(), history)


# the noise


def reuse_draft_uniforms(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> NoiseTable:
    """u_is_draft_u: the number that drew a token also accepts it."""
    noise = NoiseTable.from_seeds(tree, seeds, positions)
    accept = noise.accept_table.clone()
    for b, ((seed, sample), start) in enumerate(zip(seeds, positions, strict=True)):
        for n in range(1, tree.sizes[b]):
            accept[b, n] = rng.uniform(seed, sample, NoiseStream.DRAFT, start, n - 1, tree.tokens[b][n])
    return replace(noise, accept_table=accept)


def drop_position_from_uniforms(
    tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]
) -> NoiseTable:
    return NoiseTable.from_seeds(tree, seeds, [0] * len(positions))


def drop_seed_from_uniforms(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> NoiseTable:
    """Use one stream for all requests (TensorRT-LLM 17599)."""
    return NoiseTable.from_seeds(tree, [(0, 0)] * len(seeds), positions)


def drop_position_from_keys(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> NoiseTable:
    noise = NoiseTable.from_seeds(tree, seeds, positions)
    keys = [rng.derive_key(*seeds[b], NoiseStream.TOKEN) for b, size in enumerate(tree.sizes) for _ in range(size)]
    return replace(noise, keys=torch.tensor(keys))


def key_by_step(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> NoiseTable:
    """Key the target's samples by the start of the step: a right distribution, but texts depend on the draft length."""
    noise = NoiseTable.from_seeds(tree, seeds, positions)
    keys = [
        rng.derive_key(*seeds[b], NoiseStream.TOKEN, positions[b], n)
        for b, size in enumerate(tree.sizes)
        for n in range(size)
    ]
    return replace(noise, keys=torch.tensor(keys))


def race_linearly(p: Tensor, keys: Tensor) -> Tensor:
    return p * rng.uniform_matrix(keys, p.shape[-1])


def race_with_one_number(p: Tensor, keys: Tensor) -> Tensor:
    """Use the same number for every token."""
    return p / -rng.uniform_matrix(keys, 1).log()


def include_zero(keys: Tensor, count: int) -> Tensor:
    """u in [0, 1): the half that keeps it off zero is missing."""
    return rng.uniform_matrix(keys, count) - 2.0**-53


# the parameters


def filter_before_temperature(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    first = [replace(s, temperature=1.0) for s in rows]
    p = distribution(logits, first, history)
    return distribution(p.log(), [Sampling(temperature=s.temperature) for s in rows])


def count_prompt_presence(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, rows, [replace(h, output=[*h.prompt, *h.output]) for h in history])


def count_output_repetition(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, rows, [replace(h, prompt=()) for h in history])


def add_bias_after_filters(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    p = distribution(logits, [replace(s, logit_bias={}) for s in rows], history)
    return distribution(p.log(), [Sampling(logit_bias=s.logit_bias) for s in rows], history)
