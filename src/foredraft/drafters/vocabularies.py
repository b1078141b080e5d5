"""What two tokenizers have in common: every token as the bytes it stands for.

A vocabulary writes a text in its own tokens as it would after what stands before it, to the byte. Tokenizers spell
their tokens in different ways (byte-level letters, ▁ for a space, `<0x0A>` for a byte); the bytes
are what they share.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from foredraft.errors import ForedraftError

UNKNOWN = -1  # stands for one byte that a vocabulary has no token for
LONGEST = 64  # bytes of a token that is looked for where a text is spelt token by token
SPACE = "▁"


class Vocabulary(Protocol):
    """Tokens by what they stand for."""

    @property
    def spelt(self) -> Sequence[bytes | None]:
        """By id; None = a control token, or no token at all."""

    @property
    def controls(self) -> dict[str, int]:
        """Control tokens by name."""

    @property
    def ids(self) -> dict[bytes, int]:
        """The token that a run of bytes has to itself."""

    @property
    def eos(self) -> int | None: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def silent(self) -> frozenset[int]:
        """Control tokens that say nothing: padding, the unknown, the beginning of a text."""

    @property
    def opening(self) -> tuple[int, ...]:
        """What every text begins with."""

    def encode(self, text: str) -> list[int]: ...

    def continued(self, before: bytes, data: bytes) -> list[int]: ...


class TokenizerVocabulary:
    """A Hugging Face tokenizer as a vocabulary. `size`: ids from there on are never used (padding of the model)."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """Raises ForedraftError for a tokenizer whose tokens have no spelling."""
        self._tokenizer = tokenizer
        self._backend = _literal(getattr(tokenizer, "backend_tokenizer", None))
        names = {i: name for name, i in tokenizer.get_vocab().items() if 0 <= i < size}
        added = {int(i): entry for i, entry in tokenizer.added_tokens_decoder.items()}
        special = {i for i, entry in added.items() if getattr(entry, "special", True)} | set(tokenizer.all_special_ids)
        self.controls = {name: i for i, name in sorted(names.items()) if i in special}
        literal = {i: str(entry) for i, entry in added.items() if i not in special}
        spell = _speller(self._backend, tokenizer, names, special)
        found: list[bytes | None] = [None] * size
        for i, name in names.items():
            if i not in special:
                found[i] = literal[i].encode() if i in literal else spell(i, name)
        self.spelt = found
        self.eos, self.bos = _within(tokenizer.eos_token_id, size), _within(tokenizer.bos_token_id, size)
        silent = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
        self.silent = frozenset(i for i in silent if i is not None and i != self.eos)
        self.opening = _opening(tokenizer, self.eos)
        self.ids = _by_bytes(names, found)
        if not self.ids:
            raise ForedraftError("no token of this tokenizer stands for any text")
        self._longest = min(max(map(len, self.ids)), LONGEST)

    def encode(self, text: str) -> list[int]:
        """As the tokenizer does, without a word of its own; what looks like a control token is text."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def continued(self, before: bytes, data: bytes) -> list[int]:
        """Tokens that spell `data`, cut as in a text in which it follows `before`; UNKNOWN for a byte without a token.

        Where the tokenizer would cut across the seam, what is left of that token is spelt by itself. At the very
        beginning (`before` is empty) the space that some tokenizers put there stays.
        """
        whole, wanted = _from_character(before) + data, len(data)
        ids: list[int] = []
        for run, is_text in reversed(list(_runs(whole))):
            if wanted <= 0:
                break
            part = run[-wanted:] if wanted < len(run) else run
            is_first = not before and wanted == len(run)
            ids[:0] = self._run(run, part, is_first) if is_text else [self.ids.get(bytes([x]), UNKNOWN) for x in part]
            wanted -= len(part)
        return ids

    def spell(self, data: bytes) -> list[int]:
        """The longest tokens from the left, whatever the tokenizer would do; UNKNOWN for a byte without a token."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                found = self.ids.get(data[at : at + size])
                if found is not None:
                    break
            ids.append(UNKNOWN if found is None else found)
            at += size
        return ids

    def _run(self, run: bytes, part: bytes, is_first: bool) -> list[int]:
        """Tokens of the end `part` of a run of whole characters."""
        ids, left = self.encode(run.decode()), len(part)
        for i in range(len(ids) - 1, -1, -1):
            piece = self._piece(ids[i])
            if piece is None or piece[-left:] != part[max(left - len(piece), 0) : left]:
                return self.spell(part)  # normalised to something else, or unknown
            left -= len(piece)
            if left == 0:
                return ids if is_first and i == 1 and self._piece(ids[0]) == b" " else ids[i:]
            if left == -1 and is_first and piece[:1] == b" ":
                return ids[i:]
            if left < 0:
                return self.spell(piece[-left:]) + ids[i + 1 :]
        return self.spell(part)

    def _piece(self, token: int) -> bytes | None:
        return self.spelt[token] if token < len(self.spelt) else None


def _literal(backend: Any | None) -> Any | None:
    """A copy that takes names of control tokens in a text for text, and neither cuts nor pads."""
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy


def _within(token: int | None, size: int) -> int | None:
    return token if token is not None and 0 <= token < size else None


def _opening(tokenizer: Any, eos: int | None) -> tuple[int, ...]:
    ids = list(tokenizer("").input_ids)
    while len(ids) > 1 and ids[-1] == eos:
        ids.pop()
    return tuple(ids)


def _by_bytes(names: dict[int, str], spelt: Sequence[bytes | None]) -> dict[bytes, int]:
    """Of tokens of equal bytes a real one goes before `<0x0A>`, then the lower id."""
    ids: dict[bytes, int] = {}
    for i in sorted(names, key=lambda i: (_byte_of(names[i]) is not None, i)):
        piece = spelt[i]
        if piece:
            ids.setdefault(piece, i)
    return ids


class Speller(Protocol):
    def __call__(self, token: int, name: str, /) -> bytes | None: ...


def _speller(backend: Any | None, tokenizer: Any, names: dict[int, str], special: set[int]) -> Speller:
    """How this tokenizer's names stand for bytes, by its decoder."""
    decoders = _decoders(backend)
    if "ByteLevel" in decoders:
        letters = byte_letters()

        def by_letters(token: int, name: str) -> bytes | None:
            if all(letter in letters for letter in name):
                return bytes([letters[letter] for letter in name])
            return name.encode()

        return by_letters
    if decoders & {"ByteFallback", "Metaspace"} or (backend is None and any(SPACE in name for name in names.values())):

        def by_pieces(token: int, name: str) -> bytes | None:
            byte = _byte_of(name)
            return name.replace(SPACE, " ").encode() if byte is None else bytes([byte])

        return by_pieces
    return _by_decoding(tokenizer if backend is None else backend, names, special)


