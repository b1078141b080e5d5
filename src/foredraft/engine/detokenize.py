"""Token ids to text, one at a time, whole characters only."""

from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of a growing list of ids. Without a tokenizer every text is empty.

    Decodes a short window before and after each new token and emits their difference; bytes that do not yet make a
    character stay back until they do.
    """

    def __init__(self, tokenizer: Any | None, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        # a little context, because some tokenizers drop the space before the very first token
        self._ids = prompt[-4:] if tokenizer is not None else []
        self._seen = len(self._ids)  # ids whose text was emitted

    def push(self, token: int) -> str:
        """The text this token completes; often a word, at times nothing."""
        if self.tokenizer is None:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[: self._seen])
        after = self._decode(self._ids)
        if after.endswith(INCOMPLETE) and len(self._ids) - self._seen < 8:
            return ""
        self._ids = self._ids[self._seen - 1 if self._seen else 0 :]
        self._seen = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # the wrapper costs ten times what the decoding does
            return str(backend.decode(ids, skip_special_tokens=True))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
