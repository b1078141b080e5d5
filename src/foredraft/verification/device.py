"""Verification of requests on the GPU. One block of numbers goes to the device, and one comes back."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from foredraft.kernels.gpu.loading import GPUKernels
from foredraft.kernels.gpu.verify_block import RequestNumbers, RowNumbers, VerifyBlock
from foredraft.sampling import rng
from foredraft.sampling.params import Sampling
from foredraft.sampling.weights import SIXTEENTHS, compute_scale
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import SeededNoise
from foredraft.verification.paths import CommittedPath, build_commit
from foredraft.verification.probs import InvalidLogitsError, LazyTargetProbs
from foredraft.verification.rule import Rule
from foredraft.verification.walk import find_walk, get_walk


def find_device_requests(tree: TokenTree, probs: LazyTargetProbs, rules: Sequence[Rule]) -> list[int]:
    """Return the batch indices of the requests that the device can verify."""
    if probs.logits.dtype == torch.float64 or not len(probs.logits):
        return []
    return [
        b
        for b, rule in enumerate(rules)
        if find_walk(tree, b, rule) is not None
        and all(map(_is_plain, probs.samplings[tree.row_offsets[b] : tree.row_offsets[b] + 1]))
    ]


def verify_on_device(
    tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, rules: Sequence[Rule], kernels: GPUKernels
) -> Commit:
    """Verify a batch of which the device can verify every request."""
    q, block = pack_step(tree, probs, noise, rules)
    results = kernels.walk_trees(probs.logits, q, block).tolist()

    def walk(b: int) -> CommittedPath:
        count, *pairs = results[b]
        if not count:
            raise InvalidLogitsError
        root = tree.roots[b]
        return [root + node for node in pairs[: 2 * count : 2]], pairs[1 : 2 * count : 2]

    return build_commit(tree, walk)


def pack_step(
    tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, rules: Sequence[Rule]
) -> tuple[Tensor | None, VerifyBlock]:
    """Return q [R, V] on the device, if the walks read it, and the block of all other numbers."""
    vocab_size, reads_q = probs.logits.shape[-1], tree.q is not None and any(rule.uses_q for rule in rules)
    has_drafts = tree.q is None or tree.q.shape[-1] == vocab_size  # else no draft token has a q over this vocabulary
    q = tree.q.to(probs.logits.device) if tree.q is not None and reads_q and has_drafts else None
    requests = [_describe_request(tree, probs, noise, rule, b) for b, rule in enumerate(rules)]
    rows = [
        numbers for b, rule in enumerate(rules) for numbers in _describe_rows(tree, b, has_drafts or not rule.uses_q)
    ]
    return q, VerifyBlock.pack(SIXTEENTHS, requests, rows, probs.logits.device)


def _is_plain(sampling: Sampling) -> bool:
    """Return whether the device computes the probabilities of these parameters, and no report reads the row."""
    return not sampling.shapes_logits and sampling.typical_p == 1 and sampling.logprobs is None


def _describe_request(
    tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, rule: Rule, b: int
) -> RequestNumbers:
    walk = get_walk(rule)
    assert walk is not None
    row, num_rows, root = tree.row_offsets[b], tree.sizes[b] - tree.roots[b], tree.roots[b]
    sampling = probs.samplings[row] if num_rows else Sampling()
    is_reduced = 0 < sampling.top_k < probs.logits.shape[-1]
    return RequestNumbers(
        walk, row, num_rows, noise.positions[b] + root, sampling.top_k if is_reduced else 0,
        sampling.is_greedy, compute_scale(sampling.temperature, torch.float32), _round_up(sampling.min_p),
        rng.derive_key(*noise.seeds[b]), sampling.top_p,
    )  # fmt: skip


def _round_up(ratio: float) -> float:
    """Return the least float32 number that is not below a ratio: float32 weights are above both or below both."""
    nearest = np.float32(ratio)
    return float(nearest if nearest >= ratio else np.nextafter(nearest, np.float32(2)))


def _describe_rows(tree: TokenTree, b: int, has_drafts: bool) -> list[RowNumbers]:
    root, offset, tokens = tree.roots[b], tree.row_offsets[b], tree.tokens[b]
    first_child, next_sibling = [-1] * len(tokens), [-1] * len(tokens)
    depths = tree.depths[b]
    for node, children in enumerate(tree.children[b]):
        if children and has_drafts:
            first_child[node] = children[0] - root
            for child, following in pairwise(children):
                next_sibling[child] = following - root
    num_sampled = tree.num_sampled_children
    return [
        RowNumbers(
            tokens[node], first_child[node], next_sibling[node],
            len(tokens) if num_sampled is None else num_sampled[offset + node - root], depths[node] - root, b,
        )
        for node in range(root, len(tokens))
    ]  # fmt: skip
