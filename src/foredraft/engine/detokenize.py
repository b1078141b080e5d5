"""Token ids to text, one at a time, whole characters only."""

import codecs
from functools import cache
from typing import Any, Protocol

from foredraft.errors import ForedraftError, is_panic

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MAX_INCOMPLETE = 3  # bytes of a character that lacks its last; some tokenizers show each as one INCOMPLETE
CONTEXT = 4  # ids before the first, because some tokenizers drop the space before the very first token
MAX_PENDING = 32  # ids without a clean end before the window moves on all the same: this is no text


class Detokenizing(Protocol):
    def push(self, token: int) -> str:
        """The text this token completes; often a word, at times nothing."""

    def alone(self, token: int) -> str:
        """The text of one token by itself, for show: a part of a character is INCOMPLETE, a first space may be lost."""


def detokenizer(tokenizer: Any | None, prompt: list[int]) -> Detokenizing:
    """For what follows the prompt; tokens that are plain bytes are told from their names alone."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    is_bytes = type(decoder).__name__ == "ByteLevel"
    return ByteDetokenizer(tokenizer, prompt) if is_bytes else Detokenizer(tokenizer, prompt)


class ByteDetokenizer:
    """Text of tokens that stand for runs of bytes (byte-level BPE), whatever stands beside them: a tenth of the time
    of decoding a window twice."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._silent = {token for token, entry in added.items() if entry.special}
        self._spelt: dict[int, bytes] = {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode(b"".join(map(self._bytes, prompt[-4 * CONTEXT :])))
        self._pending = self._utf8.getstate()[0]  # the prompt ends inside a character

    def push(self, token: int) -> str:
        new = self._spelt.get(token)
        if new is None:
            new = self._spelt[token] = self._bytes(token)
        piece = self._decode(new)
        if self._pending:
            self._pending += new
            if piece:
                # what was broken before the text began is no part of it
                is_whole = self._pending.startswith(INCOMPLETE.encode())
                piece = piece if is_whole else piece.removeprefix(INCOMPLETE)
                self._pending = b""
        return piece

    def alone(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")

    def _decode(self, new: bytes) -> str:
        """Decode the next bytes; those that may begin a character stay in the decoder.

        Python's decoder also keeps the first two bytes of a surrogate, which no third byte can make valid.
        """
        piece = self._utf8.decode(new)
        kept = self._utf8.getstate()[0]
        is_surrogate = len(kept) == 2 and kept[0] == 0xED and kept[1] >= 0xA0
        return piece + self._utf8.decode(b"", final=True) if is_surrogate else piece

    def _bytes(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None or token in self._silent:
            return b""
        try:
            return bytes(map(_alphabet().__getitem__, name))
        except KeyError:  # an added token is spelt as it is
            return str(name).encode()


@cache
def _alphabet() -> dict[str, int]:
    """The character that stands for every byte in byte-level BPE: itself where it can be seen, else one from 256 up."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


class Detokenizer:
    """Text of a growing list of ids. Without a tokenizer every text is empty.

    Decodes a short window that ends with the new token and gives out what is new in it; bytes that do not yet make a
    character stay back until they do. What was given out is never taken back.

        ids   [ the last ids that ended cleanly ][ since then ... the new one ]
                                                  ^ fresh
    """

    def __init__(self, tokenizer: Any | None, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._ids = [] if tokenizer is None else self._context(prompt)
        self._fresh = len(self._ids)
        self._text = self._decode(self._ids)  # of the window, as far as it was given out

    def push(self, token: int) -> str:
        if self.tokenizer is None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole, is_overdue = _whole(text), len(self._ids) - self._fresh > MAX_PENDING
        # a prompt cut inside a character ends with INCOMPLETE until a token completes it
        known = self._text if text.startswith(self._text) else _whole(self._text)
        if whole != text and not text.startswith(known) and not is_overdue:
            return ""  # byte fallback decodes a run of bytes as a whole: half a character garbles those before it too
        piece = whole[len(known) :]
        if piece:
            self._text = whole
        if piece and whole == text:
            self._move(self._fresh)
        elif is_overdue:
            self._move(len(self._ids) - 2 * CONTEXT)
        return piece

    def alone(self, token: int) -> str:
        return self._decode([token])

    def _move(self, start: int) -> None:
        """The window begins at `start`; what was held back stays so."""
        self._ids = self._ids[start:]
        self._fresh = len(self._ids)
        self._text = _whole(self._decode(self._ids))

    def _context(self, prompt: list[int]) -> list[int]:
        """The end of the prompt, from where a character begins if that is near."""
        size = CONTEXT
        while size < 4 * CONTEXT and self._decode(prompt[-size:]).startswith(INCOMPLETE):
            size += 1
        return prompt[-size:]

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        try:
            return self._decoded(ids)
        except BaseException as error:
            if is_panic(error):  # no Exception: it would end the thread instead of the request
                raise ForedraftError("the tokenizer cannot decode this text") from error
            raise

    def _decoded(self, ids: list[int]) -> str:
        if self._backend is not None:  # the wrapper costs ten times what the decoding does
            return str(self._backend.decode(ids, skip_special_tokens=True))
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _whole(text: str) -> str:
    """Without what may be the beginning of a character."""
    if not text.endswith(INCOMPLETE):
        return text
    for _ in range(MAX_INCOMPLETE):
        text = text.removesuffix(INCOMPLETE)
    return text
