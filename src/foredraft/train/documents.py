"""Documents to train on: token ids, and the mask of the tokens that a drafter learns."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[Any]  # one-dimensional, any integer type
MIN_EVAL_TOKENS = 64  # tokens; minimum length of both parts if a single document is split


@dataclass(frozen=True)
class Document:
    """Token ids of one document, and the source of an encoder-decoder model's output.

    `completion_mask` is False for tokens of a user or a system prompt. The first token is never learnt.
    """

    ids: TokenIds  # [n]
    completion_mask: NDArray[np.bool_] | None = None  # [n]; None = every token but the first
    source: tuple[int, ...] | None = None  # token ids that the encoder reads; None for a decoder alone

    @property
    def prompt(self) -> list[int]:
        """Token ids before the first token to learn; for plain text the first token alone."""
        if self.completion_mask is None:
            return self.ids[:1].tolist()  # type: ignore[no-any-return]
        learnt = np.flatnonzero(self.completion_mask)
        return self.ids[: int(learnt[0]) if len(learnt) else len(self.ids)].tolist()  # type: ignore[no-any-return]

    def crop(self, start: int, stop: int | None) -> "Document":
        return Document(
            self.ids[start:stop],
            None if self.completion_mask is None else self.completion_mask[start:stop],
            self.source,
        )

    def make_prompt(self, length: int) -> list[int]:
        """Return a prompt that the target can continue.

        It ends before the first token to learn. For plain text it has `length` tokens, at most half of the text.
        """
        if self.completion_mask is not None:
            return self.prompt
        return self.ids[: max(1, min(length, len(self.ids) // 2))].tolist()  # type: ignore[no-any-return]

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Mask [n] of the tokens to learn."""
        mask = np.ones(len(self.ids), dtype=np.bool_) if self.completion_mask is None else self.completion_mask.copy()
        mask[:1] = False
        return mask


def digest(documents: Sequence[Document]) -> str:
    """Hash the ids, masks and sources of documents, in order."""
    state = hashlib.sha256()
    for document in documents:
        state.update(np.ascontiguousarray(document.ids, dtype=np.int64).tobytes())
        state.update(b"" if document.completion_mask is None else np.packbits(document.completion_mask).tobytes())
        if document.source is not None:
            state.update(b"<" + np.array(document.source, dtype=np.int64).tobytes())
        state.update(b"|")
    return state.hexdigest()[:16]


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split documents into training and held-out documents.

    Every n-th document is held out, at least one. Of a single document the end is held out, if both parts are long
    enough and it has no source.

    Args:
        documents: All documents.
        share: Share to hold out, 0 to 1.

    Returns:
        Training documents and held-out documents.
    """
    if share <= 0 or not documents:
        return list(documents), []
    if len(documents) == 1:
        [single] = documents
        if single.source is not None:
            return [single], []
        split = min(round(len(single.ids) * (1 - share)), len(single.ids) - MIN_EVAL_TOKENS)
        return ([single.crop(0, split)], [single.crop(split, None)]) if split >= MIN_EVAL_TOKENS else ([single], [])
    every = max(2, round(1 / share))
    held_indices = set(range(every - 1, len(documents), every)) or {len(documents) - 1}
    training = [document for i, document in enumerate(documents) if i not in held_indices]
    return training, [documents[i] for i in sorted(held_indices)]
