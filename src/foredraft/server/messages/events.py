"""Events of an answer in the order of its text. Every route forms its stream from them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ReasoningPiece:
    """Next text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentPiece:
    """Next text of the content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Beginning of a tool call; its arguments follow as ArgumentsPieces with the same index."""

    index: int  # number of calls before it
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """Next text of the arguments of a call, which are JSON."""

    index: int
    text: str


MessageEvent = ReasoningPiece | ContentPiece | CallStart | ArgumentsPiece


def join_events(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Join neighbours of one kind, and of one call."""
    joined: list[MessageEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart) or isinstance(last, CallStart) or last is None or not _continues(last, event):
            joined.append(event)
        else:
            joined[-1] = replace(last, text=last.text + event.text)
    return joined


def _continues(last: MessageEvent, event: MessageEvent) -> bool:
    if isinstance(last, ArgumentsPiece) and isinstance(event, ArgumentsPiece):
        return last.index == event.index
    return type(last) is type(event)
