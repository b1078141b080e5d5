"""Incremental conversion of a request's tokens to the vocabulary of the draft model.

Only the last stretch is tokenized again when tokens are added, because its last tokens may merge with the next bytes.
Earlier tokens are frozen, so the cost per token does not grow with the sequence.

    tokens  [ frozen ............. ][ open: the tokens of `_open_bytes` ]
                                    ^ _num_frozen
"""

from collections.abc import Sequence

from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.tokenization.byte_vocabulary import UNKNOWN_BYTE

MAX_OPEN_BYTES, MIN_OPEN_BYTES = 192, 64  # bytes: limit before a prefix is frozen, and least bytes left open
CONTEXT_BYTES = 32  # bytes before the open stretch that its tokenization may depend on


class IncrementalRetokenizer:
    """One request's committed tokens in the draft model's vocabulary.

    Attributes:
        tokens: tokens of the draft model; drafted tokens may follow the committed ones.
        num_read: tokens of the target read so far.
        num_valid: leading tokens whose KV is written.
    """

    def __init__(self, vocab_map: VocabMap) -> None:
        self.vocab_map = vocab_map
        self.tokens: list[int] = list(vocab_map.draft.prefix_tokens)
        self.num_read = 0  # target tokens
        self.num_valid = 0  # leading tokens whose KV is written
        self._num_frozen = len(self.tokens)
        self._open_bytes = bytearray()
        self._frozen_bytes = b""

    @property
    def last_bytes(self) -> bytes:
        """Last bytes since the last control token, at most CONTEXT_BYTES."""
        return (self._frozen_bytes + bytes(self._open_bytes[-CONTEXT_BYTES:]))[-CONTEXT_BYTES:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more committed tokens of the target. They replace tokens added by `append_draft`."""
        token_bytes = self.vocab_map.target.token_bytes
        for token in tokens:
            piece = token_bytes[token] if token < len(token_bytes) else None
            if piece is None:
                self._append_control(token)
            else:
                self._open_bytes += piece
        self.num_read += len(tokens)
        self._retokenize()

    def append_draft(self, tokens: Sequence[int], num_valid: int) -> None:
        """Append drafted tokens that may be committed next. `num_valid`: leading tokens whose KV is written."""
        self.tokens += tokens
        self.num_valid = num_valid

    def _append_control(self, token: int) -> None:
        draft_token = self.vocab_map.draft_controls.get(token)
        if isinstance(draft_token, bytes):
            self._open_bytes += draft_token
        elif draft_token is not None and not self._is_duplicate_prefix(draft_token):
            self._retokenize()
            self._replace_tail([draft_token], len(self.tokens))
            self._num_frozen = len(self.tokens)
            self._open_bytes.clear()
            self._frozen_bytes = b""

    def _is_duplicate_prefix(self, token: int) -> bool:
        prefix_tokens = self.vocab_map.draft.prefix_tokens
        return prefix_tokens[-1:] == (token,) and len(self.tokens) == len(prefix_tokens) and not self._open_bytes

    def _retokenize(self) -> None:
        """Tokenize the open bytes again."""
        ids = self.vocab_map.draft.encode_continuation(self._frozen_bytes, bytes(self._open_bytes))
        self._replace_tail([i for i in ids if i != UNKNOWN_BYTE], self._num_frozen)
        if len(self._open_bytes) > MAX_OPEN_BYTES:
            self._freeze_prefix(ids)

    def _replace_tail(self, ids: Sequence[int], start: int) -> None:
        """Replace the tokens from `start` on. KV stays valid up to the first changed token."""
        num_equal = 0
        for old, new in zip(self.tokens[start:], ids, strict=False):
            if old != new:
                break
            num_equal += 1
        self.num_valid = min(self.num_valid, start + num_equal)
        self.tokens[start:] = ids

    def _freeze_prefix(self, ids: Sequence[int]) -> None:
        """Freeze all but the last bytes, up to the beginning of a word, or of a token if there is no word.

        `ids`: the tokens of `_open_bytes`, UNKNOWN_BYTE included.
        """
        size = 0
        for i in range(len(ids) - 1, 0, -1):  # not token 0, which may have an added space
            piece = b"\0" if ids[i] == UNKNOWN_BYTE else self.vocab_map.draft.token_bytes[ids[i]] or b""
            size += len(piece)
            if size >= MIN_OPEN_BYTES and (piece[:1].isspace() or size >= 2 * MIN_OPEN_BYTES):
                num_frozen_bytes = len(self._open_bytes) - size
                self._frozen_bytes = (self._frozen_bytes + bytes(self._open_bytes[:num_frozen_bytes]))[-CONTEXT_BYTES:]
                del self._open_bytes[:num_frozen_bytes]
                self._num_frozen += sum(token != UNKNOWN_BYTE for token in ids[:i])
                return
