"""Parser of content with tool calls that are JSON, for all families but harmony."""

import re
from collections.abc import Callable

from foredraft.server.messages.call_syntax import CallSyntax
from foredraft.server.messages.events import ArgumentsPiece, MessageEvent
from foredraft.server.messages.json_call import CallStatus, JsonCallReader
from foredraft.server.messages.named_call import NamedCallReader
from foredraft.server.messages.parser import CallNumbering, ContentWriter, find_marker

_SPACE = re.compile(r"\s*")


class CallParser:
    """State machine: content, then the opening, then calls, then content again.

    Text after an opening is kept until it is certainly a call. If it turns out to be none, it is content.

    Args:
        syntax: marks of the family.
        numbering: names of the tools, and ids.
    """

    def __init__(self, syntax: CallSyntax, numbering: CallNumbering) -> None:
        self._syntax, self._numbering = syntax, numbering
        self._state: Callable[[], bool] = self._read_start if syntax.is_leading else self._read_content
        self._buffer = ""  # text that was not read
        self._candidate = ""  # text since the opening that may be a call
        self._is_final = False  # no text will follow
        self._in_list = False
        self._reader: JsonCallReader | NamedCallReader | None = None
        self._writer = ContentWriter()
        self._events: list[MessageEvent] = []

    def push(self, text: str) -> list[MessageEvent]:
        self._buffer += text
        return self._run()

    def finish(self) -> list[MessageEvent]:
        self._is_final = True
        events = self._run()
        events += self._writer.write(self._candidate + self._buffer)
        self._candidate = self._buffer = ""
        return events + self._writer.finish()

    def _run(self) -> list[MessageEvent]:
        while self._buffer and self._state():
            pass
        events, self._events = self._events, []
        return events

    # Every state reads from the front of the buffer. It returns False if it needs more text.

    def _read_start(self) -> bool:
        self._keep_space()
        if not self._buffer:
            return False
        is_json = self._buffer[0] in "{["
        self._state = self._read_call if is_json else self._read_content
        if not is_json:
            self._fail()
        return True

    def _read_content(self) -> bool:
        markers = (self._syntax.opening,) if self._syntax.opening else ()
        offset, marker = find_marker(self._buffer, markers)
        if self._is_final and not marker:
            offset = len(self._buffer)
        self._events += self._writer.write(self._buffer[:offset])
        self._buffer = self._buffer[offset + len(marker) :]
        if marker:
            self._candidate, self._in_list, self._state = marker, False, self._read_call
        return bool(marker)

    def _read_call(self) -> bool:
        """Read what is before a call."""
        self._keep_space()
        if not self._buffer:
            return False
        char = self._buffer[0]
        if char == "[" and not self._in_list:
            self._in_list = True
            self._keep(1)
        elif char == "{":
            self._begin_call(JsonCallReader(self._numbering.names))
        elif self._syntax.has_bare_names and not self._in_list:
            self._begin_call(NamedCallReader(self._numbering.names, self._syntax))
        else:
            self._fail()
        return True

    def _begin_call(self, reader: JsonCallReader | NamedCallReader) -> None:
        self._reader, self._state = reader, self._read_object

    def _read_object(self) -> bool:
        reader = self._reader
        assert reader is not None
        was_certain = reader.is_certain
        size = reader.push(self._buffer)
        if reader.is_certain and not was_certain:
            self._candidate = ""
            self._writer.drop_space()
            self._events.append(self._numbering.start_call(reader.name))
        if reader.is_certain:
            self._buffer = self._buffer[size:]
            if piece := reader.take_arguments():
                self._events.append(ArgumentsPiece(self._numbering.num_calls - 1, piece))
        else:
            self._keep(size)
        if reader.status is CallStatus.FAILED:
            self._fail()
        elif reader.status is CallStatus.COMPLETE:
            self._state = self._read_after
        return reader.status is not CallStatus.OPEN

    def _read_after(self) -> bool:
        """Read what is between two calls, or after the last one. White space is dropped."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        char = self._buffer[0]
        if self._in_list and char in ",]":
            self._in_list = char == ","
            self._candidate, self._buffer = "," if self._in_list else "", self._buffer[1:]
            self._state = self._read_call if self._in_list else self._read_after
            return True
        closing, separator = self._syntax.closing, self._syntax.separator
        if closing and self._buffer.startswith(closing):
            self._buffer = self._buffer[len(closing) :]
            self._state = self._read_content
        elif separator and char == separator:
            self._candidate, self._buffer, self._state = separator, self._buffer[1:], self._read_call
        elif not self._is_final and closing.startswith(self._buffer):
            return False
        else:
            self._state = self._read_content
        return True

    def _keep_space(self) -> None:
        match = _SPACE.match(self._buffer)
        self._keep(match.end() if match else 0)

    def _keep(self, size: int) -> None:
        """Move text of the buffer to the candidate."""
        self._candidate, self._buffer = self._candidate + self._buffer[:size], self._buffer[size:]

    def _fail(self) -> None:
        """Make the candidate content."""
        self._events += self._writer.write(self._candidate)
        self._candidate, self._in_list, self._state = "", False, self._read_content
