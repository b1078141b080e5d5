"""Reader of one call written as a name and its arguments: name[ARGS]{...}, name[CALL_ID]id[ARGS]{...} or name{...}."""

import re
from collections.abc import Collection

from foredraft.server.messages.call_syntax import CallSyntax
from foredraft.server.messages.json_call import CallStatus
from foredraft.server.messages.json_span import JsonSpan

MAX_HEAD_CHARS = 256  # characters before the arguments


class NamedCallReader:
    """Reads one call, piece by piece, as JsonCallReader does.

    Args:
        names: names of the tools.
        syntax: marks between the parts.
    """

    def __init__(self, names: Collection[str], syntax: CallSyntax) -> None:
        self.status = CallStatus.OPEN
        self.name = ""
        self.is_certain = False
        self._names = names
        call_id = rf"(?:{re.escape(syntax.id_mark)}[\w-]+\s*)?" if syntax.id_mark else ""
        self._head_pattern = re.compile(rf"([\w.-]+)\s*{call_id}(?:{re.escape(syntax.arguments_mark)})?\s*")
        self._head = ""  # text before the arguments
        self._span = JsonSpan()
        self._arguments = ""

    def push(self, text: str) -> int:
        """Read on. Returns the number of characters that were read."""
        position = 0
        while position < len(text) and self.status is CallStatus.OPEN:
            if self.is_certain:
                end = self._span.push(text, position)
                self._arguments, position = self._arguments + text[position:end], end
                self._update_status()
            elif text[position] == "{":
                self._end_head()
            elif len(self._head) == MAX_HEAD_CHARS:
                self.status = CallStatus.FAILED
            else:
                self._head += text[position]
                position += 1
        return position

    def take_arguments(self) -> str:
        """Return the arguments that were read since the last call."""
        text, self._arguments = self._arguments, ""
        return text

    def _update_status(self) -> None:
        if self._span.is_broken:
            self.status = CallStatus.FAILED
        elif self._span.is_complete:
            self.status = CallStatus.COMPLETE

    def _end_head(self) -> None:
        """Begin the arguments, if the head is a name of a tool and its marks."""
        match = self._head_pattern.fullmatch(self._head)
        if match is None or match[1] not in self._names:
            self.status = CallStatus.FAILED
            return
        self.name, self.is_certain = match[1], True
