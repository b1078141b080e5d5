"""Output items of one response and their events, from the events of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.server.messages.events import CallStart, ContentPiece, MessageEvent, ReasoningPiece
from foredraft.server.responses_api.conversation import make_item_id

Event = dict[str, Any]  # of a stream, without its sequence number
ARGUMENTS_EVENT = "response.function_call_arguments"


@dataclass(frozen=True)
class TextKind:
    """Kind of items with one text."""

    item: str  # type of the item
    part: str  # type of its part
    event: str  # prefix of the events of its text
    fields: tuple[tuple[str, Any], ...]  # further fields of the item
    part_fields: tuple[str, ...] = ()  # further fields of the part, which are empty lists

    def build_part(self, text: str) -> dict[str, Any]:
        return {"type": self.part, "text": text} | {name: [] for name in self.part_fields}


MESSAGE = TextKind("message", "output_text", "response.output_text", (("role", "assistant"),), ("annotations",))
REASONING = TextKind("reasoning", "reasoning_text", "response.reasoning_text", (("summary", ()),))


@dataclass
class TextItem:
    """Message or reasoning that is written."""

    kind: TextKind
    index: int
    has_logprobs: bool = False
    id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = make_item_id(self.kind.item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def open(self) -> list[Event]:
        item = self.build("in_progress") | {"content": []}
        part = self.kind.build_part("")
        return [
            {"type": "response.output_item.added", "output_index": self.index, "item": item},
            {"type": "response.content_part.added", **self._place, "part": part},
        ]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """Append text and the log-probabilities of its tokens."""
        self.pieces.append(text)
        self.logprobs += logprobs
        event = {"type": f"{self.kind.event}.delta", **self._place, "delta": text}
        return [event | self._list_logprobs(logprobs)]

    def close(self, status: str) -> list[Event]:
        item = self.build(status)
        (part,) = item["content"]
        done = {"type": f"{self.kind.event}.done", **self._place, "text": part["text"]}
        return [
            done | self._list_logprobs(self.logprobs),
            {"type": "response.content_part.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    def build(self, status: str) -> dict[str, Any]:
        part = self.kind.build_part("".join(self.pieces))
        if self.has_logprobs:
            part["logprobs"] = self.logprobs
        fields = dict(self.kind.fields)
        return {"id": self.id, "type": self.kind.item, "status": status} | fields | {"content": [part]}

    def _list_logprobs(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Events of messages have the field in any case, those of reasoning never."""
        return {"logprobs": list(logprobs)} if self.kind is MESSAGE else {}


@dataclass
class CallItem:
    """Call of a function that is written."""

    index: int
    call_id: str
    name: str
    id: str = ""
    pieces: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = make_item_id("function_call")

    def open(self) -> list[Event]:
        item = self.build("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    def add(self, text: str) -> list[Event]:
        """Append a piece of the arguments."""
        self.pieces.append(text)
        return [{"type": f"{ARGUMENTS_EVENT}.delta", "item_id": self.id, "output_index": self.index, "delta": text}]

    def close(self, status: str) -> list[Event]:
        item = self.build(status)
        place = {"item_id": self.id, "output_index": self.index, "name": self.name}
        return [
            {"type": f"{ARGUMENTS_EVENT}.done", **place, "arguments": item["arguments"]},
            {"type": "response.output_item.done", "output_index": self.index, "item": item},
        ]

    def build(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id, "type": "function_call", "status": status, "call_id": self.call_id, "name": self.name,
            "arguments": "".join(self.pieces),
        }  # fmt: skip


class OutputWriter:
    """Writer of the output of one response. One item is open at a time.

    Args:
        has_logprobs: messages list the log-probabilities of their tokens.
    """

    def __init__(self, has_logprobs: bool = False) -> None:
        self._has_logprobs = has_logprobs
        self._closed: list[dict[str, Any]] = []
        self._current: TextItem | CallItem | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back

    @property
    def items(self) -> list[dict[str, Any]]:
        """Items that are complete."""
        return list(self._closed)

    def write(self, events: Sequence[MessageEvent], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Return the events of a stream for the next events of the answer.

        Args:
            events: events of the answer.
            logprobs: log-probabilities of the tokens since the last call. Default () = none.
        """
        self._logprobs += logprobs
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentPiece):
                found += self._write_text(MESSAGE, event.text)
            elif isinstance(event, ReasoningPiece):
                found += self._write_text(REASONING, event.text)
            elif isinstance(event, CallStart):
                found += self._open(CallItem(self._next_index, event.id, event.name))
            elif isinstance(self._current, CallItem):
                found += self._current.add(event.text)
        return found

    def finish(self, status: str) -> list[Event]:
        """Return the events of the end. A response without any item gets an empty message.

        Args:
            status: of the last item, "completed" or "incomplete".
        """
        found: list[Event] = []
        if self._current is None and not self._closed:
            found += self._open(self._make_text(MESSAGE))
        if self._logprobs and isinstance(self._current, TextItem):
            self._current.logprobs += self._logprobs
        return found + self._close(status)

    @property
    def _next_index(self) -> int:
        return len(self._closed) + (self._current is not None)

    def _write_text(self, kind: TextKind, text: str) -> list[Event]:
        found: list[Event] = []
        current = self._current
        if not isinstance(current, TextItem) or current.kind is not kind:
            current = self._make_text(kind)
            found += self._open(current)
        logprobs, self._logprobs = self._logprobs, []
        return found + current.add(text, logprobs)

    def _make_text(self, kind: TextKind) -> TextItem:
        return TextItem(kind, self._next_index, self._has_logprobs and kind is MESSAGE)

    def _open(self, item: TextItem | CallItem) -> list[Event]:
        found = self._close("completed")
        self._current = item
        return found + item.open()

    def _close(self, status: str) -> list[Event]:
        if self._current is None:
            return []
        found = self._current.close(status)
        self._closed.append(self._current.build(status))
        self._current = None
        return found
