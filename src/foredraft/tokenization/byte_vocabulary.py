"""Vocabularies in bytes: the common form of different tokenizers.

Tokenizers name their tokens in different ways (byte-level letters, ▁ for a space, `<0x0A>` for a byte). Here every
token is the bytes that it decodes to, and a vocabulary encodes bytes as the continuation of preceding bytes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from foredraft.errors import ForedraftError
from foredraft.tokenization.token_bytes import (
    SPACE_MARKER,
    list_decoder_types,
    parse_byte_token,
    skip_partial_character,
    spell_byte_level,
    spell_piece,
    split_characters,
)

UNKNOWN_BYTE = -1  # in place of a byte that the vocabulary has no token for
MAX_TOKEN_BYTES = 64  # bytes of the longest token that greedy encoding tries


class ByteVocabulary(Protocol):
    """Interface of a vocabulary in bytes."""

    @property
    def token_bytes(self) -> Sequence[bytes | None]:
        """Bytes by token id; None = a control token or an unused id."""

    @property
    def control_tokens(self) -> dict[str, int]:
        """Token ids of control tokens by name."""

    @property
    def token_by_bytes(self) -> dict[bytes, int]:
        """Token id by its bytes."""

    @property
    def eos(self) -> int | None: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def empty_controls(self) -> frozenset[int]:
        """Control tokens without content: padding, unknown, beginning of a sequence."""

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        """Tokens that begin every sequence."""

    def encode(self, text: str) -> list[int]: ...

    def encode_continuation(self, before: bytes, data: bytes) -> list[int]: ...


class TokenizerVocabulary:
    """Vocabulary of a Hugging Face tokenizer.

    Args:
        tokenizer: tokenizer of transformers.
        size: number of usable ids; ids from `size` on are padding of the model.

    Raises:
        ForedraftError: if the tokens of the tokenizer have no bytes.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer
        self._backend = _copy_backend(getattr(tokenizer, "backend_tokenizer", None))
        names = {i: name for name, i in tokenizer.get_vocab().items() if 0 <= i < size}
        added = {int(i): entry for i, entry in tokenizer.added_tokens_decoder.items()}
        special = {i for i, entry in added.items() if getattr(entry, "special", True)} | set(tokenizer.all_special_ids)
        self.control_tokens = {name: i for i, name in sorted(names.items()) if i in special}
        literal = {i: str(entry) for i, entry in added.items() if i not in special}
        get_bytes = _make_token_spelling(self._backend, tokenizer, names, special)
        token_bytes: list[bytes | None] = [None] * size
        for i, name in names.items():
            if i not in special:
                token_bytes[i] = literal[i].encode() if i in literal else get_bytes(i, name)
        self.token_bytes = token_bytes
        self.eos, self.bos = _drop_outside(tokenizer.eos_token_id, size), _drop_outside(tokenizer.bos_token_id, size)
        empty_ids = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
        self.empty_controls = frozenset(i for i in empty_ids if i is not None and i != self.eos)
        self.prefix_tokens = _find_prefix_tokens(tokenizer, self.eos)
        self.token_by_bytes = _index_by_bytes(names, token_bytes)
        if not self.token_by_bytes:
            raise ForedraftError("no token of this tokenizer stands for any text")
        self._max_token_bytes = min(max(map(len, self.token_by_bytes)), MAX_TOKEN_BYTES)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens. Names of control tokens in the text are plain text."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_continuation(self, before: bytes, data: bytes) -> list[int]:
        """Encode `data` as the tokenizer would if it followed `before`; UNKNOWN_BYTE for a byte without a token.

        If a token would span both, its bytes in `data` are encoded greedily. If `before` is empty, the space that some
        tokenizers add at the beginning stays.
        """
        all_bytes, num_left = skip_partial_character(before) + data, len(data)
        ids: list[int] = []
        for run, is_text in reversed(list(split_characters(all_bytes))):
            if num_left <= 0:
                break
            part = run[-num_left:] if num_left < len(run) else run
            is_first = not before and num_left == len(run)
            ids[:0] = (
                self._encode_run(run, part, is_first)
                if is_text
                else [self.token_by_bytes.get(bytes([x]), UNKNOWN_BYTE) for x in part]
            )
            num_left -= len(part)
        return ids

    def encode_greedily(self, data: bytes) -> list[int]:
        """Encode by the longest token from the left, unlike the tokenizer; UNKNOWN_BYTE for a byte without a token."""
        ids: list[int] = []
        offset = 0
        while offset < len(data):
            for size in range(min(self._max_token_bytes, len(data) - offset), 0, -1):
                token = self.token_by_bytes.get(data[offset : offset + size])
                if token is not None:
                    break
            ids.append(UNKNOWN_BYTE if token is None else token)
            offset += size
        return ids

    def _encode_run(self, run: bytes, part: bytes, is_first: bool) -> list[int]:
        """Encode `part`, the end of a run of whole characters."""
        ids, num_left = self.encode(run.decode()), len(part)
        for i in range(len(ids) - 1, -1, -1):
            piece = self._get_token_bytes(ids[i])
            if piece is None or piece[-num_left:] != part[max(num_left - len(piece), 0) : num_left]:
                return self.encode_greedily(part)  # the tokenizer normalised the text, or a token has no bytes
            num_left -= len(piece)
            if num_left == 0:
                return ids if is_first and i == 1 and self._get_token_bytes(ids[0]) == b" " else ids[i:]
            if num_left == -1 and is_first and piece[:1] == b" ":
                return ids[i:]
            if num_left < 0:
                return self.encode_greedily(piece[-num_left:]) + ids[i + 1 :]
        return self.encode_greedily(part)

    def _get_token_bytes(self, token: int) -> bytes | None:
        return self.token_bytes[token] if token < len(self.token_bytes) else None


