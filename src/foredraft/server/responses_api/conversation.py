"""Conversion of items to the messages of a chat, and to the form in which they are stored and listed."""

import uuid
from collections.abc import Iterable
from typing import Any

from foredraft.server.content_parts import TextContentPart, make_image_part
from foredraft.server.responses_api.input_items import (
    FunctionCallItem,
    FunctionOutputItem,
    ImagePart,
    Item,
    MessageItem,
    ReasoningItem,
    TextPart,
)
from foredraft.server.schemas import CalledFunction, ChatMessage, MessageToolCall

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def make_item_id(kind: str) -> str:
    """Make a random id of an item of a type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def build_messages(items: Iterable[Item], instructions: str | None = None) -> list[ChatMessage]:
    """Build the messages of a chat.

    Reasoning, content and calls that follow each other in this order are one message of the assistant.

    Args:
        items: of the whole conversation.
        instructions: text of a system message before them. Default None = there is none.
    """
    writer = _MessageWriter()
    if instructions:
        writer.messages.append(ChatMessage(role="system", content=instructions))
    for item in items:
        writer.add(item)
    writer.end_turn()
    return writer.messages


class _MessageWriter:
    """Writer of messages; items of the assistant are collected until the message is complete."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[MessageToolCall] = []

    def add(self, item: Item) -> None:
        """Append an item."""
        if isinstance(item, ReasoningItem):
            if self._content is not None or self._calls:
                self.end_turn()
            self._reasoning = (self._reasoning or "") + item.text
        elif isinstance(item, FunctionCallItem):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            self._calls.append(MessageToolCall(id=item.call_id, function=function))
        elif isinstance(item, FunctionOutputItem):
            self.end_turn()
            self.messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=item.text))
        elif item.role == "assistant":
            if self._content is not None or self._calls:
                self.end_turn()
            self._content = item.text
        else:
            self.end_turn()
            self.messages.append(ChatMessage(role=item.role, content=_build_content(item)))

    def end_turn(self) -> None:
        """Write the message of the assistant that is collected."""
        reasoning, content, calls = self._reasoning, self._content, self._calls
        self._reasoning, self._content, self._calls = None, None, []
        if reasoning or content is not None or calls:
            self.messages.append(
                ChatMessage(
                    role="assistant", content=content, reasoning_content=reasoning or None, tool_calls=calls or None
                )
            )


def _build_content(item: MessageItem) -> str | list[Any]:
    """Return the content of a message: its text, or its parts if images are among them."""
    if not item.has_images:
        return item.text
    return [
        make_image_part(part.image_url or "")
        if isinstance(part, ImagePart)
        else TextContentPart(type="text", text=part.text)
        for part in item.parts
    ]


def list_items(items: Iterable[Item]) -> list[dict[str, Any]]:
    """List items as /v1/responses/{id}/input_items does: with ids, and text in parts."""
    return [_describe(item) for item in items]


def _describe(item: Item) -> dict[str, Any]:
    body: dict[str, Any] = {"id": item.id or make_item_id(item.type), "type": item.type}
    if isinstance(item, MessageItem):
        parts: list[dict[str, Any]] = [{"type": "input_text", "text": item.text}]
        if item.role == "assistant":
            parts = [{"type": "output_text", "text": item.text, "annotations": []}]
        elif item.has_images:
            parts = [_describe_part(part) for part in item.parts]
        return body | {"status": item.status or "completed", "role": item.role, "content": parts}
    if isinstance(item, ReasoningItem):
        texts = item.model_dump(include={"summary", "content"})
        return body | {"summary": texts["summary"], "content": texts["content"] or []}
    body |= {"status": item.status or "completed", "call_id": item.call_id}
    if isinstance(item, FunctionCallItem):
        return body | {"name": item.name, "arguments": item.arguments}
    return body | {"output": item.text}


def _describe_part(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
    return {"type": part.type, "text": part.text}
