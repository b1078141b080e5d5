"""Draft chain of one request under the rule `block`: weights and residual masses, computed where they are read."""

from foredraft.tree import TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import InvalidLogitsError, Probs, TargetProbs
from foredraft.verification.siblings import iterate_siblings

BOUND_SLACK = 1e-9  # relative excess of an upper bound of a weight, above its rounding error


class BlockChain:
    """Valid draft tokens of one request, and what is computed of their weights.

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
            child = next(iterate_siblings(tree, b, node, vocab_size), None)  # a node of a chain has one child
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
