"""The children of a node in the order in which a rule tries them, each with the distribution that it was sampled from.

docs/design.md ("Order of siblings") has the proofs.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.tree import TokenTree
from foredraft.verification.probs import Floats, Probs


class SiblingGroup(NamedTuple):
    """Children of a node with one origin: the samples of one drafter, or the deterministic children."""

    q: Floats | None  # [V] row that they were sampled from, as the drafter returned it; None = deterministic children
    children: Sequence[int]  # nodes in the order of sampling; a node may be in several groups of samples
    is_independent: bool = False  # sampled with replacement, so that a node may come several times


class Trial(NamedTuple):
    """Samples of one distribution, independent of each other given the trials before."""

    q: Probs  # distribution of each sample; one-hot for a deterministic child
    samples: tuple[tuple[int, int], ...]  # (child, token x) in the order of sampling, one or more


def iterate_siblings(tree: TokenTree, b: int, node: int, vocab_size: int) -> Iterator[tuple[int, int, Probs]]:
    """Yield (child, token x, q_x) for the samples below a node, in order.

    q_x is the distribution of x, given the samples before it. A child that was sampled twice is yielded twice. `reject`
    never accepts it the second time, since its rejection left r(x) = 0, so it needs no other uniform; but its q counts
    in the residual.
    """
    for q, samples in iterate_trials(tree, b, node, vocab_size):
        for child, x in samples:
            yield child, x, q


def iterate_trials(tree: TokenTree, b: int, node: int, vocab_size: int) -> Iterator[Trial]:
    """Yield the trials below a node, in order.

    The samples of a drafter that samples with replacement are one trial. A sample without replacement is a trial of its
    own: its q is the node's row without the tokens of the siblings before it, normalised. So is a deterministic child.

    Iteration stops at a child that no correct drafter proposes: x is outside the vocabulary, the row of q is not a
    distribution over the vocabulary, or q_x(x) = 0. This child and the children after it count as not drafted.

    A merged tree has samples of one drafter or of several, and deterministic children. They come in this order, which
    is lossless, and accepts with at least the probability of deterministic children first.
    """
    children = tree.children[b][node]
    if not children or (tree.q is not None and tree.q.shape[-1] != vocab_size):
        return
    tokens = tree.tokens[b]
    for group in group_siblings(tree, b, node, children):
        pairs = [(child, tokens[child]) for child in group.children]
        if group.q is None:
            for child, x in pairs:
                if x >= vocab_size:
                    return
                yield Trial(Probs.from_token(x, vocab_size), ((child, x),))
            continue
        remaining = Probs.from_masses(group.q)  # without the tokens of earlier siblings
        while pairs:
            count = len(pairs) if group.is_independent else 1
            trial = _make_trial(remaining, pairs[:count], vocab_size)
            if trial is not None:
                yield trial
            if trial is None or len(trial.samples) < count:
                return
            pairs = pairs[count:]
            if pairs:
                remaining = trial.q.exclude(trial.samples[0][1])


def _make_trial(mass: Probs, pairs: Sequence[tuple[int, int]], vocab_size: int) -> Trial | None:
    """Return the trial of the samples before the first one that cannot come from `mass`; None if there is none."""
    if mass.vocab_size != vocab_size:
        return None
    total = mass.total
    if not math.isfinite(total) or total <= 0 or float(mass.mass.min(initial=0)) < 0:
        return None
    valid = []
    for child, x in pairs:
        if x >= vocab_size or mass[x] <= 0:
            break
        valid.append((child, x))
    return Trial(mass.normalise(fallback=mass), tuple(valid)) if valid else None


def group_siblings(tree: TokenTree, b: int, node: int, children: Sequence[int]) -> Iterator[SiblingGroup]:
    """Yield the children of a node by drafter, each with the row of q that it sampled from; deterministic ones last."""
    row, num_sampled = tree.get_row(b, node), 0
    if tree.q is not None:
        q_row = _read_row(tree.q[row])
        if q_row.any():
            num_sampled = len(children) if tree.num_sampled_children is None else tree.num_sampled_children[row]
            yield SiblingGroup(q_row, children[:num_sampled])
    rest = children[num_sampled:]
    if tree.further_samples is not None:
        root = tree.roots[b]
        for samples in tree.further_samples.get((b, node - root), ()):
            group = [root + child for child in samples.children]
            yield SiblingGroup(_read_row(samples.q), group, samples.is_independent)
            rest = [child for child in rest if child not in group]
    yield SiblingGroup(None, rest)


def _read_row(q: Tensor) -> Floats:
    """Return a row of q [V]; without a copy in the dtypes of numpy."""
    return (q.float() if q.dtype == torch.bfloat16 else q).cpu().numpy()
