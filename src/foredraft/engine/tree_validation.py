"""Validation of the trees that drafters propose."""

from dataclasses import dataclass
from itertools import chain

from foredraft.request import Batch
from foredraft.tree import TokenTree


@dataclass(frozen=True)
class ValidatedTree(TokenTree):
    """Copy of a proposal that a sandbox has validated. A sandbox around it accepts it for the same step as it is."""

    batch: Batch | None = None  # the tree is valid for its requests and budgets

    @classmethod
    def from_proposal(cls, tree: TokenTree, batch: Batch) -> "ValidatedTree":
        """Copy a proposal: the drafter may change its own object later."""
        tokens, parents = [list(row) for row in tree.tokens], [list(row) for row in tree.parents]
        num_sampled = None if tree.num_sampled_children is None else tuple(tree.num_sampled_children)
        further = None if tree.further_samples is None else dict(tree.further_samples)
        predicted, confidences = frozenset(tree.predicted), None if tree.confidences is None else dict(tree.confidences)
        return cls(tokens, parents, tree.q, tree.committed_next, num_sampled, predicted, further, confidences, batch)

    def is_valid_for(self, batch: Batch) -> bool:
        """Return whether it was validated in this step, within the budgets of `batch`."""
        if self.batch is batch:
            return True
        return (
            self.batch is not None
            and self.batch.requests is batch.requests  # a tuple of its own in every step
            and all(own <= budget for own, budget in zip(self.batch.granted_nodes, batch.granted_nodes, strict=True))
        )


def find_tree_fault(batch: Batch, tree: TokenTree, vocab_size: int) -> str | None:
    """Explain why the tree cannot be verified. Returns None if it can."""
    if len(tree.sizes) != len(batch):
        return f"{len(tree.sizes)} trees for {len(batch)} requests"
    if tree.committed_next is not None:
        return "committed_next is set, which only the engine may do"
    for b in range(len(batch)):
        fault = _find_request_fault(batch, tree, b, vocab_size)
        if fault is not None:
            return fault
    if tree.q is not None:
        rows = sum(size for size, scored in zip(tree.sizes, batch.needs_logits, strict=True) if scored)
        if tuple(tree.q.shape) != (rows, vocab_size):
            return f"q has shape {tuple(tree.q.shape)}, not {(rows, vocab_size)}"
        if (
            tree.num_sampled_children is not None
            and [type(count) for count in tree.num_sampled_children] != [int] * rows
        ):
            return f"num_sampled_children is not {rows} integers, one per row of q"
    fault = None if tree.further_samples is None else _find_samples_fault(tree, vocab_size)
    return fault or (None if tree.confidences is None else _find_confidence_fault(tree))


def _find_confidence_fault(tree: TokenTree) -> str | None:
    for b, confidences in (tree.confidences or {}).items():
        if tree.parents[b] != list(range(-1, len(confidences))):
            return f"{len(confidences)} confidences for {len(tree.parents[b]) - 1} nodes, which must be a chain"
        if not all(type(value) is float and 0.0 <= value <= 1.0 for value in confidences):  # NaN compares false
            return "a confidence is no number between 0 and 1"
    return None


def _find_samples_fault(tree: TokenTree, vocab_size: int) -> str | None:
    for (b, node), groups in (tree.further_samples or {}).items():
        for samples in groups:
            if not all(0 < child < tree.sizes[b] and tree.parents[b][child] == node for child in samples.children):
                return f"further_samples has nodes below node {node} that are no children of it"
            if tuple(samples.q.shape) != (vocab_size,):
                return f"a q of further_samples has shape {tuple(samples.q.shape)}, not {(vocab_size,)}"
    return None


def _find_request_fault(batch: Batch, tree: TokenTree, b: int, vocab_size: int) -> str | None:
    tokens, parents = tree.tokens[b], tree.parents[b]
    if not all(type(number) is int for number in chain(tokens, parents)):
        return "a token or a parent is not an integer"
    if tokens[:1] != [batch.get_root_token(b)]:
        return "node 0 is not the last committed token"
    if len(tokens) - 1 > batch.granted_nodes[b]:
        return f"{len(tokens) - 1} nodes drafted, {batch.granted_nodes[b]} allowed"
    is_chain = parents == list(range(-1, len(tokens) - 1))
    is_ordered = is_chain or all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
    if len(parents) != len(tokens) or parents[0] != -1 or not is_ordered:
        return "a parent is not an earlier node"
    rule = batch.requests[b].spec.rule
    if not is_chain and not rule.takes_trees:
        return f"branches for a request under {rule.name} verification, which takes chains"
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return "a token outside the vocabulary"
    if len(tokens) > 1 and (len(tokens) - 1 if is_chain else max(tree.depths[b])) > batch.requests[b].max_draft_depth:
        return "the draft is deeper than the request's remaining length"
    return None
