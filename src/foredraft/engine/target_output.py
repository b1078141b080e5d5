"""Output of one forward pass of the target: logits and probabilities by row, and log-probabilities for the user.

Rows, roots and scored nodes are defined by the picture at the top of `tree.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor

from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.logprobs import compute_token_logprob
from foredraft.engine.transcript import Transcript
from foredraft.outputs import TokenLogprob
from foredraft.path_features import PathFeatures
from foredraft.request import Batch
from foredraft.sampling.distribution import TokenHistory, process_logits
from foredraft.sampling.filters import argmax_tokens
from foredraft.tree import Commit, TargetArgmax, TargetCandidates, TokenTree
from foredraft.verification.probs import LazyTargetProbs


@dataclass(frozen=True)
class TargetOutput:
    """Logits and probabilities of one forward pass. Row r belongs to a scored node, as in `TokenTree.get_row`."""

    logits: Tensor  # [R, V]
    probs: LazyTargetProbs  # R rows: p after all sampling settings, computed on access
    features: Tensor | None  # [T, F] hidden states of all nodes, for `Drafter.hidden_layers`
    # Only for requests with prompt_logprobs: batch index -> logits [C, V] of the C nodes before the root.
    prompt_logits: dict[int, Tensor]

    def compute_logprob(self, tree: TokenTree, b: int, node: int, token: int, num_top: int) -> TokenLogprob:
        """Compute the log-probability of the token that follows a scored node, and of the `num_top` likeliest."""
        row = tree.get_row(b, node)
        return compute_token_logprob(self.logits[row], self.probs.get_dense_row(row), token, num_top)

    def append_prompt_logprobs(self, transcript: Transcript, tree: TokenTree, b: int) -> None:
        """Append the log-probabilities of the prompt tokens that this step computed to the transcript of request b."""
        num_top = transcript.request.spec.sampling.prompt_logprobs
        if num_top is None or tree.committed_next is None:
            return
        # Entry i of prompt_logprobs belongs to token i, and row j below to token num_computed + 1 + j. After a
        # preemption, tokens are computed a second time and the first rows have their entries already.
        num_existing = len(transcript.prompt_logprobs) - 1 - transcript.request.num_computed
        rows = list(zip(self.prompt_logits[b], tree.committed_next[b], strict=True))
        for row, token in rows[num_existing:]:
            transcript.prompt_logprobs.append(compute_token_logprob(row, None, token, num_top))

    def attach_to(self, commit: Commit, tree: TokenTree, spec: DrafterSpec, with_tokens: bool) -> Commit:
        """Return the commit with what the drafter reads of the target.

        Args:
            commit: commit of the step.
            tree: verified tree.
            spec: needs of the drafter. Tokens are those of the model's own logits; sampling parameters do not count.
            with_tokens: give the drafter the target's tokens that it needs.
        """
        if self.features is None and not with_tokens:
            return commit
        features = self.features
        noted = None if features is None else PathFeatures.from_pass(features, tree.sizes, commit.paths)
        argmax, candidates = None, None
        if with_tokens:
            raw_logits = process_logits(self.logits, ())  # [R, V] float32; without parameters only the dtype changes
            argmax = TargetArgmax(tree, argmax_tokens(raw_logits)) if spec.needs_target_argmax else None
            candidates = _find_candidates(tree, raw_logits, spec.num_target_candidates)
        return commit.with_target_outputs(noted, argmax, candidates)


def _find_candidates(tree: TokenTree, logits: Tensor, num_candidates: int) -> TargetCandidates | None:
    """Find the likeliest tokens of each row with finite logits; None if no drafter reads them."""
    if not num_candidates:
        return None
    top, found = logits.topk(min(num_candidates, logits.shape[-1]))  # [R, k] each; NaN counts as the largest
    rows = [tuple(row) if isfinite(x) else () for row, x in zip(found.tolist(), top[:, 0].tolist(), strict=True)]
    return TargetCandidates(tree, tuple(rows))


def collect_output(
    batch: Batch, tree: TokenTree, logits: Tensor, features: Tensor | None, with_prompt_logits: Sequence[int]
) -> TargetOutput:
    """Split the logits of a forward pass into rows of scored nodes and rows of prompt nodes.

    Args:
        batch: requests of the step.
        tree: verified tree.
        logits: [R + C, V]. For each request in turn: rows of its C nodes before the root, if it is in
            `with_prompt_logits`; then rows of its scored nodes.
        features: [T, F] hidden states of all nodes, or None.
        with_prompt_logits: batch indices of requests whose nodes before the root have logits too.
    """
    prompt_logits: dict[int, Tensor] = {}
    if with_prompt_logits:
        scored_rows, offset = [], 0
        for b, (size, root) in enumerate(zip(tree.sizes, tree.roots, strict=True)):
            num_prompt_rows = root if b in with_prompt_logits else 0
            if num_prompt_rows:
                prompt_logits[b] = logits[offset : offset + num_prompt_rows]
            scored_rows.append(logits[offset + num_prompt_rows : offset + num_prompt_rows + size - root])
            offset += num_prompt_rows + size - root
        logits = torch.cat(scored_rows)
    return TargetOutput(logits, _build_target_probs(batch, tree, logits), features, prompt_logits)


def _build_target_probs(batch: Batch, tree: TokenTree, logits: Tensor) -> LazyTargetProbs:
    """Pair each row of logits with its request's sampling parameters, and with its token history if they need it."""
    spans = zip(batch.requests, tree.roots, tree.sizes, strict=True)
    samplings = [request.spec.sampling for request, root, size in spans for _ in range(root, size)]
    root_rows = [row for row, end in pairwise(tree.row_offsets) if row < end]
    if not any(request.spec.sampling.shapes_logits for request in batch.requests):
        return LazyTargetProbs(logits, samplings, root_rows=root_rows)

    def build_history(row: int) -> TokenHistory:
        b, node = tree.locate_row(row)
        return batch.requests[b].build_history(tree.get_draft_path(b, node))

    return LazyTargetProbs(logits, samplings, build_history, root_rows)
