"""Input of a step's forward pass."""

from collections.abc import Mapping, Sequence

import torch

from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.transcript import Transcript
from foredraft.models.forward_batch import ForwardBatch
from foredraft.request import Batch, Request
from foredraft.tree import TokenTree


def find_prompt_logit_requests(transcripts: Mapping[Request, Transcript], batch: Batch) -> list[int]:
    """Return the batch indices of requests whose chunk has to yield prompt log-probabilities."""
    return [
        b
        for b, r in enumerate(batch.requests)
        if r.spec.sampling.prompt_logprobs is not None and transcripts[r].needs_prompt_logits
    ]


def build_forward_batch(
    batch: Batch, tree: TokenTree, with_prompt_logits: Sequence[int], device: torch.device, spec: DrafterSpec
) -> ForwardBatch:
    """Build the forward batch that verifies the trees of a step.

    Args:
        batch: requests of the step.
        tree: their trees.
        with_prompt_logits: batch indices of requests with logits for the nodes before the root too.
        device: device of the target.
        spec: needs of the drafter.
    """
    requests = batch.requests
    return ForwardBatch.from_token_tree(
        tree,
        [r.num_computed for r in requests],
        [r.pages for r in requests],
        batch.page_size,
        device,
        full_logit_requests=with_prompt_logits,
        sources=[r.spec.source for r in requests],  # encoder inputs; None for decoder-only models
        adapters=[r.spec.adapter for r in requests],
        images=[r.spec.images for r in requests],
        reads_all_states=spec.missed_states != "pause" or _end_before_the_root(batch, tree),
    )


def _end_before_the_root(batch: Batch, tree: TokenTree) -> bool:
    """Return whether a chunk ends right before the last token of a prompt, so that a draft reads its last state."""
    return any(
        root == size and request.num_computed + size == request.num_tokens - 1
        for request, root, size in zip(batch.requests, tree.roots, tree.sizes, strict=True)
    )
