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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import NO_TOKEN, Floats, InvalidLogitsError, Probs, TargetProbs, to_target_probs
from foredraft.verification.rule import Rule, VerifyFunction

BOUND_SLACK = 1e-9  # relative excess of an upper bound of a weight, above its rounding error

CommittedPath = tuple[list[int], list[int]]  # (nodes of a path or of a part of it, the token after each of them)


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

    return _build_commit(tree, get_path)


def reject(tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
    """Speculative sampling: accept a draft token x with probability min(1, r(x) / q(x)), else try its next sibling.

    r starts as p. Each rejected sibling replaces it by the residual norm(max(0, r - q)). If all siblings are rejected,
    the next token is sampled from the last r.

    Reference: 2211.17192, 2302.01318 (chains); SpecInfer 2305.09781 (siblings of several drafters, each with its q);
    Sequoia 2402.12374 (siblings that were sampled without replacement).
    """
    probs = to_target_probs(p)

    def walk(b: int) -> CommittedPath:
        node = tree.roots[b]
        nodes: list[int] = []
        tokens: list[int] = []
        while True:
            try:
                r = probs.get_probs(tree.get_row(b, node))
            except InvalidLogitsError:
                if not nodes:
                    raise
                return nodes, tokens
            nodes.append(node)
            accepted = None
            for child, x, q in _iterate_siblings(tree, b, node, r.vocab_size):
                if noise.accept_uniform(b, child) * q[x] < r[x]:
                    accepted = child
                    tokens.append(x)
                    break
                r = r.compute_residual(q).normalise(fallback=r)  # only rounding can leave a residual without mass
            if accepted is None:
                tokens.append(r.sample(noise.sample_uniform(b, node)))
                return nodes, tokens
            node = accepted

    return _build_commit(tree, walk)


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
        chain = _BlockChain(tree, probs, noise, b)
        num_accepted = chain.count_accepted()
        root = tree.roots[b]
        nodes, accepted = list(range(root, root + num_accepted + 1)), [x for x, _ in chain.drafts[:num_accepted]]
        ending = chain.get_ending(num_accepted)
        if ending is None:  # the logits after an accepted token are invalid
            return nodes[:-1], accepted
        return nodes, [*accepted, ending.sample(noise.sample_uniform(b, nodes[-1]))]

    return _build_commit(tree, walk)


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

        return _build_commit(tree, walk)


class _BlockChain:
    """Draft chain of one request under `block`: its valid draft tokens, and what is computed of their weights.

    i counts draft tokens: w_i, m_i and p_i are the weight, the residual mass and the target's distribution after i.
    p_i is read only if a token after i can still be accepted, m_i only if the uniform of token i is below w_i: the
    threshold m_i / (m_i + 1 - w_i) is never larger, because m_i <= w_i.

    Raises:
        InvalidLogitsError: if the logits at the root are invalid.
    """

    def __init__(self, tree: TokenTree, probs: TargetProbs, noise: Noise, b: int) -> None:
        root, vocab_size = tree.roots[b], probs.get_probs(tree.get_row(b, tree.roots[b])).vocab_size
        self.drafts: list[tuple[int, Probs]] = []  # (token, its q)
        for node in range(root, tree.sizes[b] - 1):
            child = next(_iterate_siblings(tree, b, node, vocab_size), None)  # a node of a chain has one child
            if child is None:
                break
            self.drafts.append(child[1:])
        self.uniforms = [noise.accept_uniform(b, root + 1 + i) for i in range(len(self.drafts))]
        self._weights = [1.0]  # w_0, w_1, ...
        self._probs_source, self._root_row = probs, tree.get_row(b, root)
        self._probs: dict[int, Probs | None] = {}

    def count_accepted(self) -> int:
        """Return the length of the longest prefix that passes its test."""
        for i, (x, q) in enumerate(self.drafts):
            p = self._get_probs(i) if self._can_accept_after(i) else None
            if p is None:
                break
            self._weights.append(min(self._weights[i] * p[x] / q[x], 1.0))
        return next((i for i in range(len(self._weights) - 1, 0, -1) if self._passes(i)), 0)

    def get_ending(self, i: int) -> Probs | None:
        """Return the distribution of the token after i accepted ones; None if its logits are invalid."""
        p = self._get_probs(i)
        return p if p is None or i == len(self.drafts) else self._compute_residual(i, p).normalise(fallback=p)

    def _get_probs(self, i: int) -> Probs | None:
        if i not in self._probs:
            try:
                self._probs[i] = self._probs_source.get_probs(self._root_row + i)
            except InvalidLogitsError:
                self._probs[i] = None
        return self._probs[i]

    def _compute_residual(self, i: int, p: Probs) -> Probs:
        return p.compute_residual(self.drafts[i][1], weight=self._weights[i])

    def _can_accept_after(self, i: int) -> bool:
        """Return whether a token after i can pass. p <= 1 bounds its weight by w_i over the product of q."""
        bound = self._weights[i] * (1 + BOUND_SLACK)
        for (x, q), uniform in zip(self.drafts[i:], self.uniforms[i:], strict=True):
            bound /= q[x]
            if uniform < bound:
                return True
        return False

    def _passes(self, i: int) -> bool:
        """Return whether the first i tokens pass: their uniform is below w_i, and below the threshold of m_i."""
        uniform, weight = self.uniforms[i - 1], self._weights[i]
        if uniform >= weight or i == len(self.drafts):
            return uniform < weight
        p = self._get_probs(i)
        if p is None:  # no token can be chosen after i, so i counts as the last draft token
            return True
        mass = self._compute_residual(i, p).total
        return uniform * (mass + 1 - weight) < mass or mass + 1 - weight <= 0


def _get_committed_prefix(tree: TokenTree, b: int) -> CommittedPath:
    """Return the nodes before the root and the tokens after them. These are committed already and need no check."""
    following = tree.committed_next[b] if tree.committed_next else ()
    return list(range(len(following))), list(following)


def _build_commit(tree: TokenTree, walk: Callable[[int], CommittedPath]) -> Commit:
    """Join the committed prefix of every request with the path that `walk(b)` accepts from the root on."""
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    failed: set[int] = set()
    for b, (size, root) in enumerate(zip(tree.sizes, tree.roots, strict=True)):
        nodes, following = _get_committed_prefix(tree, b)
        if root < size:
            try:
                accepted_nodes, accepted_following = walk(b)
                nodes, following = nodes + accepted_nodes, following + accepted_following
            except InvalidLogitsError:
                failed.add(b)
                nodes, following = [], []
        paths.append(nodes)
        tokens.append(following)
    return Commit.from_lists(paths, tokens, failed=frozenset(failed))


def _iterate_siblings(tree: TokenTree, b: int, node: int, vocab_size: int) -> Iterator[tuple[int, int, Probs]]:
    """Yield (child, token x, q_x) for the children of a node, in order.

    q_x is the distribution of x, given the siblings before it. It is one-hot for a deterministic draft token. For a
    sampled child it is the node's row of q without the tokens of the siblings before it, normalised.

    Iteration stops at a child that no correct drafter proposes: x is outside the vocabulary, the row of q is not a
    distribution over the vocabulary, or q_x(x) = 0. This child and the children after it count as not drafted.

    A merged tree has samples of one drafter or of several, and deterministic children. They come in this order, which
    is lossless, and accepts with at least the probability of deterministic children first. A child that two drafters
    sampled is yielded for each of them. The second time it is never accepted, since its rejection left r(x) = 0, so it
    needs no other uniform; but its q counts in the residual. docs/design.md ("Order of siblings") has the proofs.
    """
    children = tree.children[b][node]
    if not children or (tree.q is not None and tree.q.shape[-1] != vocab_size):
        return
    tokens = tree.tokens[b]
    for q_row, group in _group_siblings(tree, b, node, children):
        remaining = None if q_row is None else Probs(q_row, len(q_row))  # without the tokens of earlier siblings
        for child in group:
            x = tokens[child]
            if x >= vocab_size or (remaining is not None and len(remaining.mass) != vocab_size):
                return
            if remaining is None:
                yield child, x, Probs.from_token(x, vocab_size)
                continue
            total = remaining.total
            if not math.isfinite(total) or total <= 0 or remaining[x] <= 0 or float(remaining.mass.min()) < 0:
                return
            q = remaining.normalise(fallback=remaining)
            yield child, x, q
            remaining = q.exclude(x)


def _group_siblings(
    tree: TokenTree, b: int, node: int, children: Sequence[int]
) -> Iterator[tuple[Floats | None, Sequence[int]]]:
    """Yield the children of a node by drafter, each with the row of q that it sampled from; deterministic ones last.

    q is None for deterministic children. A child may be in several groups of samples.
    """
    row, num_sampled = tree.get_row(b, node), 0
    if tree.q is not None:
        q_row = _read_row(tree.q[row])
        if q_row.any():
            num_sampled = len(children) if tree.num_sampled_children is None else tree.num_sampled_children[row]
            yield q_row, children[:num_sampled]
    rest = children[num_sampled:]
    if tree.further_samples is not None:
        root = tree.roots[b]
        for samples in tree.further_samples.get((b, node - root), ()):
            group = [root + child for child in samples.children]
            yield _read_row(samples.q), group
            rest = [child for child in rest if child not in group]
    yield None, rest


def _read_row(q: Tensor) -> NDArray[Any]:
    """Return a row of q [V]; without a copy in the dtypes of numpy."""
    return (q.float() if q.dtype == torch.bfloat16 else q).cpu().numpy()


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
MATCH = Rule("match", match, takes_trees=True, uses_q=False, shares_noise=True, is_lossless=True, is_reproducible=True)
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
