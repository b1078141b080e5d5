"""Parser of reasoning between two marks such as <think> and </think>, before content and calls."""

from collections.abc import Callable

from foredraft.server.messages.events import MessageEvent, ReasoningPiece
from foredraft.server.messages.parser import MessageParser, find_marker


class ThinkParser:
    """State machine: white space, reasoning, then the text of the inner parser.

    The marks themselves and the white space around them are dropped. A text that does not begin with the opening mark
    has no reasoning.

    Args:
        inner: parser of the text after the reasoning.
        opening: mark before the reasoning.
        closing: mark after it.
        is_open: the prompt ends with the opening mark, so the output begins with reasoning.
    """

    def __init__(self, inner: MessageParser, opening: str, closing: str, is_open: bool) -> None:
        self._inner, self._opening, self._closing = inner, opening, closing
        self._state: Callable[[], bool] = self._read_reasoning if is_open else self._read_start
        self._buffer = ""
        self._space = ""  # white space that is dropped at the end of the reasoning
        self._has_reasoning = False
        self._events: list[MessageEvent] = []

    def push(self, text: str) -> list[MessageEvent]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._state == self._read_reasoning:
            text = self._space + self._buffer
            events = [ReasoningPiece(text)] if text.strip() else []
        elif self._buffer:
            events = self._inner.push(self._buffer)
        self._buffer = self._space = ""
        return events + self._inner.finish()

    def _read_start(self) -> bool:
        """Read white space and the opening mark. Any other text belongs to the inner parser."""
        text = self._buffer.lstrip()
        if text.startswith(self._opening):
            self._buffer, self._state = text[len(self._opening) :], self._read_reasoning
            return True
        if self._opening.startswith(text):
            return False
        self._state = self._read_inner
        return True

    def _read_reasoning(self) -> bool:
        offset, marker = find_marker(self._buffer, (self._closing,))
        self._write(self._buffer[:offset])
        self._buffer = self._buffer[offset + len(marker) :]
        if marker:
            self._state = self._skip_space
        return bool(marker)

    def _write(self, text: str) -> None:
        """Write reasoning without the white space around it."""
        text = self._space + text
        if not self._has_reasoning:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._has_reasoning = True
            self._events.append(ReasoningPiece(kept))

    def _skip_space(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._read_inner
        return True

    def _read_inner(self) -> bool:
        text, self._buffer = self._buffer, ""
        self._events += self._inner.push(text)
        return False
