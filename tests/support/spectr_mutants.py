"""Seeded faults of k-sequential selection: variations of one short program, which is written from the paper."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import Probs
from foredraft.verification.rule import VerifyFunction

Sample = tuple[int, int]  # (child, token)


def find_root(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Solve 1 - (1 - beta(rho))^k = rho beta(rho) by bisection."""
    low, high = 1.0, float(k)
    for _ in range(100):
        rho = (low + high) / 2
        beta = min(float(np.minimum(p / rho, q).sum()), 1.0)
        low, high = (rho, high) if 1 - (1 - beta) ** k > rho * beta else (low, rho)
    return high


def _right_residual(p: np.ndarray, q: np.ndarray, rho: float, k: int) -> np.ndarray:
    trial = np.minimum(p / rho, q)
    return p - trial * sum((1 - trial.sum()) ** i for i in range(k))


def make_spectr_rule(
    solve: Callable[[np.ndarray, np.ndarray, int], float] = find_root,
    residual: Callable[[np.ndarray, np.ndarray, float, int], np.ndarray] = _right_residual,
    count: Callable[[Sequence[Sample], bool], int] = lambda samples, is_root: len(samples),
    order: Callable[[Sequence[Sample]], Sequence[Sample]] = lambda samples: samples,
    repeats: bool = True,
    removes_rejected: bool = False,
) -> VerifyFunction:
    """Make a rule for trees of samples with replacement, with the given faults."""

    def rule(tree: TokenTree, p: Tensor, noise: Noise) -> Commit:
        node, nodes, tokens = 0, [0], []
        while True:
            probs = p[node].numpy()
            target, taken = probs, None
            for group in (tree.further_samples or {}).get((0, node), ()):
                q = group.q.numpy()
                samples = order([(child, tree.tokens[0][child]) for child in group.children])
                k = count(samples, node == 0)
                rho = solve(target, q, k)
                passed: dict[int, float] = {}
                for child, x in samples:
                    chance = min(1.0, target[x] / (rho * q[x])) if q[x] > 0 else 0.0
                    before = passed.get(child, 0.0)
                    passed[child] = before + (1 - before) * chance if repeats else max(before, chance)
                    if noise.accept_uniform(0, child) < passed[child]:
                        taken = child
                        break
                    if removes_rejected:
                        q = np.where(np.arange(len(q)) == x, 0, q)
                        q = q / q.sum() if q.sum() > 0 else group.q.numpy()
                if taken is not None:
                    break
                left = np.maximum(residual(target, group.q.numpy(), rho, k), 0)
                probs = left / left.sum() if left.sum() > 1e-15 else probs
            if taken is None:
                last = Probs(probs, len(probs)).sample(noise.sample_uniform(0, node))
                return Commit.from_lists([nodes], [[*tokens, last]])
            node = taken
            nodes.append(node)
            tokens.append(tree.tokens[0][node])

    return rule


def _residual_of_one(p: np.ndarray, q: np.ndarray, rho: float, k: int) -> np.ndarray:
    return p - np.minimum(p, q)


def _residual_of_one_trial(p: np.ndarray, q: np.ndarray, rho: float, k: int) -> np.ndarray:
    return p - np.minimum(p / rho, q)


def _residual_times_k(p: np.ndarray, q: np.ndarray, rho: float, k: int) -> np.ndarray:
    return p - k * np.minimum(p / rho, q)


MUTANTS: dict[str, VerifyFunction] = {
    "rho is 1": make_spectr_rule(solve=lambda p, q, k: 1.0),
    "rho is 3 % small": make_spectr_rule(solve=lambda p, q, k: max(1.0, 0.97 * find_root(p, q, k))),
    "residual of one sample": make_spectr_rule(residual=_residual_of_one),
    "residual of one trial": make_spectr_rule(residual=_residual_of_one_trial),
    "residual of k trials": make_spectr_rule(residual=_residual_times_k),
    "residual is p": make_spectr_rule(residual=lambda p, q, rho, k: p),
    "k counts different tokens": make_spectr_rule(count=lambda samples, _: len(set(samples))),
    "k is that of the root": make_spectr_rule(count=lambda samples, is_root: len(samples) if is_root else 2),
    "equal tokens are grouped": make_spectr_rule(order=lambda samples: sorted(samples, key=lambda s: s[1])),
    "the likeliest come first": make_spectr_rule(
        order=lambda samples: sorted(samples, key=lambda s: -sum(s == other for other in samples))
    ),
    "a token has one trial": make_spectr_rule(repeats=False),
    "rejected tokens leave q": make_spectr_rule(removes_rejected=True),
}
# rho = k is lossless, and accepts less
CAUTIOUS = make_spectr_rule(solve=lambda p, q, k: float(k))
