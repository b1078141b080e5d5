"""Bytes of tokens: GPT-2's byte alphabet, byte tokens such as `<0x0A>`, the space marker, and partial characters."""

import json
from collections.abc import Iterator
from typing import Any

SPACE_MARKER = "▁"  # stands for a space in the tokens of SentencePiece
BYTE_TOKEN_CHARS = len("<0xFF>")  # characters of a byte token


def _build_byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet, byte by letter: a printable byte is itself, the others are letters from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_get_byte = _build_byte_alphabet().__getitem__  # a method of the dict, for speed: every new token of an output needs it


def spell_byte_level(name: str) -> bytes | None:
    """Return the bytes of a token of a byte-level tokenizer; None if the name has a letter outside the alphabet."""
    try:
        return bytes(map(_get_byte, name))
    except KeyError:  # added tokens are stored as plain text
        return None


def spell_piece(name: str) -> bytes:
    """Return the bytes of a token of a tokenizer with space markers or byte tokens."""
    byte = parse_byte_token(name)
    return name.replace(SPACE_MARKER, " ").encode() if byte is None else bytes([byte])


def parse_byte_token(name: str) -> int | None:
    """Return the byte of a byte token (`<0x0A>`); None for any other token."""
    if len(name) == BYTE_TOKEN_CHARS and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


def list_decoder_types(backend: Any | None) -> frozenset[str]:
    """Return the types of a tokenizer's decoder and of its parts; empty without a decoder.

    Args:
        backend: tokenizer of the tokenizers library. None = no such tokenizer.
    """
    if backend is None or backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in [state, *state.get("decoders", [])])


def strip_partial_character(data: bytes) -> bytes:
    """Remove an incomplete UTF-8 character at the end."""
    for size in range(1, min(len(data), 3) + 1):
        byte = data[-size]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-size] if length > size else data
    return data


def skip_partial_character(data: bytes) -> bytes:
    """Remove the bytes before the first that may begin a UTF-8 character."""
    offset = 0
    while offset < min(len(data), 4) and data[offset] & 0xC0 == 0x80:
        offset += 1
    return data[offset:]


def split_characters(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split into runs of whole UTF-8 characters (True) and of invalid bytes (False)."""
    view, offset = memoryview(data), 0
    while offset < len(data):
        try:
            str(view[offset:], "utf-8")
            yield data[offset:], True
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[offset : offset + error.start], True
            yield data[offset + error.start : offset + error.end], False
            offset += error.end
