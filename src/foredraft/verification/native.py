"""Verification of requests by the native library, one call for all of them.

In Python a rule takes several calls for every node. The library commits the same, bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.kernels.tree_walker import TreeWalker, WalkRequest
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import SeededNoise
from foredraft.verification.paths import CommittedPath, build_commit
from foredraft.verification.probs import InvalidLogitsError, LazyTargetProbs
from foredraft.verification.rule import Rule
from foredraft.verification.rules import combine_rules
from foredraft.verification.walk import find_walk, get_walk


def needs_walk(tree: TokenTree, rules: Sequence[Rule]) -> bool:
    """Return whether a walk may be faster than the rules. Without drafts `match` takes one call too, for all tokens."""
    return tree.row_offsets[-1] > len(rules) or any(rule.uses_q for rule in rules)


def find_native_requests(tree: TokenTree, probs: LazyTargetProbs, rules: Sequence[Rule]) -> list[int]:
    """Return the batch indices of the requests that the library can verify."""
    can_read = _can_read(tree.q, probs.logits.shape[-1])
    return [
        b
        for b, rule in enumerate(rules)
        if (can_read or not rule.uses_q)
        and find_walk(tree, b, rule) is not None
        and not (tree.roots[b] < tree.sizes[b] and probs.samplings[tree.row_offsets[b]].shapes_logits)
    ]


def verify_natively(
    tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, rules: Sequence[Rule], walker: TreeWalker
) -> Commit:
    """Verify a batch of which the library can verify every request."""
    spans = list(zip(tree.roots, tree.sizes, strict=True))
    tokens = [token for row, (root, size) in zip(tree.tokens, spans, strict=True) for token in row[root:size]]
    parents = [
        parent - root for row, (root, size) in zip(tree.parents, spans, strict=True) for parent in row[root:size]
    ]
    requests = [_describe_request(tree, probs, noise, rule, b) for b, rule in enumerate(rules)]
    q = None if tree.q is None or not any(rule.uses_q for rule in rules) else tree.q.float()
    results = walker.walk(probs.logits, q, requests, tokens, parents, tree.num_sampled_children)
    if None in results:
        return combine_rules(rules)(tree, probs, noise)

    def walk(b: int) -> CommittedPath:
        nodes, following = results[b] or ([], [])
        if not nodes:
            raise InvalidLogitsError
        root = tree.roots[b]
        return [root + node for node in nodes], following

    return build_commit(tree, walk)


def _can_read(q: Tensor | None, vocab_size: int) -> bool:
    """Return whether the library reads q, or q in float32, as it is. A draft of another vocabulary counts as none."""
    if q is None:
        return True
    is_narrow = q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_narrow and q.shape[-1] == vocab_size and q.device.type == "cpu" and q.stride(-1) == 1


def _describe_request(tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, rule: Rule, b: int) -> WalkRequest:
    walk = get_walk(rule)
    assert walk is not None
    row, root = tree.row_offsets[b], tree.roots[b]
    num_rows = tree.sizes[b] - root
    sampling = probs.samplings[row] if num_rows else Sampling()
    seed, sample_index = noise.seeds[b]
    position = noise.positions[b] + root
    return WalkRequest(sampling.filter_settings, seed, sample_index, position, row, num_rows, walk)
