"""Messages and deltas of /v1/chat/completions from the events of an answer."""

from collections.abc import Iterable
from typing import Any

from foredraft.server.messages.assistant_message import AssistantMessage
from foredraft.server.messages.events import (
    ArgumentsPiece,
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    join_events,
)


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
    return [_build_delta(event) for event in join_events(events)]


def _build_delta(event: MessageEvent) -> dict[str, Any]:
    if isinstance(event, ContentPiece):
        return {"content": event.text}
    if isinstance(event, ReasoningPiece):
        return {"reasoning_content": event.text}
    if isinstance(event, ArgumentsPiece):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": ""}
    return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
