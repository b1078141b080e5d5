"""Deltas of a request that are not read yet, and the output that is in no delta yet."""

from collections import deque
from collections.abc import Sequence

from foredraft.outputs import Completion, Delta, FinishReason, Origin, StepTree


class DeltaQueue:
    """Deltas of one request, and the tokens since the last one. What is in a delta is final.

    Queuing a delta takes two steps, `put` and `mark_emitted`. If the second was interrupted, it can be called again, as
    long as the delta has not been taken.
    """

    def __init__(self, index: int) -> None:
        """Begin without a delta.

        Args:
            index: index of the completion, for its deltas.
        """
        self.index = index
        self.deltas: deque[Delta] = deque()  # queued and not yet read by the caller
        self.tokens: list[int] = []  # tokens since the last delta
        self.pieces: list[str] = []  # text by token since the last delta
        self.emitted = (0, "")  # number of tokens and text that are in deltas and therefore final
        self._unmarked: tuple[Delta, tuple[int, str]] | None = None  # delta being queued, and its `emitted`

    @property
    def has_unmarked(self) -> bool:
        """True if the last delta is queued and not yet marked as emitted."""
        return self._unmarked is not None and bool(self.deltas) and self.deltas[-1] is self._unmarked[0]

    def put(
        self,
        origins: Sequence[Origin],
        steps: Sequence[StepTree],
        reason: FinishReason | None,
        completion: Completion | None,
        emitted: tuple[int, str],
    ) -> None:
        """Queue a delta with the tokens since the last one.

        Args:
            origins: one per token.
            steps: token trees of the step, for requests that trace them.
            reason: set in the last delta.
            completion: set in the last delta.
            emitted: number of tokens and text in all deltas, this one included.
        """
        pieces, tokens = tuple(self.pieces), tuple(self.tokens)
        text = "".join(pieces)
        delta = Delta(self.index, text, tokens, tuple(origins), pieces, reason, completion, tuple(steps))
        self._unmarked = delta, emitted
        self.deltas.append(delta)

    def mark_emitted(self) -> None:
        """Mark the tokens of the last delta as final, if `has_unmarked`."""
        if self._unmarked is not None:
            self.emitted = self._unmarked[1]
            self.tokens, self.pieces = [], []
            self._unmarked = None

    def drop_tokens(self) -> None:
        """Drop the tokens since the last delta."""
        self.tokens, self.pieces = [], []
