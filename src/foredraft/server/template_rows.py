"""Messages and tools in the form that a chat template reads. What it does not read becomes text of a message."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.chat import IMAGE_PART
from foredraft.sampling.json_depth import STRING_PATTERN, measure_depth, remove_escapes
from foredraft.server.content_parts import TextContentPart
from foredraft.server.messages.tools import Tool
from foredraft.server.schemas import ChatMessage, MessageToolCall
from foredraft.server.template_abilities import Rows, TemplateAbilities

TextFunction = Callable[[str], str]
MAX_ARGUMENT_DEPTH = 64  # levels of arguments that are given to a template as an object
INSTRUCTION = (
    'You can call tools. To call one, answer with JSON only: {"name": "tool", "arguments": {...}}. '
    "The tools, with the JSON schemas of their arguments:\n"
)


@dataclass(frozen=True)
class ChatInput:
    """Conversation, tools and variables that a prompt is made of."""

    messages: Sequence[ChatMessage]
    tools: tuple[Tool, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)  # further variables of the template
    add_generation_prompt: bool = True  # end with the beginning of the assistant's turn
    continue_final_message: bool = False  # leave the last message open, so that the output continues it


@dataclass(frozen=True)
class TemplateRows:
    """Variables of a template that hold text of the client."""

    messages: Rows
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]

    def map_text(self, map_value: TextFunction, map_key: TextFunction) -> "TemplateRows":
        """Return a copy with every text and every key of an object replaced, roles excepted."""

        def copy(value: Any) -> Any:
            if isinstance(value, str):
                return map_value(value)
            if isinstance(value, list):
                return [copy(one) for one in value]
            if not isinstance(value, dict) or value == IMAGE_PART:
                return value
            return {map_key(key): copy(one) for key, one in value.items()}

        rows = [
            {name: value if name == "role" else copy(value) for name, value in row.items()} for row in self.messages
        ]
        variables = {name: copy(value) for name, value in self.variables.items()}
        return TemplateRows(rows, copy(self.tools), variables)

    def extend_last(self, text: str) -> None:
        """Append text to the last message."""
        last = self.messages[-1]
        last["content"] = (last["content"] or "") + text


def build_rows(chat: ChatInput, abilities: TemplateAbilities) -> TemplateRows:
    """Build the variables of a template from a conversation."""
    names = {call.id: call.function.name for message in chat.messages for call in message.tool_calls or ()}
    rows = [_build_row(message, abilities, names) for message in chat.messages]
    if not abilities.shows_systems:
        rows = _join_systems(rows)
    tools = [tool.to_row() for tool in chat.tools]
    if tools and not abilities.shows_tools:
        rows = _add_instruction(rows, tools)
    return TemplateRows(rows, tools if tools and abilities.shows_tools else None, dict(chat.variables))


def _join_systems(rows: Rows) -> Rows:
    """Join the messages of the system at the beginning: instructions, and those of the developer."""
    num = next((i for i, row in enumerate(rows) if row["role"] != "system"), len(rows))
    if num < 2:
        return rows
    content = "\n\n".join(row["content"] for row in rows[:num])
    return [{"role": "system", "content": content}, *rows[num:]]


def _build_row(message: ChatMessage, abilities: TemplateAbilities, names: dict[str, str]) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not abilities.shows_developer else message.role
    row: dict[str, Any] = {"role": role, "content": message.text}
    if message.image_urls:
        row["content"] = [_build_part(part) for part in message.content or ()]
    if message.name is not None:
        row["name"] = message.name
    if message.reasoning_content is not None:
        row |= {"reasoning_content": message.reasoning_content, "thinking": message.reasoning_content}
    if message.tool_calls:
        if abilities.shows_calls:
            row["content"] = message.text or None  # some templates write calls only if there is no content
            row["tool_calls"] = [_build_call(call, abilities.has_text_arguments) for call in message.tool_calls]
        else:
            row["content"] = "\n".join(filter(None, [message.text, *map(_write_call, message.tool_calls)]))
    if message.role == "tool":
        name = message.name or names.get(message.tool_call_id or "", "")
        if not abilities.shows_results:
            return {"role": "user", "content": f"Result of {name}: {message.text}"}
        row |= {"tool_call_id": message.tool_call_id, "name": name}
    return row


def _build_part(part: Any) -> dict[str, Any]:
    return {"type": "text", "text": part.text} if isinstance(part, TextContentPart) else IMAGE_PART


def _build_call(call: MessageToolCall, has_text_arguments: bool) -> dict[str, Any]:
    arguments = call.function.arguments if has_text_arguments else read_arguments(call.function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def read_arguments(text: str) -> Any:
    """Parse the arguments of a call. Text that is no JSON object, because an output was cut, stays text."""
    structure = STRING_PATTERN.sub(b"", remove_escapes(text.encode("utf-8", "surrogatepass")))
    if measure_depth(structure) > MAX_ARGUMENT_DEPTH:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _write_call(call: MessageToolCall) -> str:
    """Write a call as the content of a message, in the form that the instruction names."""
    name = json.dumps(call.function.name)
    return f'{{"name": {name}, "arguments": {call.function.arguments or "{}"}}}'


def _add_instruction(rows: Rows, tools: list[dict[str, Any]]) -> Rows:
    """Describe the tools in the first system message."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = INSTRUCTION + "\n".join(lines)
    if rows and rows[0]["role"] in ("system", "developer"):
        return [rows[0] | {"content": f"{rows[0]['content']}\n\n{text}"}, *rows[1:]]
    return [{"role": "system", "content": text}, *rows]
