"""Seeded faults, each one a real one: a small function that is wrong in one place, and what it imitates.

The rules are variations of two short programs, `chain_like` and `block_like`, whose unchanged forms are held equal to
the real rules in `test_teeth`; so what a mutant is killed for is its fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft import noise
from foredraft.noise import Purpose
from foredraft.sampling import History, Sampling, distribution
from foredraft.tree import Commit, TokenTree
from foredraft.verify import Coins, Rule, draw


def _scaled(law: Tensor, fallback: Tensor) -> Tensor:
    return law / law.sum() if law.sum() > 0 else fallback


def _right_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return _scaled((p - q).clamp_min(0), p)


def reject_like(
    accepts: Callable[[float, float, float], bool] = lambda u, p, q: u * q < p,
    residual: Callable[[Tensor, Tensor, int, Tensor], Tensor] = _right_residual,
    bonus_row: int = 0,  # how many rows above the right one the bonus is drawn from
    first_free: bool = False,
    renormalises_q: bool = True,
    updates_residual: bool = True,
    removes_elder: bool = True,
) -> Rule:
    """Token verification, with places for faults."""

    def rule(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
        paths, following = [], []
        for b in range(len(tree.sizes)):
            node, nodes, tokens = 0, [0], []
            while True:
                residual_law = law = p[tree.row(b, node)].double()
                q = None if tree.q is None else tree.q[tree.row(b, node)].double()
                is_guess = q is None or not q.any()
                taken = None
                for child in tree.children[b][node]:
                    x = tree.token_lists[b][child]
                    left = torch.eye(len(law), dtype=torch.float64)[x] if is_guess else q
                    if left[x] <= 0:
                        break
                    is_free = first_free and not nodes[1:]
                    if is_free or accepts(float(coins.accept[b, child]), float(residual_law[x]), float(left[x])):
                        taken = child
                        break
                    if updates_residual or child == tree.children[b][node][-1]:
                        residual_law = residual(residual_law, left, x, p[tree.row(b, child)].double())
                    if not is_guess and removes_elder:
                        q = q.clone()
                        q[x] = 0
                        q = _scaled(q, q) if renormalises_q else q
                if taken is None:
                    if not tree.children[b][node] and bonus_row:
                        residual_law = p[max(tree.row(b, node) - bonus_row, tree.row(b, 0))].double()
                    last = draw(residual_law, float(coins.draw[b, node]))
                    break
                nodes.append(taken)
                tokens.append(tree.token_lists[b][taken])
                node = taken
            paths.append(nodes)
            following.append([*tokens, last])
        return Commit.of(paths, following)

    return rule


def block_like(
    has_block_residual: bool = True, has_block_bar: bool = True, keeps_last: bool = True, caps: bool = True
) -> Rule:
    """Block verification of chains, with places for faults."""

    def rule(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
        paths, following = [], []
        for b, size in enumerate(tree.sizes):
            drafted = tree.token_lists[b]
            laws = [p[tree.row(b, n)].double() for n in range(size)]
            drawn = [_one_hot_if_guess(tree, b, n, len(laws[0])) for n in range(size - 1)]
            weights, survived = [1.0], 0
            for i in range(size - 1):
                x = drafted[i + 1]
                weight = weights[-1] * float(laws[i][x]) / float(drawn[i][x])
                weights.append(min(1.0, weight) if caps else weight)
                bar = weights[-1]
                if i + 1 < size - 1 and has_block_bar:
                    rest = float((bar * laws[i + 1] - drawn[i + 1]).clamp_min(0).sum())
                    bar = rest / (rest + 1 - bar) if rest + 1 - bar > 0 else 1.0
                if float(coins.accept[b, i + 1]) < bar:
                    survived = i + 1
                elif not keeps_last:
                    break
            law = laws[survived]
            if survived < size - 1:
                weight = weights[survived] if has_block_residual else 1.0
                law = _scaled((weight * law - drawn[survived]).clamp_min(0), law)
            paths.append(list(range(survived + 1)))
            following.append([*drafted[1 : survived + 1], draw(law, float(coins.draw[b, survived]))])
        return Commit.of(paths, following)

    return rule


def _one_hot_if_guess(tree: TokenTree, b: int, node: int, size: int) -> Tensor:
    q = torch.zeros(size).double() if tree.q is None else tree.q[tree.row(b, node)].double()
    return q if q.any() else torch.eye(size, dtype=torch.float64)[tree.token_lists[b][node + 1]]


def _softmax_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return (p - q).clamp_min(0).softmax(-1)


def _target_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return p


def _onehot_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return _scaled(p.index_fill(0, torch.tensor([x]), 0), p)


def _next_row_residual(p: Tensor, q: Tensor, x: int, following: Tensor) -> Tensor:
    return _scaled((following - q).clamp_min(0), following)


def _shared_coin(rule: Rule) -> Rule:
    def shared(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
        return rule(tree, p, replace(coins, accept=coins.accept[:, 1:2].expand_as(coins.accept)))

    return shared


def _coin_for_draw(rule: Rule) -> Rule:
    def same(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
        return rule(tree, p, replace(coins, draw=coins.accept))

    return same


REJECTS: dict[str, Rule] = {
    "resid_softmax": reject_like(residual=_softmax_residual),  # transformers 28508
    "resid_target": reject_like(residual=_target_residual),
    "resid_onehot": reject_like(residual=_onehot_residual),  # EAGLE 20
    "resid_wrong_pos": reject_like(residual=_next_row_residual),
    "bonus_off1": reject_like(bonus_row=1),
    "thr_0.95": reject_like(accepts=lambda u, p, q: u * q < 0.95 * p),
    "thr_0.99": reject_like(accepts=lambda u, p, q: u * q < 0.99 * p),
    "generous": reject_like(accepts=lambda u, p, q: u * q < 1.01 * p),
    "target alone accepts": reject_like(accepts=lambda u, p, q: u < p),
    "first_free": reject_like(first_free=True),  # lattice 243
    "shared_u": _shared_coin(reject_like()),
    "draw_is_accept_u": _coin_for_draw(reject_like()),
}
TREES: dict[str, Rule] = {
    "no sibling residual": reject_like(updates_residual=False),
    "q not renormalised between siblings": reject_like(renormalises_q=False),
    "siblings drawn with replacement": reject_like(removes_elder=False),
}
BLOCKS: dict[str, Rule] = {
    "block with token-wise residual": block_like(has_block_residual=False),  # vllm-ascend 7807
    "block with token-wise bar": block_like(has_block_bar=False),
    "block that stops at the first failure": block_like(keeps_last=False),
    "block without the cap": block_like(caps=False),
}
NON_STRICT = reject_like(accepts=lambda u, p, q: u * q <= p)  # SGLang 35771


# the laws handed to a rule

Rows, Histories = Sequence[Sampling], Sequence[History]


def _unfiltered(s: Sampling) -> Sampling:
    return replace(s, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)


def unfiltered(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, [_unfiltered(s) for s in rows], history)


def unfiltered_in_the_draft(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Filters on the bonus row alone (vLLM 10198)."""
    return distribution(
        logits, [s if len(h.drafted) == 2 else _unfiltered(s) for s, h in zip(rows, history, strict=True)], history
    )


