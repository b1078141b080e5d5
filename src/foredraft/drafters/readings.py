"""A text in the tokens of another vocabulary, read as it grows: what a draft model is given to go on from.

Only the newest stretch is written anew when more text comes, because its last tokens may merge with what follows; what
lies further back stays as it is. So a token costs the same however long the text is.

    tokens  [ settled ............ ][ open: they spell `_bytes` ]
                                    ^ _settled
"""

from collections.abc import Sequence

from foredraft.drafters.intersection import Pair
from foredraft.drafters.vocabularies import UNKNOWN

STRETCH, KEPT = 192, 64  # bytes: when some of them settle, and how many stay open then at least
CONTEXT = 32  # bytes before a stretch that are looked at where it is cut into tokens


class Reading:
    """One request's committed text in the draft's tokens, and how far the memory of them is right."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.tokens: list[int] = list(pair.draft.opening)
        self.num_read = 0  # tokens of the target
        self.num_valid = 0  # leading tokens whose KV is written
        self._settled = len(self.tokens)
        self._bytes = bytearray()
        self._before = b""

    @property
    def tail(self) -> bytes:
        """The last bytes since the last control token."""
        return (self._before + bytes(self._bytes[-CONTEXT:]))[-CONTEXT:]

    def extend(self, tokens: Sequence[int]) -> None:
        """More committed tokens of the target. They replace what was drafted and noted by `expect`."""
        spelt = self.pair.target.spelt
        for token in tokens:
            piece = spelt[token] if token < len(spelt) else None
            if piece is None:
                self._control(token)
            else:
                self._bytes += piece
        self.num_read += len(tokens)
        self._write()

    def expect(self, tokens: Sequence[int], num_valid: int) -> None:
        """Drafted tokens that may be the text's next ones; the KV of the leading `num_valid` of all is written."""
        self.tokens += tokens
        self.num_valid = num_valid

    def _control(self, token: int) -> None:
        own = self.pair.controls.get(token)
        if isinstance(own, bytes):
            self._bytes += own
        elif own is not None and not self._has_opened_with(own):
            self._write()
            self._put([own], len(self.tokens))
            self._settled = len(self.tokens)
            self._bytes.clear()
            self._before = b""

    def _has_opened_with(self, own: int) -> bool:
        opening = self.pair.draft.opening
        return opening[-1:] == (own,) and len(self.tokens) == len(opening) and not self._bytes

    def _write(self) -> None:
        """Cut the open stretch into tokens again."""
        ids = self.pair.draft.continued(self._before, bytes(self._bytes))
        self._put([i for i in ids if i != UNKNOWN], self._settled)
        if len(self._bytes) > STRETCH:
            self._settle(ids)

    def _put(self, ids: Sequence[int], start: int) -> None:
        """Replace the tokens from `start` on; the memory stays right as far as they are the same."""
        same = 0
        for old, new in zip(self.tokens[start:], ids, strict=False):
            if old != new:
                break
            same += 1
        self.num_valid = min(self.num_valid, start + same)
        self.tokens[start:] = ids

    def _settle(self, ids: Sequence[int]) -> None:
        """All but the newest stays as it is from now on: up to the beginning of a word, or of a token if there is none.

        ids: the tokens of `_bytes`, UNKNOWN among them.
        """
        size = 0
        for i in range(len(ids) - 1, 0, -1):  # not the first: it may have a space that is not in the text
            piece = b"\0" if ids[i] == UNKNOWN else self.pair.draft.spelt[ids[i]] or b""
            size += len(piece)
            if size >= KEPT and (piece[:1].isspace() or size >= 2 * KEPT):
                done = len(self._bytes) - size
                self._before = (self._before + bytes(self._bytes[:done]))[-CONTEXT:]
                del self._bytes[:done]
                self._settled += sum(token != UNKNOWN for token in ids[:i])
                return
