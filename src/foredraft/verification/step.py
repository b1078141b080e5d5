"""Verification of a step: by kernels for the requests that they can verify, by `Rule.verify` for the others.

Both commit the same, so which requests go where is a matter of speed.
"""

from collections.abc import Sequence
from functools import partial

import torch

from foredraft.kernels.gpu.loading import GPUKernels
from foredraft.kernels.tree_walker import find_tree_walker
from foredraft.tree import Commit, TokenTree
from foredraft.verification.device import find_device_requests, verify_on_device
from foredraft.verification.native import find_native_requests, needs_walk, verify_natively
from foredraft.verification.noise import SeededNoise
from foredraft.verification.probs import LazyTargetProbs
from foredraft.verification.rule import Rule
from foredraft.verification.rules import combine_rules


def verify_step(
    tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, rules: Sequence[Rule], kernels: GPUKernels | None
) -> Commit:
    """Verify a batch in which request b has rules[b].

    Args:
        tree: trees of the step.
        probs: target probabilities of its rows.
        noise: random numbers of the step.
        rules: one per request.
        kernels: kernels of the device of the logits; None = those of the CPU, if the logits are there.
    """
    chosen: list[int] = []
    walker = find_tree_walker(probs.logits) if kernels is None and needs_walk(tree, rules) else None
    if kernels is not None:
        chosen, verify = find_device_requests(tree, probs, rules), partial(verify_on_device, kernels=kernels)
    elif walker is not None:
        chosen, verify = find_native_requests(tree, probs, rules), partial(verify_natively, walker=walker)
    if not chosen:
        return combine_rules(rules)(tree, probs, noise)
    if len(chosen) == len(rules):
        return verify(tree, probs, noise, rules)
    others = [b for b in range(len(rules)) if b not in set(chosen)]
    parts = []
    for requests in (chosen, others):
        rows = [row for b in requests for row in range(*tree.row_offsets[b : b + 2])]
        selected = tree.select(requests), probs.select(rows), noise.select(requests, torch.tensor(rows))
        own = [rules[b] for b in requests]
        commit = verify(*selected, own) if requests is chosen else combine_rules(own)(*selected)
        parts.append((requests, commit))
    return _join_commits(parts, len(rules))


def _join_commits(parts: Sequence[tuple[Sequence[int], Commit]], num_requests: int) -> Commit:
    """Join commits of some requests each, with their batch indices."""
    paths: list[list[int]] = [[] for _ in range(num_requests)]
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    failed: set[int] = set()
    for requests, commit in parts:
        for i, b in enumerate(requests):
            paths[b], tokens[b] = commit.paths[i], commit.tokens[i]
        failed |= {requests[i] for i in commit.failed}
    return Commit.from_lists(paths, tokens, failed=frozenset(failed))