def _copy_backend(backend: Any | None) -> Any | None:
    """Copy a tokenizer so that it treats names of control tokens as text, and neither truncates nor pads."""
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy


def _drop_outside(token: int | None, size: int) -> int | None:
    return token if token is not None and 0 <= token < size else None


def _find_prefix_tokens(tokenizer: Any, eos: int | None) -> tuple[int, ...]:
    ids = list(tokenizer("").input_ids)
    while len(ids) > 1 and ids[-1] == eos:
        ids.pop()
    return tuple(ids)


def _index_by_bytes(names: dict[int, str], token_bytes: Sequence[bytes | None]) -> dict[bytes, int]:
    """Index tokens by bytes. Of equal bytes a normal token precedes a byte token (`<0x0A>`), then the lower id wins."""
    ids: dict[bytes, int] = {}
    for i in sorted(names, key=lambda i: (parse_byte_token(names[i]) is not None, i)):
        piece = token_bytes[i]
        if piece:
            ids.setdefault(piece, i)
    return ids


class TokenSpelling(Protocol):
    """Function that returns the bytes of a token, given its id and its name; None if unknown."""

    def __call__(self, token: int, name: str, /) -> bytes | None: ...


def _make_token_spelling(
    backend: Any | None, tokenizer: Any, names: dict[int, str], special: set[int]
) -> TokenSpelling:
    """Return the function from a token's name to its bytes, chosen by the tokenizer's decoder."""
    decoders = list_decoder_types(backend)
    if "ByteLevel" in decoders:

        def decode_letters(token: int, name: str) -> bytes | None:
            data = spell_byte_level(name)
            return name.encode() if data is None else data

        return decode_letters
    if decoders & {"ByteFallback", "Metaspace"} or (
        backend is None and any(SPACE_MARKER in name for name in names.values())
    ):
        return lambda token, name: spell_piece(name)
    return _make_decoded_spelling(tokenizer if backend is None else backend, names, special)


def _make_decoded_spelling(decoder: Any, names: dict[int, str], special: set[int]) -> TokenSpelling:
    """Return a function that decodes a token after a first token; its bytes are the added text."""
    ordinary = [i for i in sorted(names) if i not in special]
    first_token = next((i for i in ordinary if decoder.decode([i]).strip().isalnum()), None)
    if first_token is None:
        raise ForedraftError("no token of this tokenizer stands for a letter or a digit")
    prefix = decoder.decode([first_token])

    def decode_suffix(token: int, name: str) -> bytes | None:
        text = decoder.decode([first_token, token])
        is_clear = text.startswith(prefix) and "\N{REPLACEMENT CHARACTER}" not in text
        return text[len(prefix) :].encode() if is_clear else None

    return decode_suffix