def unfiltered_bonus(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(
        logits, [_unfiltered(s) if len(h.drafted) == 2 else s for s, h in zip(rows, history, strict=True)], history
    )


def warmer(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, [replace(s, temperature=s.temperature * 1.02) for s in rows], history)


def rounded(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """bfloat16 laws."""
    return distribution(logits, rows, history).bfloat16().double()


def ignoring_the_draft(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Penalties, bad words and min_tokens by the committed text alone (SGLang 33643)."""
    return distribution(logits, rows, [replace(h, drafted=()) for h in history])


def last_drafted_alone(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """Only the last token of a step is counted."""
    return distribution(logits, rows, [replace(h, drafted=h.drafted[-1:]) for h in history])


def min_tokens_by_steps(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """The drafted path counts as one step, however long."""
    late = [
        replace(s, min_tokens=s.min_tokens + max(len(h.drafted) - 1, 0)) for s, h in zip(rows, history, strict=True)
    ]
    return distribution(logits, [replace(s, max_tokens=99) for s in late], history)


def softly_claimed(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    """The draft was greedy, and says it drew from its softmax (transformers 32867)."""
    return distribution(logits, Sampling(), history)


# the noise


def coins_of_the_draft(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> Coins:
    """u_is_draft_u: the number that drew a token also accepts it."""
    coins = Coins.of(tree, seeds, positions)
    accept = coins.accept.clone()
    for b, ((seed, sample), start) in enumerate(zip(seeds, positions, strict=True)):
        for n in range(1, tree.sizes[b]):
            accept[b, n] = noise.coin(seed, sample, Purpose.DRAFT, start, n - 1, tree.token_lists[b][n])
    return replace(coins, accept=accept)


def coins_without_position(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> Coins:
    return Coins.of(tree, seeds, [0] * len(positions))


def coins_without_seed(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> Coins:
    """One stream for all requests (TensorRT-LLM 17599)."""
    return Coins.of(tree, [(0, 0)] * len(seeds), positions)


def keys_without_position(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> Coins:
    coins = Coins.of(tree, seeds, positions)
    keys = [noise.key(*seeds[b], Purpose.TOKEN) for b, size in enumerate(tree.sizes) for _ in range(size)]
    return replace(coins, keys=torch.tensor(keys))


def keys_by_step(tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> Coins:
    """The target's draws keyed by where the step began: the law is right, the text depends on the draft length."""
    coins = Coins.of(tree, seeds, positions)
    keys = [
        noise.key(*seeds[b], Purpose.TOKEN, positions[b], n) for b, size in enumerate(tree.sizes) for n in range(size)
    ]
    return replace(coins, keys=torch.tensor(keys))


def linear_race(p: Tensor, keys: Tensor) -> Tensor:
    return p * noise.uniforms(keys, p.shape[-1])


def race_of_one_number(p: Tensor, keys: Tensor) -> Tensor:
    """The same number for every token."""
    return p / -noise.uniforms(keys, 1).log()


def closed_uniforms(keys: Tensor, count: int) -> Tensor:
    """u in [0, 1): the half that keeps it off zero is missing."""
    return noise.uniforms(keys, count) - 2.0**-53


# the parameters


def nucleus_before_temperature(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    first = [replace(s, temperature=1.0) for s in rows]
    p = distribution(logits, first, history)
    return distribution(p.log(), [Sampling(temperature=s.temperature) for s in rows])


def presence_of_the_prompt(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, rows, [replace(h, output=[*h.prompt, *h.output]) for h in history])


def repetition_of_the_output(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    return distribution(logits, rows, [replace(h, prompt=()) for h in history])


def bias_after_the_filters(logits: Tensor, rows: Rows, history: Histories) -> Tensor:
    p = distribution(logits, [replace(s, logit_bias={}) for s in rows], history)
    return distribution(p.log(), [Sampling(logit_bias=s.logit_bias) for s in rows], history)
