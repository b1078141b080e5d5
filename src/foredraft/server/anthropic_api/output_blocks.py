"""Content blocks of one answer and their events."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from foredraft.sampling.json_depth import STRING_PATTERN, measure_depth, remove_escapes
from foredraft.server.messages.events import CallStart, ContentPiece, MessageEvent, ReasoningPiece
from foredraft.server.template_rows import MAX_ARGUMENT_DEPTH

StreamEvent = dict[str, Any]
INVALID_KEY = "INVALID_JSON"  # of an input that cannot be parsed, as the published API advises
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
# Type of a block -> type of its deltas, and their field.
_DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}


@dataclass
class OutputBlock:
    """Block that is written."""

    type: str
    index: int
    fields: dict[str, Any]  # of the block before its first delta
    pieces: list[str] = field(default_factory=list)

    def open(self) -> StreamEvent:
        return {"type": "content_block_start", "index": self.index, "content_block": {"type": self.type} | self.fields}

    def add(self, text: str) -> StreamEvent:
        """Append a piece of the text, or of the JSON of the input."""
        self.pieces.append(text)
        kind, name = _DELTAS[self.type]
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: text}}

    def close(self) -> StreamEvent:
        return {"type": "content_block_stop", "index": self.index}

    def build(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        value = {"input": parse_input(text)} if self.type == TOOL_USE else {_DELTAS[self.type][1]: text}
        return {"type": self.type} | self.fields | value


class BlockWriter:
    """Writer of the blocks of one answer. One block is open at a time."""

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self._is_open = False  # the last one is

    @property
    def has_calls(self) -> bool:
        return any(block.type == TOOL_USE for block in self.blocks)

    def write(self, events: Iterable[MessageEvent]) -> list[StreamEvent]:
        """Return the events of a stream for the next events of the answer."""
        found: list[StreamEvent] = []
        for event in events:
            if isinstance(event, CallStart):
                found += self._open(TOOL_USE, {"id": event.id, "name": event.name, "input": {}})
                continue
            if isinstance(event, ContentPiece):
                found += self._continue(TEXT, {"text": ""})
            elif isinstance(event, ReasoningPiece):
                found += self._continue(THINKING, {"thinking": "", "signature": ""})
            found.append(self.blocks[-1].add(event.text))
        return found

    def finish(self) -> list[StreamEvent]:
        """Return the event that closes the last block; none if there is no block."""
        if not self._is_open:
            return []
        self._is_open = False
        return [self.blocks[-1].close()]

    def _continue(self, kind: str, fields: dict[str, Any]) -> list[StreamEvent]:
        """Open a block unless the last one is of its kind."""
        return [] if self._is_open and self.blocks[-1].type == kind else self._open(kind, fields)

    def _open(self, kind: str, fields: dict[str, Any]) -> list[StreamEvent]:
        found = self.finish()
        self.blocks.append(OutputBlock(kind, len(self.blocks), fields))
        self._is_open = True
        return [*found, self.blocks[-1].open()]


def parse_input(text: str) -> dict[str, Any]:
    """Parse the input of a call. One that was cut is returned up to its end, as SDKs do with a stream.

    JSON that a response cannot hold, such as the number 1e999, is returned as the text {"INVALID_JSON": ...}.
    """
    structure = STRING_PATTERN.sub(b"", remove_escapes(text.encode("utf-8", "surrogatepass")))
    readers: tuple[Callable[[str], Any], ...] = (
        (json.loads, _read_partial) if measure_depth(structure) <= MAX_ARGUMENT_DEPTH else ()
    )
    for read in readers:
        try:
            value = read(text or "{}")
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {INVALID_KEY: text}


def _read_partial(text: str) -> Any:
    return from_json(text, allow_partial=True)
