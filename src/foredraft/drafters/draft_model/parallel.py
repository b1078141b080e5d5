"""Parallel drafting of PARD (2504.18583): one pass of the draft model gives the distributions of all draft tokens.

The pass has the committed tokens without KV and, behind the last of them, one mask token per further draft token. The
model is causal as ever: a mask sees the committed tokens and the masks before it, and no draft token. The KV entries of
the masks are overwritten by the next pass; those of committed tokens alone stay.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.parallel_levels import grow_from_rows
from foredraft.drafters.common.tree_builder import NodeLogits, TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import LM

PARD_KEYS = ("pard_token", "ptd_token_id")  # of config.json: the model was trained to draft in parallel
MASK_KEYS = (*PARD_KEYS, "mask_token_id")  # the last is also a key of models that fill gaps


def find_mask_token(config: Any, name: str, parallel: bool | None) -> int | None:
    """Return the mask token of a draft model.

    Args:
        config: configuration of the model.
        name: name of the model in errors.
        parallel: the option of this name.

    Returns:
        Token id; None = the model drafts token by token.

    Raises:
        ForedraftError: if `parallel` is True and the configuration has no mask token, or if it is no token.
    """
    values = config.to_dict()
    keys = MASK_KEYS if parallel else PARD_KEYS if parallel is None else ()
    key = next((key for key in keys if values.get(key) is not None), None)
    if key is None:
        if parallel:
            raise ForedraftError(
                f"{name} has no mask token, so it cannot draft in parallel: its config.json needs one of "
                f"{', '.join(MASK_KEYS)}; leave parallel out, or train it with --set parallel=true"
            )
        return None
    token, size = values[key], config.get_text_config().vocab_size
    if not isinstance(token, int) or not 0 <= token < size:
        raise ForedraftError(f"set {key} in config.json of {name} to one of its tokens (0..{size - 1}), not {token!r}")
    return token


class ParallelDraftModel(DraftModel):
    """Drafter with a language model of PARD: one forward pass for all levels of all requests of a batch.

    Args:
        lm: draft model with the target's vocabulary.
        context: target, device and draft length.
        mask_token_id: token of the masks.
        options: tree options; None = a chain.
    """

    def __init__(self, lm: LM, context: DrafterContext, mask_token_id: int, options: TreeOptions | None = None) -> None:
        super().__init__(lm, context, options)
        self.mask_token_id = mask_token_id
        self.loop = self._chains = None  # both run a pass per level

    def _build_trees(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        spans = self._prefill([draft.builder.request for draft in drafts], page_size)
        rows = self._compute_rows(drafts, spans, page_size)
        self._record_roots(drafts)
        grow_from_rows(drafts, rows, partial(NodeLogits, vocab_size=self.context.vocab_size))

    def _compute_rows(
        self, drafts: Sequence[GrowingKVDraft], spans: Sequence[Span], page_size: int
    ) -> tuple[Tensor, ...]:
        """Compute the logits [D, V] of each draft, in one pass over the newest tokens and the masks."""
        masked, logit_rows, num_rows = [], list[int](), 0
        depths = [draft.builder.tree_spec.num_levels for draft in drafts]
        for span, depth in zip(spans, depths, strict=True):
            tokens = [*span.tokens, *[self.mask_token_id] * (depth - 1)]
            masked.append(span._replace(tokens=tokens, depths=range(len(tokens))))
            num_rows += len(tokens)
            logit_rows += range(num_rows - depth, num_rows)
        logits, _ = self.lm.forward(ForwardBatch.build(masked, logit_rows, page_size, self.context.device))
        return torch.split(logits[:, : self.context.vocab_size], depths)
