"""Simulated acceptance: a rule that accepts draft tokens at a given rate, whatever the target's distribution is.

Its output is not the target's. It is for load tests and capacity planning: steps, batches and memory are those of a
drafter with this acceptance rate.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.paths import verify_by_level
from foredraft.verification.probs import Probs, TargetProbs, to_target_probs
from foredraft.verification.rule import Rule


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Acceptance of each draft token with one probability, independent of its content and of the other tokens.

    The uniforms are those of `reject`. A step with a chain of K tokens thus commits (1 - a^(K+1)) / (1 - a) tokens in
    expectation, with the rate a. The token after the last accepted one is sampled from p. In place of a rejected token
    it is another one, because the engine counts a draft token that the step commits as accepted. Below a node only the
    first child is read.
    """

    acceptance_rate: float  # probability that a draft token is accepted if all tokens before it were, in [0, 1]

    def __post_init__(self) -> None:
        """Raise ForedraftError for a rate out of range."""
        rate = self.acceptance_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise ForedraftError(f"acceptance_rate must lie in [0, 1], such as 0.8, got {rate!r:.40}")

    def __call__(self, tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
        """Verify as a `VerifyFunction`."""

        def select_child(b: int, node: int, p_node: Probs) -> tuple[int | None, Probs]:
            for child in tree.children[b][node][:1]:
                if noise.accept_uniform(b, child) < self.acceptance_rate:
                    return child, p_node
                return None, _exclude(p_node, tree.tokens[b][child])
            return None, p_node

        return verify_by_level(tree, to_target_probs(p), noise, select_child)


def _exclude(p: Probs, token: int) -> Probs:
    """Return p without a token; the uniform distribution of all others if p has no other token."""
    excluded = Probs.from_token(token, p.vocab_size)
    others = p.compute_residual(excluded)
    if others.total > 0:
        return others.normalise(fallback=others)
    return Probs(np.ones(p.vocab_size), p.vocab_size).compute_residual(excluded)


def make_simulated_rule(acceptance_rate: float) -> Rule:
    """Return the rule that accepts every draft token with a given probability.

    It is in no list of rules: a client of a server cannot choose it.

    Args:
        acceptance_rate: probability that a draft token is accepted if all tokens before it were, in [0, 1].

    Raises:
        ForedraftError: the rate is out of range.
    """
    return Rule(
        "simulated",
        SimulatedAcceptance(acceptance_rate),
        takes_trees=False,
        uses_q=False,
        shares_noise=False,
        is_lossless=False,
        is_reproducible=False,
        simulated_rate=float(acceptance_rate),
    )
