"""Reader of one call written as a JSON object: {"name": ..., "arguments": {...}}, in any order of its keys."""

import json
from collections.abc import Collection
from enum import Enum

from foredraft.server.messages.json_span import JsonSpan

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
_SPACE = " \t\n\r"


class CallStatus(Enum):
    """State of a call that is read."""

    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"  # the text is no call


class JsonCallReader:
    """Reads one call, piece by piece. Never reads beyond its end.

    `is_certain` is set as soon as the text is a call: its name is that of a tool, and its arguments are an object.
    From then on `take_arguments` returns their text as it arrives.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.status = CallStatus.OPEN
        self.name = ""
        self.is_certain = False
        self._names = names
        self._expects = "object"  # object, key, colon, value or next
        self._key = ""
        self._span: JsonSpan | None = None  # of the key or value that is read
        self._value = ""  # its text so far, unless it streams
        self._arguments: str | None = None  # arguments that were not taken yet; None = there are none yet
        self._is_streaming = False  # the value that is read is the arguments of a certain call

    def push(self, text: str) -> int:
        """Read on. Returns the number of characters that were read."""
        position = 0
        while position < len(text) and self.status is CallStatus.OPEN:
            if self._span is not None:
                position = self._read_span(self._span, text, position)
            elif text[position] in _SPACE:
                position += 1
            else:
                position += self._read_char(text[position])
        return position

    def take_arguments(self) -> str:
        """Return the arguments that were read since the last call. Empty until `is_certain`."""
        if not self.is_certain or self._arguments is None:
            return ""
        text, self._arguments = self._arguments, ""
        return text

    def _read_char(self, char: str) -> int:
        """Read a character between keys and values. Returns 0 if it stays for the next part."""
        if self._expects == "object" and char == "{":
            self._expects = "key"
            return 1
        if self._expects in ("key", "value"):
            if self._expects == "key" and char == "}" and not self._key:
                self._end()
                return 1
            if self._expects == "value" or char == '"':
                self._begin_span(char)
                return 0
        elif self._expects == "colon" and char == ":":
            self._expects = "value"
            return 1
        elif self._expects == "next" and char in ",}":
            self._expects = "key"
            if char == "}":
                self._end()
            return 1
        self.status = CallStatus.FAILED
        return 0

    def _begin_span(self, char: str) -> None:
        self._span, self._value = JsonSpan(), ""
        is_object = self._expects == "value" and self._key in ARGUMENT_KEYS and char == "{"
        self._is_streaming = is_object and bool(self.name) and self._arguments is None
        if self._is_streaming:
            self.is_certain, self._arguments = True, ""

    def _read_span(self, span: JsonSpan, text: str, position: int) -> int:
        end = span.push(text, position)
        piece = text[position:end]
        if self._is_streaming and self._arguments is not None:
            self._arguments += piece
        else:
            self._value += piece
        if span.is_broken:
            self.status = CallStatus.FAILED
        elif span.is_complete:
            self._end_span()
        return end

    def _end_span(self) -> None:
        self._span = None
        if self._expects == "key":
            self._key, self._expects = str(_decode(self._value)), "colon"
            return
        self._expects = "next"
        if self._key == NAME_KEY and not self.name:
            self._read_name()
        elif self._key in ARGUMENT_KEYS and not self._is_streaming:
            self._keep_arguments()

    def _read_name(self) -> None:
        name = _decode(self._value)
        if not isinstance(name, str) or name not in self._names:
            self.status = CallStatus.FAILED
            return
        self.name = name
        self.is_certain = self._arguments is not None

    def _keep_arguments(self) -> None:
        """Keep arguments that came before the name, or as a string that holds JSON."""
        value = _decode(self._value)
        text = self._value
        if isinstance(value, str):
            text, value = value, _decode(value)
        if value is None and text == "null":
            text, value = NO_ARGUMENTS, {}
        if not isinstance(value, dict) or self._arguments is not None:
            self.status = CallStatus.FAILED
            return
        self._arguments = text
        self.is_certain = bool(self.name)

    def _end(self) -> None:
        if not self.name:
            self.status = CallStatus.FAILED
            return
        if self._arguments is None:
            self._arguments = NO_ARGUMENTS
        self.is_certain, self.status = True, CallStatus.COMPLETE


def _decode(text: str) -> object:
    """Decode JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
