"""Parser of harmony, the format of gpt-oss: messages with a channel and a recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>
    <|channel|>final<|message|>content<|return|>

The output follows <|start|>assistant of the prompt. <|call|> and <|return|> end it, and are not part of its text.
"""

import re
from collections.abc import Callable

from foredraft.server.messages.events import ArgumentsPiece, MessageEvent, ReasoningPiece
from foredraft.server.messages.json_call import NO_ARGUMENTS
from foredraft.server.messages.json_span import JsonSpan
from foredraft.server.messages.parser import CallNumbering, MessageParser, find_marker

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
REASONING_CHANNEL = "analysis"
FUNCTIONS = "functions."

_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


class HarmonyParser:
    """State machine: header, body, header, body. Text without a header goes to the inner parser.

    Args:
        inner: parser of the content.
        numbering: names of the tools, and ids. Default None = calls are content.
    """

    def __init__(self, inner: MessageParser, numbering: CallNumbering | None = None) -> None:
        self._inner, self._numbering = inner, numbering
        self._state: Callable[[], bool] = self._read_start
        self._write: Callable[[str], None] = self._write_content
        self._buffer = ""
        self._header = ""
        self._span = JsonSpan()  # of the arguments
        self._has_text = False  # the body has text
        self._begun: set[Callable[[str], None]] = set()  # kinds of text that earlier bodies have
        self._tool = ""  # name of the tool that the body calls
        self._events: list[MessageEvent] = []

    def push(self, text: str) -> list[MessageEvent]:
        self._buffer += text
        return self._run()

    def finish(self) -> list[MessageEvent]:
        """Return the last events. A header without a body is dropped."""
        if self._state == self._read_body:
            self._write(self._buffer)
        elif self._state == self._read_start:
            self._write_content(self._buffer)
        self._buffer = self._header = ""
        return self._run() + self._inner.finish()

    def _run(self) -> list[MessageEvent]:
        while self._buffer and self._state():
            pass
        events, self._events = self._events, []
        return events

    def _read_start(self) -> bool:
        """Read the first text, which begins with a header if the model writes harmony."""
        text = self._buffer.lstrip()
        if text.startswith((START, CHANNEL)):
            self._buffer, self._state = text, self._read_header
            return True
        if START.startswith(text) or CHANNEL.startswith(text):
            return False
        self._state, self._write = self._read_body, self._write_content
        return True

    def _read_header(self) -> bool:
        offset, marker = find_marker(self._buffer, (MESSAGE,))
        self._header += self._buffer[:offset]
        self._buffer = self._buffer[offset + len(marker) :]
        if marker:
            self._begin_body()
        return bool(marker)

    def _begin_body(self) -> None:
        channel, recipient = _CHANNEL_NAME.search(self._header), _RECIPIENT.search(self._header)
        self._state, self._has_text, self._span = self._read_body, False, JsonSpan()
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        self._tool, self._write = "", self._write_content
        if self._numbering is not None and name in self._numbering.names:
            self._tool, self._write = name, self._write_arguments
        elif channel is not None and channel[1] == REASONING_CHANNEL and not recipient:
            self._write = self._write_reasoning
        self._header = ""

    def _read_body(self) -> bool:
        offset, marker = find_marker(self._buffer, (*ENDS, START, CHANNEL))
        self._write(self._buffer[:offset])
        self._buffer = self._buffer[offset:]
        if marker:
            self._end_body()
            self._buffer = self._buffer.removeprefix(marker) if marker in ENDS else self._buffer
            self._state = self._skip_space if marker in ENDS else self._read_header
        return bool(marker)

    def _skip_space(self) -> bool:
        """Drop what is between an end and the next header."""
        offset, marker = find_marker(self._buffer, (START, CHANNEL))
        self._buffer = self._buffer[offset:]
        if marker:
            self._state = self._read_header
        return bool(marker)

    def _write_reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningPiece(self._separate(text)))

    def _write_content(self, text: str) -> None:
        if text:
            self._events += self._inner.push(self._separate(text))

    def _separate(self, text: str) -> str:
        """Put a line break between the texts of two bodies of one kind."""
        if not self._has_text and self._write in self._begun:
            text = "\n" + text
        self._has_text = True
        self._begun.add(self._write)
        return text

    def _write_arguments(self, text: str) -> None:
        if not self._has_text:
            text = text.lstrip()
            if not text:
                return
            if not text.startswith("{"):
                self._write = self._write_content
                self._write_content(text)
                return
            self._start_call()
        end = self._span.push(text)
        if end:
            self._events.append(ArgumentsPiece(self._last_index, text[:end]))

    def _start_call(self) -> None:
        assert self._numbering is not None
        self._has_text = True
        self._events.append(self._numbering.start_call(self._tool))

    @property
    def _last_index(self) -> int:
        assert self._numbering is not None
        return self._numbering.num_calls - 1

    def _end_body(self) -> None:
        """End a call whose body has no text as one without arguments."""
        if self._tool and not self._has_text and self._write == self._write_arguments:
            self._start_call()
            self._events.append(ArgumentsPiece(self._last_index, NO_ARGUMENTS))
