"""Messages and deltas of /v1/chat/completions from the events of an answer."""

from collections.abc import Iterable
from typing import Any

from foredraft.server.messages.assistant_message import AssistantMessage
from foredraft.server.messages.events import ArgumentsPiece, CallStart, ContentPiece, MessageEvent, ReasoningPiece


def build_message(message: AssistantMessage) -> dict[str, Any]:
    """Build the `message` of a choice."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    body: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not message.content else message.content,
        "refusal": None,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    return body | {"tool_calls": calls} if calls else body


def build_deltas(events: Iterable[MessageEvent]) -> list[dict[str, Any]]:
    """Build the deltas of a stream. Neighbours of one kind are joined; a call begins with a delta of its own."""
    deltas: list[dict[str, Any]] = []
    last: MessageEvent | None = None
    for event in events:
        if last is not None and _continues(last, event):
            _extend(deltas[-1], event)
        else:
            deltas.append(_build_delta(event))
        last = event
    return deltas


def _continues(last: MessageEvent, event: MessageEvent) -> bool:
    if isinstance(last, ArgumentsPiece) and isinstance(event, ArgumentsPiece):
        return last.index == event.index
    return type(last) is type(event) and not isinstance(event, CallStart)


def _build_delta(event: MessageEvent) -> dict[str, Any]:
    if isinstance(event, ContentPiece):
        return {"content": event.text}
    if isinstance(event, ReasoningPiece):
        return {"reasoning_content": event.text}
    if isinstance(event, ArgumentsPiece):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}


def _extend(delta: dict[str, Any], event: MessageEvent) -> None:
    if isinstance(event, ContentPiece):
        delta["content"] += event.text
    elif isinstance(event, ReasoningPiece):
        delta["reasoning_content"] += event.text
    elif isinstance(event, ArgumentsPiece):
        delta["tool_calls"][0]["function"]["arguments"] += event.text
