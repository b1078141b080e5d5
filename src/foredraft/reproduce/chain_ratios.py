"""Ratios p(x) / q(x) along the drafts of a run, and the tokens that two rules accept of them in expectation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import InvalidLogitsError, TargetProbs, to_target_probs
from foredraft.verification.rules import reject
from foredraft.verification.siblings import iterate_siblings

Ratios = tuple[float, ...]  # p(x) / q(x) of the tokens of one chain, in order


@dataclass(eq=False)
class ChainRecorder:
    """Token-wise verification that records the ratios of every draft; the `verify` of a rule.

    Attributes:
        chains: ratios of each draft, in the order of verification.
    """

    chains: list[Ratios] = field(default_factory=list)

    def __call__(self, tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
        probs = to_target_probs(p)
        self.chains += filter(None, (read_ratios(tree, probs, b) for b in range(len(tree.tokens))))
        return reject(tree, p, noise)


def read_ratios(tree: TokenTree, probs: TargetProbs, b: int) -> Ratios:
    """Read the ratios of the chain of request b, up to the first token that cannot be verified."""
    ratios: list[float] = []
    for node in range(tree.roots[b], tree.sizes[b] - 1):
        try:
            p = probs.get_probs(tree.get_row(b, node))
        except InvalidLogitsError:
            break
        sample = next(iterate_siblings(tree, b, node, p.vocab_size), None)
        if sample is None:
            break
        _, token, q = sample
        ratios.append(p[token] / q[token])
    return tuple(ratios)


def expect_token_wise(ratios: Ratios) -> float:
    """Compute the expected number of tokens that token-wise verification accepts of a draft: sum of prod min(1, r).

    Reference: 2211.17192.
    """
    total, weight = 0.0, 1.0
    for ratio in ratios:
        weight *= min(1.0, ratio)
        total += weight
    return total


def expect_block(ratios: Ratios) -> float:
    """Compute the expected number of tokens that block verification accepts: sum of w_i = min(1, w_(i-1) r_i).

    w_i is the probability that at least i tokens are accepted, over the uniforms and over the draft tokens after i. The
    mean over sampled drafts is therefore that of the rule. No summand is below that of `expect_token_wise`.

    Reference: 2403.10444.
    """
    total, weight = 0.0, 1.0
    for ratio in ratios:
        weight = min(1.0, weight * ratio)
        total += weight
    return total


@dataclass(frozen=True)
class ExpectedPoint:
    """Expected accepted tokens of the same drafts under both rules."""

    num_tokens: int  # K
    num_drafts: int
    token_wise: float  # mean over the drafts
    block: float  # mean over the drafts
    num_more: int  # drafts of which block accepts more
    num_fewer: int  # drafts of which it accepts fewer


def build_expected_point(num_tokens: int, chains: Sequence[Ratios]) -> ExpectedPoint:
    """Build the figures of the recorded drafts of one length."""
    pairs = [(expect_token_wise(chain), expect_block(chain)) for chain in chains]
    count = max(1, len(pairs))
    return ExpectedPoint(
        num_tokens=num_tokens,
        num_drafts=len(pairs),
        token_wise=sum(token_wise for token_wise, _ in pairs) / count,
        block=sum(block for _, block in pairs) / count,
        num_more=sum(block > token_wise for token_wise, block in pairs),
        num_fewer=sum(block < token_wise for token_wise, block in pairs),
    )
