"""Tokens one by one: their bytes, and how a single one is written in an answer."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from foredraft.completion import TokenLogprob
from foredraft.engine.detokenize import Detokenizer
from foredraft.server.errors import ApiError

LOWEST = -9999.0  # JSON has no infinity; what vLLM writes in its place


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level tokenizers spell each byte (GPT-2): itself where printable, else one above 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Vocabulary:
    """What a tokenizer knows of its tokens. Without a tokenizer every token is its number."""

    def __init__(self, tokenizer: Any | None, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._letters = _byte_letters()
        self._known: dict[int, tuple[str, bytes]] = {}

    @cached_property
    def added(self) -> dict[int, str]:
        """Tokens with a literal spelling of their own."""
        if self.tokenizer is None:
            return {}
        return {int(i): str(token) for i, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def special(self) -> dict[str, int]:
        """Control tokens: spelling -> id."""
        if self.tokenizer is None:
            return {}
        decoder = self.tokenizer.added_tokens_decoder.items()
        found = {str(token): int(i) for i, token in decoder if getattr(token, "special", True)}
        named = zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        return found | {str(token): int(i) for token, i in named}

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The control tokens that the tokenizer puts before and after every text."""
        if self.tokenizer is None:
            return [], []
        whole = list(self.tokenizer("a").input_ids)
        bare = list(self.tokenizer("a", add_special_tokens=False).input_ids)
        before = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), len(whole))
        return (whole[:before], whole[before + len(bare) :]) if before < len(whole) else ([], [])

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, about: bytes spelt as letters count one each."""
        if self.tokenizer is None:
            return 1
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def spelt(self, token: int, as_id: bool = False) -> str:
        """As text; part of a character as bytes:\\x.., so that two tokens never look alike."""
        return f"token_id:{token}" if as_id else self._of(token)[0]

    def bytes_of(self, token: int) -> list[int]:
        return list(self._of(token)[1])

    def _of(self, token: int) -> tuple[str, bytes]:
        found = self._known.get(token)
        if found is None:
            raw = self._bytes(token)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            found = self._known[token] = (text, raw)
        return found

    @cached_property
    def _decoders(self) -> frozenset[str]:
        if self._backend is None or self._backend.decoder is None:
            return frozenset()
        state = json.loads(self._backend.decoder.__getstate__())
        return frozenset(part["type"] for part in [state, *state.get("decoders", [])])

    def _bytes(self, token: int) -> bytes:
        if self.tokenizer is None or token >= self.size:
            return f"token_id:{token}".encode()
        if token in self.added:
            return self.added[token].encode()
        word = self.tokenizer.convert_ids_to_tokens(token)
        if word is None:  # the model has more rows than the tokenizer has tokens
            return b""
        if "ByteLevel" in self._decoders and all(letter in self._letters for letter in word):
            return bytes(self._letters[letter] for letter in word)
        if "ByteFallback" in self._decoders or "Metaspace" in self._decoders:
            if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
                return bytes([int(word[3:5], 16)])
            return str(word).replace("▁", " ").encode()
        return str(self.tokenizer.decode([token])).encode()

    def text(self, ids: Sequence[int]) -> str:
        """As a whole, control tokens left out, as the engine writes its texts."""
        if self.tokenizer is None:
            return ""
        return "".join(self.pieces(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text each token adds to those before it; an incomplete character at the end is left out."""
        detokenizer = Detokenizer(self.tokenizer, [])
        return [detokenizer.push(token) for token in ids]

    def need(self) -> Any:
        """The tokenizer. Raises ApiError where there is none."""
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: send token ids")
        return self.tokenizer


def clamped(logprob: float) -> float:
    return max(logprob, LOWEST)


def likeliest(entry: TokenLogprob, count: int) -> list[tuple[int, float]]:
    """The model's own: the `count` likeliest tokens, and the one that was taken where it is not among them."""
    top = list(entry.raw_top[:count])
    if entry.token_id not in [token for token, _ in top]:
        top.append((entry.token_id, entry.raw_logprob))
    return top