def _by_decoding(decoder: Any, names: dict[int, str], special: set[int]) -> Speller:
    """What a token adds to a text that has begun."""
    ordinary = [i for i in sorted(names) if i not in special]
    begun = next((i for i in ordinary if decoder.decode([i]).strip().isalnum()), None)
    if begun is None:
        raise ForedraftError("no token of this tokenizer stands for a letter or a digit")
    start = decoder.decode([begun])

    def by_decoding(token: int, name: str) -> bytes | None:
        text = decoder.decode([begun, token])
        is_clear = text.startswith(start) and "\N{REPLACEMENT CHARACTER}" not in text
        return text[len(start) :].encode() if is_clear else None

    return by_decoding


def _decoders(backend: Any | None) -> frozenset[str]:
    if backend is None or backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in [state, *state.get("decoders", [])])


def _byte_of(name: str) -> int | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


def byte_letters() -> dict[str, int]:
    """The letter for every byte in byte-level tokenizers (GPT-2): itself where it can be seen, else one above 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def whole(data: bytes) -> bytes:
    """Without the beginning of a character at its end."""
    for size in range(1, min(len(data), 3) + 1):
        byte = data[-size]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-size] if length > size else data
    return data


def _from_character(data: bytes) -> bytes:
    """From the first byte that may begin a character."""
    at = 0
    while at < min(len(data), 4) and data[at] & 0xC0 == 0x80:
        at += 1
    return data[at:]


def _runs(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Runs of whole characters (True), and of bytes that make none (False)."""
    view, at = memoryview(data), 0
    while at < len(data):
        try:
            str(view[at:], "utf-8")
            yield data[at:], True
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[at : at + error.start], True
            yield data[at + error.start : at + error.end], False
            at += error.end
