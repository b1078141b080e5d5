"""Draft of one request, and its conversion to the token tree of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.request import Batch, Request
from foredraft.sampling import rng
from foredraft.sampling.rng import NoiseStream
from foredraft.tree import SampledSiblings, TokenTree


@dataclass(frozen=True)
class Draft:
    """Draft nodes of one request below its root, which is the last committed token.

    Node 0 is the root. Node n >= 1 has the token tokens[n - 1] and the parent parents[n - 1], which is less than n.
    Sampled children of a node stand in the order in which they were sampled.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    # [1 + len(tokens), V] row n is the distribution from which the children of node n were sampled, without
    # replacement; a row of zeros = its children are deterministic. None = all draft tokens are deterministic.
    q: Tensor | None = None
    # Samples with replacement, by parent; the row of q of such a parent is zeros.
    samples: Mapping[int, SampledSiblings] | None = None
    confidences: tuple[float, ...] | None = None  # of the nodes of a chain, as in `TokenTree`

    @classmethod
    def from_chain(cls, tokens: Sequence[int], q: Tensor | None = None) -> "Draft":
        """Make a chain: the parent of each node is the node before it."""
        return cls(tuple(tokens), tuple(range(len(tokens))), q)

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]], budget: int) -> "Draft":
        """Merge sequences of tokens into a deterministic tree. Common prefixes share nodes.

        Args:
            paths: continuations of the root, the best first.
            budget: maximum number of nodes. If it is reached, nodes of later paths are left out.
        """
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for path in paths:
            node = 0
            for token in path:
                child = index.get((node, token))
                if child is None:
                    if len(tokens) == budget:
                        break
                    tokens.append(token)
                    parents.append(node)
                    child = index[node, token] = len(tokens)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def limit_depth(self, depth: int) -> "Draft":
        """Drop the nodes deeper than `depth`."""
        if len(self.tokens) <= depth:  # a tree of n nodes has depth n at most
            return self
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        if max(depths) <= depth:
            return self
        nodes = [node for node, d in enumerate(depths) if d <= depth]
        index = {node: i for i, node in enumerate(nodes)}  # node of this draft -> node of the result
        samples = {
            index[node]: replace(found, children=tuple(index[child] for child in found.children))
            for node, found in (self.samples or {}).items()
            if depths[node] < depth
        }
        return Draft(
            tuple(self.tokens[node - 1] for node in nodes[1:]),
            tuple(index[self.parents[node - 1]] for node in nodes[1:]),
            None if self.q is None else self.q[nodes],
            samples or None,
            None if self.confidences is None else self.confidences[: len(nodes) - 1],
        )


def to_token_tree(batch: Batch, drafts: Mapping[int, Draft]) -> TokenTree:
    """Build the token tree of a batch, as `Drafter.propose` returns it.

    The tree has a q if any draft has one; its rows are zeros for requests whose draft has none.

    Args:
        batch: requests of the step.
        drafts: drafts by batch index. Nodes deeper than the request's `max_draft_depth` are dropped here. A request
            without an entry gets its root alone.
    """
    empty = Draft()
    all_drafts = [drafts.get(b, empty).limit_depth(request.max_draft_depth) for b, request in enumerate(batch.requests)]
    tokens = [[batch.get_root_token(b), *draft.tokens] for b, draft in enumerate(all_drafts)]
    parents = [[-1, *draft.parents] for draft in all_drafts]
    tree = TokenTree.from_lists(tokens, parents, _stack_q(batch, all_drafts))
    samples = {(b, node): (found,) for b, d in enumerate(all_drafts) for node, found in (d.samples or {}).items()}
    confidences = {b: draft.confidences for b, draft in enumerate(all_drafts) if draft.confidences is not None}
    if samples or confidences:
        return replace(tree, further_samples=samples or None, confidences=confidences or None)
    return tree


def root_tree(batch: Batch) -> TokenTree:
    """Build the tree of a batch in which no request has a draft."""
    return TokenTree([[batch.get_root_token(b)] for b in range(len(batch))], [[-1] for _ in batch.requests])


def _stack_q(batch: Batch, drafts: Sequence[Draft]) -> Tensor | None:
    """Return q [R, V] of the requests whose chunk reaches the last committed token; None if no draft has a q."""
    tensors = [draft.q for draft in drafts if draft.q is not None]
    if not tensors:
        return None
    zeros = tensors[0].new_zeros(1, tensors[0].shape[-1])
    scored = [draft for draft, is_scored in zip(drafts, batch.needs_logits, strict=True) if is_scored]
    return torch.cat([zeros.expand(1 + len(d.tokens), -1) if d.q is None else d.q for d in scored])


def chain_noise_keys(request: Request, depth: int, stream: int) -> list[int]:
    """Return `draft_noise_key` of the nodes 0 to depth - 1 of a chain, where a node's depth is its index.

    Counters that the keys share are mixed once.
    """
    spec, position = request.spec, request.num_tokens - 1
    if spec.rule.shares_noise:
        key = rng.derive_key(spec.seed, spec.sample_index, NoiseStream.TOKEN)
        return [rng.extend_key(key, position + node + 1) for node in range(depth)]
    key = rng.derive_key(spec.seed, spec.sample_index, NoiseStream.DRAFT, position)
    further = (stream,) if stream else ()
    return [rng.extend_key(key, node, *further) for node in range(depth)]


def draft_noise_key(request: Request, node: int, depth: int, stream: int, repeat: int = 0) -> int:
    """Return the noise key with which a drafter samples the children of a draft node (`rng.exponential_race`).

    Under a rule that shares noise it is the key with which the target samples the position of the children, so both
    choose the same token if p and q agree. Under other rules the key depends on the position of the root, so that no
    later step reuses the noise of a rejected draft, and on the stream, so that drafters whose trees are merged sample
    independently.

    Args:
        request: the request; its seed and sample index are part of the key.
        node: index of the node in the draft; 0 = the root.
        depth: depth of the node; 0 = the root.
        stream: `Batch.draft_stream` of the proposal.
        repeat: index of the sample among those with replacement. Default 0.
    """
    position = request.num_tokens - 1  # sequence position of the root
    spec = request.spec
    if spec.rule.shares_noise:
        return rng.derive_key(spec.seed, spec.sample_index, NoiseStream.TOKEN, position + depth + 1)
    counters: tuple[int, ...] = (position, node, stream) if stream else (position, node)
    if repeat:  # longer than the paths of all other numbers, whose race adds the token id
        counters = (position, node, stream, repeat)
    return rng.derive_key(spec.seed, spec.sample_index, NoiseStream.DRAFT, *counters)
