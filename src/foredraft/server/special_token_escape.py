"""Escaping of user text that spells control tokens, so that it is tokenized as ordinary text."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from foredraft.server.errors import ApiError
from foredraft.tokenization.encoding import encode


class SpecialTokenEscaper:
    """Replacer of control-token spellings by unguessable marks, which `encode` turns into ordinary tokens.

    Args:
        control_tokens: ids of all control tokens by their text.
        param: field of the request that holds the text, for errors. Default "messages".
    """

    def __init__(self, control_tokens: Mapping[str, int], param: str = "messages") -> None:
        self._control_ids, self._param = frozenset(control_tokens.values()), param
        longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._nonce = f"{secrets.randbits(64):020d}"
        self._mark_pattern = re.compile(f"\ue000{self._nonce}:(\\d+)\ue001")
        self._escaped: list[str] = []

    def escape(self, text: str) -> str:
        """Replace the control-token spellings in a text by marks."""
        return text if self._special_pattern is None else self._special_pattern.sub(self._escape_match, text)

    def _escape_match(self, match: re.Match[str]) -> str:
        self._escaped.append(match[0])
        return f"\ue000{self._nonce}:{len(self._escaped) - 1}\ue001"

    def encode(self, text: str, tokenizer: Any) -> list[int]:
        """Tokenize a rendered text: marks as ordinary text, other control-token spellings as control tokens.

        Raises:
            ApiError: a spelling that the tokenizer can read only as a control token.
        """
        parts = self._mark_pattern.split(text)
        texts = list(filter(None, parts[::2]))
        # One call for all texts, and each escaped word once: a message may consist of a million such words.
        plain_ids = iter(encode(tokenizer, texts, add_special_tokens=False).input_ids if texts else ())
        words = {word: self._encode_as_text(word, tokenizer) for word in dict.fromkeys(self._escaped)}
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids += words[self._escaped[int(part)]]
            elif part:
                ids += next(plain_ids)
        return ids

    def _encode_as_text(self, word: str, tokenizer: Any) -> list[int]:
        """Tokenize a control token's spelling as ordinary tokens, by splitting it in two."""
        for cut in range(1, len(word)):
            halves = [encode(tokenizer, part, add_special_tokens=False).input_ids for part in (word[:cut], word[cut:])]
            ids = [token for half in halves for token in half]
            if self._control_ids.isdisjoint(ids):
                return ids
        message = f"{self._param} holds text that this tokenizer can read only as a control token"
        raise ApiError(400, message, self._param)
