"""Incremental detokenization: token ids to text, one token at a time, in whole characters."""

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from foredraft.errors import ForedraftError, is_panic
from foredraft.tokenization.token_bytes import spell_byte_level

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_REPLACEMENTS = 3  # bytes of an incomplete UTF-8 character; some tokenizers show a replacement character for each
CONTEXT_TOKENS = 4  # prompt tokens kept as context: some tokenizers drop the space before the first token
MAX_PENDING_TOKENS = 32  # tokens without a complete character, after which they are emitted as invalid text


class IncrementalDetokenizer(Protocol):
    """Detokenizer of one sequence. Emitted text is never withdrawn."""

    def push(self, token: int) -> str:
        """Append a token and return the text that it completes; empty if a character is incomplete."""

    def decode_token(self, token: int) -> str:
        """Decode one token alone, for display.

        An incomplete character becomes a replacement character; a leading space may be lost.
        """


def make_detokenizer(
    tokenizer: Any | None, prompt: Sequence[int], skips_special: bool = True, shown_tokens: Collection[int] = ()
) -> IncrementalDetokenizer:
    """Make the detokenizer for the output after `prompt`: ByteDetokenizer for byte-level BPE, else a window.

    Args:
        tokenizer: transformers tokenizer. None = all text is empty.
        prompt: token ids before the output.
        skips_special: whether special tokens have no text. Default True.
        shown_tokens: special tokens that are written as their names nevertheless. Default () = none.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    is_bytes = type(decoder).__name__ == "ByteLevel"
    kind = ByteDetokenizer if is_bytes else WindowDetokenizer
    inner = kind(tokenizer, prompt, skips_special)
    if tokenizer is None or not shown_tokens:
        return inner
    return ShowingDetokenizer(inner, {token: str(tokenizer.convert_ids_to_tokens(token)) for token in shown_tokens})


class ShowingDetokenizer:
    """Detokenizer that writes some control tokens as their names.

    Args:
        inner: detokenizer of all other tokens.
        names: text by token id.
    """

    def __init__(self, inner: IncrementalDetokenizer, names: Mapping[int, str]) -> None:
        self._inner, self._names = inner, names

    def push(self, token: int) -> str:
        return self._names[token] if token in self._names else self._inner.push(token)

    def decode_token(self, token: int) -> str:
        return self._names[token] if token in self._names else self._inner.decode_token(token)


class ByteDetokenizer:
    """Detokenizer for byte-level BPE: each token stands for the same bytes in every context.

    Takes about a tenth of the time of WindowDetokenizer.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skips_special: bool = True) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skips_special = skips_special
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = {token for token, entry in added.items() if entry.special}
        self._token_bytes: dict[int, bytes] = {}
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode(b"".join(map(self._encode_token, prompt[-4 * CONTEXT_TOKENS :])))
        self._pending_prompt_bytes = self._utf8_decoder.getstate()[0]  # not empty if the prompt ends in mid-character

    def push(self, token: int) -> str:
        token_bytes = self._token_bytes.get(token)
        if token_bytes is None:
            token_bytes = self._token_bytes[token] = self._encode_token(token)
        piece = self._decode(token_bytes)
        if self._pending_prompt_bytes:
            self._pending_prompt_bytes += token_bytes
            if piece:
                # A replacement character for invalid bytes of the prompt is not part of the output.
                is_whole = self._pending_prompt_bytes.startswith(REPLACEMENT_CHARACTER.encode())
                piece = piece if is_whole else piece.removeprefix(REPLACEMENT_CHARACTER)
                self._pending_prompt_bytes = b""
        return piece

    def decode_token(self, token: int) -> str:
        return self._encode_token(token).decode(errors="replace")

    def _decode(self, data: bytes) -> str:
        """Decode the next bytes; bytes that may begin a character stay in the decoder.

        Python's decoder also holds back the first two bytes of a surrogate, which no third byte can make valid.
        """
        piece = self._utf8_decoder.decode(data)
        pending = self._utf8_decoder.getstate()[0]
        is_surrogate = len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0
        return piece + self._utf8_decoder.decode(b"", final=True) if is_surrogate else piece

    def _encode_token(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._special_ids:
            return b"" if self._skips_special else str(name).encode()
        data = spell_byte_level(name)
        return str(name).encode() if data is None else data


class WindowDetokenizer:
    """Detokenizer for any tokenizer: decodes a short window of tokens and emits the new part of its text.

    Bytes of an incomplete character stay back until the character is complete. Without a tokenizer all text is empty.

        window   [ context: tokens emitted in full ][ pending tokens ... new token ]
                                                     ^ _pending_start
    """

    def __init__(self, tokenizer: Any | None, prompt: Sequence[int], skips_special: bool = True) -> None:
        self.tokenizer = tokenizer
        self._skips_special = skips_special
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._ids = [] if tokenizer is None else self._select_context(prompt)
        self._pending_start = len(self._ids)
        self._emitted_text = self._decode(self._ids)  # leading text of the window that was emitted already

    def push(self, token: int) -> str:
        if self.tokenizer is None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        complete, is_overdue = _strip_incomplete(text), len(self._ids) - self._pending_start > MAX_PENDING_TOKENS
        # A prompt that ends in mid-character ends with a replacement character until a token completes it.
        emitted = self._emitted_text if text.startswith(self._emitted_text) else _strip_incomplete(self._emitted_text)
        if complete != text and not text.startswith(emitted) and not is_overdue:
            return ""  # byte fallback decodes a run of bytes together: an incomplete character garbles earlier ones too
        piece = complete[len(emitted) :]
        if piece:
            self._emitted_text = complete
        if piece and complete == text:
            self._move_window(self._pending_start)
        elif is_overdue:
            self._move_window(len(self._ids) - 2 * CONTEXT_TOKENS)
        return piece

    def decode_token(self, token: int) -> str:
        return self._decode([token])

    def _move_window(self, start: int) -> None:
        """Drop the tokens before `start`; text of an incomplete character stays pending."""
        self._ids = self._ids[start:]
        self._pending_start = len(self._ids)
        self._emitted_text = _strip_incomplete(self._decode(self._ids))

    def _select_context(self, prompt: Sequence[int]) -> list[int]:
        """Take the last prompt tokens, more of them if they would begin in mid-character."""
        context, size = list(prompt[-4 * CONTEXT_TOKENS :]), CONTEXT_TOKENS
        while size < 4 * CONTEXT_TOKENS and self._decode(context[-size:]).startswith(REPLACEMENT_CHARACTER):
            size += 1
        return context[-size:]

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        try:
            return self._decode_ids(ids)
        except BaseException as error:
            if is_panic(error):  # a Rust panic is no Exception: it would end the thread instead of the request
                raise ForedraftError("the tokenizer cannot decode this text") from error
            raise

    def _decode_ids(self, ids: list[int]) -> str:
        if self._backend is not None:  # the Python wrapper takes ten times as long as the decoding itself
            return str(self._backend.decode(ids, skip_special_tokens=self._skips_special))
        assert self.tokenizer is not None
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False)
        )


def _strip_incomplete(text: str) -> str:
    """Remove trailing replacement characters, which may be the beginning of a character."""
    if not text.endswith(REPLACEMENT_CHARACTER):
        return text
    for _ in range(MAX_REPLACEMENTS):
        text = text.removesuffix(REPLACEMENT_CHARACTER)
    return text
