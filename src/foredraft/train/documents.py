"""A text to learn from: token ids, and which of them a drafter should learn to say."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[Any]  # one-dimensional, any integer type
MIN_EVAL_TOKENS = 64  # tokens that are worth measuring on


@dataclass(frozen=True)
class Document:
    """`learnt` is False for what a user or a system prompt says; the first token is never learnt."""

    ids: TokenIds  # [n]
    completion_mask: NDArray[np.bool_] | None = None  # [n]; None = every token but the first

    @property
    def prompt(self) -> list[int]:
        """Tokens before the first token to learn; for plain text the first token alone."""
        if self.completion_mask is None:
            return self.ids[:1].tolist()  # type: ignore[no-any-return]
        found = np.flatnonzero(self.completion_mask)
        return self.ids[: int(found[0]) if len(found) else len(self.ids)].tolist()  # type: ignore[no-any-return]

    def crop(self, start: int, stop: int | None) -> "Document":
        return Document(
            self.ids[start:stop], None if self.completion_mask is None else self.completion_mask[start:stop]
        )

    def make_prompt(self, length: int) -> list[int]:
        """A prompt to go on from: up to the first token to learn, or of plain text the first `length` tokens."""
        if self.completion_mask is not None:
            return self.prompt
        return self.ids[: max(1, min(length, len(self.ids) // 2))].tolist()  # type: ignore[no-any-return]

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[n] tokens to learn."""
        mask = np.ones(len(self.ids), dtype=np.bool_) if self.completion_mask is None else self.completion_mask.copy()
        mask[:1] = False
        return mask


def digest(documents: Sequence[Document]) -> str:
    """A fingerprint of ids and masks, in order."""
    state = hashlib.sha256()
    for document in documents:
        state.update(np.ascontiguousarray(document.ids, dtype=np.int64).tobytes())
        state.update(b"" if document.completion_mask is None else np.packbits(document.completion_mask).tobytes())
        state.update(b"|")
    return state.hexdigest()[:16]


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """(to learn from, to measure on): every n-th document is held out, at least one; of a single one its end."""
    if share <= 0 or not documents:
        return list(documents), []
    if len(documents) == 1:
        [whole] = documents
        at = min(round(len(whole.ids) * (1 - share)), len(whole.ids) - MIN_EVAL_TOKENS)
        return ([whole.crop(0, at)], [whole.crop(at, None)]) if at >= MIN_EVAL_TOKENS else ([whole], [])
    every = max(2, round(1 / share))
    held = set(range(every - 1, len(documents), every)) or {len(documents) - 1}
    kept = [document for i, document in enumerate(documents) if i not in held]
    return kept, [documents[i] for i in sorted(held)]
