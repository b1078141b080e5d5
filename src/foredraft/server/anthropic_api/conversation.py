"""Conversion of a conversation of blocks to the messages of a chat."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from foredraft.server.anthropic_api.input_blocks import (
    Block,
    BlockMessage,
    ImageBlock,
    LongNamedCall,
    LongNamedFunction,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    join_blocks,
)
from foredraft.server.content_parts import TextContentPart, make_image_part
from foredraft.server.schemas import ChatMessage, MessageToolCall


def build_messages(messages: Sequence[BlockMessage], system: str = "") -> list[ChatMessage]:
    """Build the messages of a chat. Neighbours of one role become one message, because many templates need that.

    Args:
        messages: of the conversation.
        system: text of a system message before them. Default "" = there is none.
    """
    found = [ChatMessage(role="system", content=system)] if system else []
    for role, group in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in group for block in message.blocks]
        if role == "assistant":
            found.append(_build_answer(blocks))
        elif role == "user":
            found += _build_turns(blocks)
        else:
            found.append(ChatMessage(role="system", content=join_blocks(blocks)))
    return found


def _build_answer(blocks: Sequence[Block]) -> ChatMessage:
    """Build a message of the assistant. Its texts are joined as they were generated."""
    calls: list[MessageToolCall] = [_build_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return ChatMessage(
        role="assistant",
        content="".join(block.text for block in blocks if isinstance(block, TextBlock)),
        reasoning_content="".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None,
        tool_calls=calls or None,
    )


def _build_call(block: ToolUseBlock) -> LongNamedCall:
    function = LongNamedFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
    return LongNamedCall(id=block.id, function=function)


def _build_turns(blocks: Iterable[Block]) -> list[ChatMessage]:
    """Build the messages of the user and of tools, in the order of their blocks."""
    found: list[ChatMessage] = []
    for is_own, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock | ImageBlock)):
        if is_own:
            found.append(ChatMessage(role="user", content=_build_content(list(group))))
            continue
        for block in group:
            assert isinstance(block, ToolResultBlock)
            found.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=block.text))
    return found


def _build_content(blocks: Sequence[Block]) -> str | list[Any]:
    """Return the content of a message of the user: its text, or parts if images are among the blocks."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return join_blocks(blocks)
    parts: list[Any] = []
    for is_image, group in groupby(blocks, key=lambda block: isinstance(block, ImageBlock)):
        if is_image:
            parts += [make_image_part(block.url) for block in group if isinstance(block, ImageBlock)]
        else:
            parts.append(TextContentPart(type="text", text=join_blocks(group)))
    return parts
