"""Verification rules: pure functions `verify(tree, p, noise) -> Commit`, each with its `Rule`.

p is the distribution of the target, q that of the draft. Both have one row per scored node: the root and the draft
nodes. A row holds the distribution of the token after its node. The picture at the top of `tree.py` shows nodes, rows
and roots. b is the batch index of a request.

Random numbers are an argument, so every rule can be tested exactly and replayed. Uniforms lie in the open interval
(0, 1) and comparisons are strict: a token with p = 0 is never accepted. All arithmetic on probabilities is float64.

A rule walks down the tree from the root. It reads probabilities and random numbers only at the nodes that it visits.
Both may be computed on demand (`LazyTargetProbs`, `SeededNoise`) or be tables (a tensor [R, V], `NoiseTable`).

A request fails if the logits at its root are invalid (`InvalidLogitsError`). If they are invalid at an accepted draft
node, no token can be chosen after this node, so the path ends at its parent. The accepted token itself is kept: it is
the last token that the step commits, and thus the root of the next step.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.sampling.token_sampler import NO_TOKEN
from foredraft.tree import Commit, TokenTree
from foredraft.verification.block_chain import BlockChain
from foredraft.verification.noise import Noise
from foredraft.verification.paths import CommittedPath, build_commit, verify_by_level
from foredraft.verification.probs import InvalidLogitsError, Probs, TargetProbs, to_target_probs
from foredraft.verification.rule import Rule, VerifyFunction
from foredraft.verification.siblings import iterate_siblings


def match(tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
    """Sample the target's own token after each node; accept the child with that token, if there is one.

    The noise of a sample depends on seed, sample index and position alone (`SeededNoise.get_key`). The output therefore
    does not depend on the drafter, the draft length, the batch or preemption. All requests walk down together, one
    level at a time, so that the samples of a level are computed in one call.

    Reference: 2408.07978 (chains).
    """
    probs = to_target_probs(p)
    nodes = {b: root for b, root in enumerate(tree.roots) if root < tree.sizes[b]}  # batch index -> node to visit next
    paths: dict[int, CommittedPath] = {b: ([], []) for b in nodes}
    while nodes:
        sampled = probs.sample_tokens([tree.get_row(b, node) for b, node in nodes.items()], noise.get_key)
        next_nodes: dict[int, int] = {}
        for (b, node), token in zip(nodes.items(), sampled, strict=True):
            if token == NO_TOKEN:  # invalid logits: the path ends before this node
                continue
            path, following = paths[b]
            path.append(node)
            following.append(token)
            tokens = tree.tokens[b]
            for child in tree.children[b][node]:
                if tokens[child] == token:
                    next_nodes[b] = child
                    break
        nodes = next_nodes

    def get_path(b: int) -> CommittedPath:
        if not paths[b][0]:  # the logits at the root are invalid
            raise InvalidLogitsError
        return paths[b]

    return build_commit(tree, get_path)


def reject(tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
    """Speculative sampling: accept a draft token x with probability min(1, r(x) / q(x)), else try its next sibling.

    r starts as p. Each rejected sibling replaces it by the residual norm(max(0, r - q)). If all siblings are rejected,
    the next token is sampled from the last r.

    Reference: 2211.17192, 2302.01318 (chains); SpecInfer 2305.09781 (siblings of several drafters, each with its q);
    Sequoia 2402.12374 (siblings that were sampled without replacement).
    """

    def select_child(b: int, node: int, r: Probs) -> tuple[int | None, Probs]:
        for child, x, q in iterate_siblings(tree, b, node, r.vocab_size):
            if noise.accept_uniform(b, child) * q[x] < r[x]:
                return child, r
            r = r.compute_residual(q).normalise(fallback=r)  # only rounding can leave a residual without mass
        return None, r

    return verify_by_level(tree, to_target_probs(p), noise, select_child)


def block(tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
    """Block verification of chains: accept the longest prefix of draft tokens that passes a joint test.

    w_i is the product of p(x) / q(x) of the first i draft tokens, capped at 1 after each factor; m_i the mass of the
    residual max(0, w_i * p - q) after them. They pass if their uniform is below m_i / (m_i + 1 - w_i), or below w_i if
    no valid draft token follows. In expectation this accepts at least as many tokens as `reject`.

    Raises:
        ValueError: if a request's tree is not a chain.

    Reference: 2403.10444, algorithm 2.
    """
    if not tree.is_chain:
        raise ValueError("block verification takes chains; use verify='reject' with a drafter that proposes trees")
    probs = to_target_probs(p)

    def walk(b: int) -> CommittedPath:
        if tree.roots[b] + 1 == tree.sizes[b]:  # no draft: most steps while drafting is paused
            root = tree.roots[b]
            return [root], [probs.get_probs(tree.get_row(b, root)).sample(noise.sample_uniform(b, root))]
        chain = BlockChain(tree, probs, noise, b)
        num_accepted = chain.count_accepted()
        root = tree.roots[b]
        nodes, accepted = list(range(root, root + num_accepted + 1)), [x for x, _ in chain.drafts[:num_accepted]]
        ending = chain.get_ending(num_accepted)
        if ending is None:  # the logits after an accepted token are invalid
            return nodes[:-1], accepted
        return nodes, [*accepted, ending.sample(noise.sample_uniform(b, nodes[-1]))]

    return build_commit(tree, walk)


@dataclass(frozen=True)
class TypicalAcceptance:
    """Medusa's typical acceptance, a lossy rule: accept x if p(x) > min(eps, delta * exp(-H(p))), H in nats.

    Of all accepted paths it takes the longest; of several, the one with the largest joint probability. The defaults are
    those of the authors' `medusa_generate`, with delta = sqrt(eps).

    As in the authors' code with `fast=True`, the token after the path is the target argmax. The output then depends on
    no seed, but it depends on the drafts, so the rule is not `is_reproducible`. `samples_last` samples this token
    instead. One fault of their code is left out: it pads short paths with token 0 and verifies the padding by the
    logits of another node.

    Reference: 2401.10774, section 2.3.1.
    """

    posterior_threshold: float = 0.09  # eps, in (0, 1]
    posterior_alpha: float = 0.3  # delta, above 0
    samples_last: bool = False  # sample the token after the path instead of taking the argmax

    def __post_init__(self) -> None:
        """Raise ForedraftError for a number out of range."""
        for name, limit, words in (
            ("posterior_threshold", 1.0, "lie in (0, 1]"),
            ("posterior_alpha", sys.float_info.max, "be a finite number above 0"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
                raise ForedraftError(f"{name} must {words}, got {value!r:.40}")

    def __call__(self, tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
        """Verify as a `VerifyFunction`."""
        probs = to_target_probs(p)

        def walk(b: int) -> CommittedPath:
            tokens = tree.tokens[b]
            paths = [([tree.roots[b]], 0.0)]  # (nodes from the root down, log of the joint probability of their tokens)
            for path, log_prob in paths:  # the list grows during the loop, breadth first
                try:
                    p_node = probs.get_probs(tree.get_row(b, path[-1]))
                except InvalidLogitsError:
                    if len(path) == 1:
                        raise
                    continue
                limit = min(self.posterior_threshold, self.posterior_alpha * math.exp(-p_node.entropy))
                children = [c for c in tree.children[b][path[-1]] if tokens[c] < p_node.vocab_size]
                accepted = [(c, p_node[tokens[c]]) for c in children if p_node[tokens[c]] > limit]
                paths += [([*path, c], log_prob + math.log(mass)) for c, mass in accepted]
            best = max(paths, key=lambda candidate: (len(candidate[0]), candidate[1]))[0]
            following = [tokens[n] for n in best[1:]]
            try:
                p_node = probs.get_probs(tree.get_row(b, best[-1]))
            except InvalidLogitsError:
                return best[:-1], following
            last = p_node.sample(noise.sample_uniform(b, best[-1])) if self.samples_last else p_node.argmax
            return best, [*following, last]

        return build_commit(tree, walk)


def combine_rules(rules: Sequence[Rule]) -> VerifyFunction:
    """Return the function that verifies a batch in which request b has rules[b].

    Rules with equal functions, such as two of equal settings, verify their requests together.
    """
    first = rules[0]
    if all(rule is first for rule in rules):
        return first.verify
    functions = [rule.verify for rule in rules]
    groups: list[VerifyFunction] = []
    for function in functions:
        if function not in groups:
            groups.append(function)
    if len(groups) == 1:
        return first.verify

    def verify(tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
        probs = to_target_probs(p)
        paths: list[list[int]] = [[] for _ in rules]
        tokens: list[list[int]] = [[] for _ in rules]
        failed: set[int] = set()
        for function in groups:  # a rule gets only its own requests, because some take no trees
            indices = [b for b, other in enumerate(functions) if other == function]  # batch indices of this rule
            rows = torch.tensor([r for b in indices for r in range(*tree.row_offsets[b : b + 2])], dtype=torch.int64)
            commit = function(tree.select(indices), probs.select(rows.tolist()), noise.select(indices, rows))
            for i, b in enumerate(indices):
                paths[b], tokens[b] = commit.paths[i], commit.tokens[i]
            failed |= {indices[i] for i in commit.failed}
        return Commit.from_lists(paths, tokens, failed=frozenset(failed))

    return verify


# shares_noise: the token at a position is sampled with the noise key of the position. A drafter that samples with the
# same key tends to choose the same token.
MATCH = Rule(
    "match", match, takes_trees=True, uses_q=False, shares_noise=True, is_lossless=True, is_reproducible=True,
)  # fmt: skip
REJECT = Rule(
    "reject", reject, takes_trees=True, uses_q=True, shares_noise=False, is_lossless=True, is_reproducible=False,
    vllm_name="standard",
)  # fmt: skip
BLOCK = Rule(
    "block", block, takes_trees=False, uses_q=True, shares_noise=False, is_lossless=True, is_reproducible=False,
    vllm_name="block",
)  # fmt: skip
TYPICAL = Rule(
    "typical",
    TypicalAcceptance(),
    takes_trees=True,
    uses_q=False,
    shares_noise=False,
    is_lossless=False,
    is_reproducible=False,
    settings=("posterior_threshold", "posterior_alpha"),
)


def make_typical_rule(posterior_threshold: float = 0.09, posterior_alpha: float = 0.3) -> Rule:
    """Return Medusa's typical acceptance with its two thresholds, for `verify=` of `LLM` or `RequestOptions`.

    The rule is lossy. It accepts a draft token x if p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))), with
    the target's distribution p and its entropy H in nats. Smaller values accept more.

    Args:
        posterior_threshold: probability above which every draft token is accepted, in (0, 1]. Default 0.09.
        posterior_alpha: factor of exp(-H(p)), above 0. Default 0.3.

    Raises:
        ForedraftError: a value is out of range.
    """
    return TYPICAL.with_settings({"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha})
