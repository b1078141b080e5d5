"""Text of an output: tokens become whole characters, and text that may begin a stop string is held back."""

from collections.abc import Sequence
from typing import Any

from foredraft.request_spec import RequestSpec
from foredraft.tokenization.detokenizer import make_detokenizer


class OutputText:
    """Text of one output, token by token.

    Text that may begin a stop string is pending. The other text is released, and final until `restart`.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        prompt: Sequence[int],
        stop_strings: Sequence[str],
        skips_special: bool = True,
        shown_tokens: Sequence[int] = (),
    ) -> None:
        """Begin an empty text.

        Args:
            tokenizer: transformers tokenizer. None = all text is empty.
            prompt: token ids before the output.
            stop_strings: strings of which no part may be released while it may become complete.
            skips_special: whether special tokens have no text. Default True.
            shown_tokens: special tokens that have a text nevertheless: their names. Default () = none.
        """
        self.stop_strings = stop_strings
        self._longest_stop = max(map(len, stop_strings), default=0)
        self._tokenizer, self._prompt = tokenizer, prompt
        self._skips_special, self._shown_tokens = skips_special, shown_tokens
        self.restart()

    @classmethod
    def for_request(cls, tokenizer: Any | None, spec: RequestSpec) -> "OutputText":
        """Begin the text of a request."""
        options = spec.options
        return cls(tokenizer, spec.prompt, spec.sampling.stop, options.skip_special_tokens, options.shown_tokens)

    def restart(self) -> None:
        """Begin again without a token."""
        self._detokenizer = make_detokenizer(self._tokenizer, self._prompt, self._skips_special, self._shown_tokens)
        self.pending = ""  # end of the text, held back because it may begin a stop string
        self.released = ""

    def append(self, token: int) -> str:
        """Append a token and release its text at once, which needs a text without stop strings. Returns its text."""
        piece = self._detokenizer.push(token)
        self.released += piece
        return piece

    def append_pending(self, token: int, is_searched: bool) -> str | None:
        """Append a token to the pending text. `release` must follow.

        Args:
            token: next token.
            is_searched: cut the pending text before the stop string that this token completes.

        Returns:
            The stop string, or None.
        """
        num_searched = len(self.pending)
        self.pending += self._detokenizer.push(token)
        found = self._find_stop(num_searched) if is_searched and self.stop_strings else None
        if found is None:
            return None
        offset, stop_string = found
        self.pending = self.pending[:offset]
        return stop_string

    def release(self, is_end: bool) -> str:
        """Release the pending text that cannot begin a stop string; all of it after the end. Returns that text."""
        num_held = self._count_held() if self.stop_strings and not is_end else 0
        num_released = len(self.pending) - num_held
        piece, self.pending = self.pending[:num_released], self.pending[num_released:]
        self.released += piece
        return piece

    def restore(self, released: str) -> bool:
        """Set the released text, and drop the pending text if it was another one. Returns whether it was the same."""
        is_same = self.released == released
        self.released = released
        if not is_same:
            self.pending = ""
        return is_same

    def decode_token(self, token: int) -> str:
        """Decode one token alone, for display."""
        return self._detokenizer.decode_token(token)

    def _find_stop(self, num_searched: int) -> tuple[int, str] | None:
        """Find the stop string that begins first in the pending text; the longest if several begin there.

        Args:
            num_searched: pending characters that were searched before. Stop strings that end within them do not count,
                because min_tokens was not reached then.

        Returns:
            (offset in the pending text, stop string), or None.
        """
        candidates = (
            (self.pending.find(stop, max(0, num_searched - len(stop) + 1)), -len(stop), stop)
            for stop in self.stop_strings
        )
        matches = [match for match in candidates if match[0] >= 0]
        return (min(matches)[0], min(matches)[2]) if matches else None

    def _count_held(self) -> int:
        """Return the number of last characters of the pending text that may begin a stop string."""
        for size in range(min(len(self.pending), self._longest_stop - 1), 0, -1):
            if any(stop.startswith(self.pending[-size:]) for stop in self.stop_strings):
                return size
        return 0
