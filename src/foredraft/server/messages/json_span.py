"""Search for the end of one JSON value in a text that arrives in pieces."""

import re

_OUTSIDE = re.compile(r'[^"\[\]{}]+')
_INSIDE = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^\s,\]}]+")
_PAIRS = {"{": "}", "[": "]"}


class JsonSpan:
    """Finds the end of a JSON value. Brackets and strings are checked, the rest is not.

    `push` is called with the text from the first character of the value on, until `is_complete` or `is_broken`.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False  # a bracket closes another one
        self._closing: list[str] = []  # brackets that are open, by their other half
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def push(self, text: str, start: int = 0) -> int:
        """Read on from `start`. Returns the offset after the last character that belongs to the value."""
        position = start
        while position < len(text) and not (self.is_complete or self.is_broken):
            if self._in_string:
                position = self._read_string(text, position)
            elif self._is_scalar:
                position = self._read_scalar(text, position)
            else:
                position = self._read_structure(text, position)
        return position

    def _read_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        if match := _INSIDE.match(text, position):
            return match.end()
        self._is_escaped = text[position] == "\\"
        if text[position] == '"':
            self._in_string = False
            self.is_complete = not self._closing
        return position + 1

    def _read_scalar(self, text: str, position: int) -> int:
        match = _SCALAR.match(text, position)
        if match is None:
            self.is_complete = True
            return position
        return match.end()

    def _read_structure(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._in_string = True
        elif char in _PAIRS:
            self._closing.append(_PAIRS[char])
        elif not self._closing:
            self._is_scalar = True
            return position
        elif char in "]}":
            self.is_broken = self._closing.pop() != char
            self.is_complete = not self._closing and not self.is_broken
            return position if self.is_broken else position + 1
        elif match := _OUTSIDE.match(text, position):
            return match.end()
        return position + 1
