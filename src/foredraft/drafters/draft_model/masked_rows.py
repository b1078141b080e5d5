"""Rows of one training pass of a draft model that drafts in parallel (PARD, 2504.18583).

A drafted token of depth d (1, 2, ...) is predicted by the d-th row of its draft: row 1 is that of the root, which has a
true token, and every later row has the mask token at the next position. A row sees the true tokens up to the root and
the masks of its own draft before it. All tokens of a sequence are roots at once.

Most rows would be masks. Conditional drop-token (COD) keeps a share of them: fewer at every depth, and a mask only if
the mask before it is kept, because it sees that one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_PROBE_TOKENS = 6


@dataclass(frozen=True)
class MaskedRows:
    """Rows of a pass over sequences of L tokens: the true tokens, then masks. All sequences have the same rows."""

    roots: Tensor  # [N] int64 position of the draft's root
    depths: Tensor  # [N] int64 masks from the root to this row; 0 = the root itself

    @classmethod
    def build(cls, length: int, roots: Sequence[Tensor]) -> "MaskedRows":
        """Make the rows of `length` tokens, and of the masks 1, 2, ... of the drafts with these roots [n]."""
        device = roots[0].device if roots else None
        every = [torch.arange(length, device=device), *roots]
        depths = [torch.full_like(found, depth) for depth, found in enumerate(every)]
        return cls(torch.cat(every), torch.cat(depths))

    @property
    def positions(self) -> Tensor:
        """Position [N] of every row. The row predicts the token after it."""
        return self.roots + self.depths

    def build_visible(self) -> Tensor:
        """Return [N, N] bool: entry (i, j) is true if row i sees row j."""
        is_context = (self.depths == 0)[None] & (self.roots[None] <= self.roots[:, None])
        is_same_draft = self.roots[None] == self.roots[:, None]
        return is_context | (is_same_draft & (self.depths[None] <= self.depths[:, None]))

    def select_learnt(self, mask: Tensor) -> Tensor:
        """Return [B, N] bool: rows to learn from, given the mask [B, L + 1] of the tokens to learn.

        The draft up to the predicted token has tokens to learn alone: a draft never crosses a user's turn.
        """
        lengths = mask.long().cumsum(-1)  # tokens to learn up to each one
        after = self.positions + 1
        return mask[:, after] & (lengths[:, after] - lengths[:, self.roots] == self.depths + 1)


def choose_rows(mask: Tensor, num_tokens: int, retention: float, min_retention: float) -> MaskedRows:
    """Choose the rows of a pass, by COD.

    Args:
        mask: [B, L + 1] bool: tokens to learn.
        num_tokens: length K of a draft: a root has K - 1 masks at most.
        retention: share r of the roots that keep mask d is max(r^d, `min_retention`).
        min_retention: lower bound of that share.
    """
    length = mask.shape[1] - 1
    kept, chosen = torch.arange(length, device=mask.device), []
    useful = _find_useful(mask, kept, 1)
    num_useful = int(useful.sum())
    for depth in range(1, num_tokens):
        kept = kept[kept + depth < length]
        kept = kept[_find_useful(mask, kept, depth)]
        count = min(len(kept), math.ceil(num_useful * max(retention**depth, min_retention)))
        kept = kept[torch.randperm(len(kept), device=kept.device)[:count]].sort().values
        if not len(kept):
            break
        chosen.append(kept)
    return MaskedRows.build(length, chosen) if chosen else MaskedRows.build(length, [kept[:0]])


def _find_useful(mask: Tensor, roots: Tensor, depth: int) -> Tensor:
    """Return [n] bool: roots whose mask of a depth has a token to learn in any sequence."""
    inside = roots + depth < mask.shape[1] - 1
    rows = MaskedRows(roots[inside], torch.full_like(roots[inside], depth))
    found = torch.zeros_like(inside)
    found[inside] = rows.select_learnt(mask).any(0)
    return found


def compute_masked_logits(model: Any, tokens: Tensor, rows: MaskedRows, mask_token_id: int) -> Tensor:
    """Compute the logits [B, N, V] after every row of sequences [B, L].

    Args:
        model: causal transformers model that takes a mask [1, 1, N, N] and positions.
        tokens: true tokens.
        rows: rows of the pass; the first L are the true tokens.
        mask_token_id: token of the masks.
    """
    num_masks = len(rows.roots) - tokens.shape[1]
    ids = torch.cat([tokens, tokens.new_full((len(tokens), num_masks), mask_token_id)], -1)
    bias = torch.zeros(len(rows.roots), len(rows.roots), dtype=model.dtype, device=tokens.device)
    bias.masked_fill_(~rows.build_visible(), torch.finfo(model.dtype).min)
    positions = rows.positions.expand(len(tokens), -1)
    bias = bias.expand(len(tokens), 1, -1, -1)
    output = model(input_ids=ids, position_ids=positions, attention_mask=bias, use_cache=False)
    return output.logits  # type: ignore[no-any-return]


@torch.no_grad()
def takes_masked_rows(model: Any, mask_token_id: int) -> bool:
    """Return whether the rows of a masked pass have the logits of plain passes: recurrent layers, for one, have not."""
    device = model.device
    size = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(NUM_PROBE_TOKENS, device=device) * 7 + 1)[None] % size
    rows = MaskedRows.build(NUM_PROBE_TOKENS, [torch.tensor([2], device=device)] * 2)
    masks = tokens.new_full((1, 2), mask_token_id)
    try:
        found = compute_masked_logits(model, tokens, rows, mask_token_id)[0]
        whole = model(input_ids=tokens, use_cache=False).logits[0]
        cut = model(input_ids=torch.cat([tokens[:, :3], masks], -1), use_cache=False).logits[0, 3:]
    except (RuntimeError, TypeError, ValueError):  # a model that takes no such mask, or no positions
        return False
    return torch.allclose(found, torch.cat([whole, cut]), atol=1e-3, rtol=1e-3)
