"""Text and bytes of single tokens, as responses show them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from foredraft.outputs import TokenLogprob
from foredraft.server.errors import ApiError
from foredraft.tokenization.detokenizer import WindowDetokenizer
from foredraft.tokenization.token_bytes import list_decoder_types, spell_byte_level, spell_piece

MIN_LOGPROB = -9999.0  # vLLM's value for minus infinity, which JSON cannot represent


class ServerVocabulary:
    """Vocabulary of a model: text, bytes and control tokens.

    Args:
        tokenizer: transformers tokenizer. None = every token is written as its id.
        size: V of the model.
    """

    def __init__(self, tokenizer: Any | None, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._cache: dict[int, tuple[str, bytes]] = {}

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Added tokens, which are stored as literal text: id -> text."""
        if self.tokenizer is None:
            return {}
        return {int(i): str(token) for i, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Control tokens: text -> id."""
        if self.tokenizer is None:
            return {}
        decoder = self.tokenizer.added_tokens_decoder.items()
        special = {str(token): int(i) for i, token in decoder if getattr(token, "special", True)}
        named = zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        return special | {str(token): int(i) for token, i in named}

    @cached_property
    def outer_tokens(self) -> tuple[list[int], list[int]]:
        """Control tokens that the tokenizer adds before and after every text."""
        if self.tokenizer is None:
            return [], []
        ids = list(self.tokenizer("a").input_ids)
        inner = list(self.tokenizer("a", add_special_tokens=False).input_ids)
        start = next((i for i in range(len(ids)) if ids[i : i + len(inner)] == inner), len(ids))
        return (ids[:start], ids[start + len(inner) :]) if start < len(ids) else ([], [])

    @cached_property
    def max_token_chars(self) -> int:
        """Approximate characters of the longest token; in byte-level vocabularies every byte counts as one."""
        if self.tokenizer is None:
            return 1
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def format_token(self, token: int, as_id: bool = False) -> str:
        """Format a token as text, or as "token_id:N".

        Bytes of an incomplete character become `bytes:` with hex escapes.
        """
        return f"token_id:{token}" if as_id else self._describe_token(token)[0]

    def list_bytes(self, token: int) -> list[int]:
        """List the UTF-8 bytes of a token."""
        return list(self._describe_token(token)[1])

    def _describe_token(self, token: int) -> tuple[str, bytes]:
        entry = self._cache.get(token)
        if entry is None:
            raw = self._encode_token(token)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            entry = self._cache[token] = (text, raw)
        return entry

    @cached_property
    def _decoder_types(self) -> frozenset[str]:
        return list_decoder_types(self._backend)

    def _encode_token(self, token: int) -> bytes:
        if self.tokenizer is None or token >= self.size:
            return f"token_id:{token}".encode()
        if token in self.added_tokens:
            return self.added_tokens[token].encode()
        word = self.tokenizer.convert_ids_to_tokens(token)
        if word is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if "ByteLevel" in self._decoder_types and (data := spell_byte_level(word)) is not None:
            return data
        if "ByteFallback" in self._decoder_types or "Metaspace" in self._decoder_types:
            return spell_piece(str(word))
        return str(self.tokenizer.decode([token])).encode()

    def decode(self, ids: Sequence[int], skips_special: bool = True) -> str:
        """Decode ids to text, by default without control tokens, as the engine does."""
        if self.tokenizer is None:
            return ""
        return "".join(self.decode_pieces(ids, skips_special))

    def decode_pieces(self, ids: Sequence[int], skips_special: bool = True) -> list[str]:
        """Decode ids to the text that each token adds; an incomplete character at the end is left out."""
        detokenizer = WindowDetokenizer(self.tokenizer, [], skips_special)
        return [detokenizer.push(token) for token in ids]

    def require_tokenizer(self) -> Any:
        """Return the tokenizer. Raises ApiError if the model has none."""
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: send token ids")
        return self.tokenizer


def clamp_logprob(logprob: float) -> float:
    """Clamp a log-probability to a finite number, as JSON has no infinities."""
    return max(logprob, MIN_LOGPROB)


def select_top(entry: TokenLogprob, count: int) -> list[tuple[int, float]]:
    """Select the `count` likeliest tokens, plus the entry's own token if it is not among them."""
    top = list(entry.raw_top[:count])
    if entry.token_id not in [token for token, _ in top]:
        top.append((entry.token_id, entry.raw_logprob))
    return top
