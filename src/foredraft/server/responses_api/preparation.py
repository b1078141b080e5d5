"""Preparation of a response: its conversation as a chat request, and the names of its fields in errors."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from foredraft.server.chat_preparation import PreparedChat, prepare_chat
from foredraft.server.errors import ApiError
from foredraft.server.responses_api.conversation import build_messages, list_items
from foredraft.server.responses_api.input_items import Item, Items, MessageItem
from foredraft.server.responses_api.schema import AllowedTools, FunctionTool, NamedTool, ResponseRequest, TextFormat
from foredraft.server.responses_api.stored_response import StoredResponse
from foredraft.server.schemas import (
    AllowedToolsChoice,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    NamedToolChoice,
    ResponseFormat,
    ToolDefinition,
    ToolSubset,
)
from foredraft.server.service import Service

# Field of a chat request -> field of this route.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
# `messages` is also a word of other sentences.
_FIELD_PATTERN = re.compile(r"^messages(?=:)|\b(?:max_completion_tokens|max_tokens|response_format|reasoning_effort)\b")
_ITEMS: TypeAdapter[Any] = TypeAdapter(Items)


@dataclass(frozen=True)
class PreparedResponse:
    """Response that is ready for the engine."""

    chat: ChatRequest
    prepared: PreparedChat
    input_items: bytes  # JSON list of the request's own items


def prepare_response(service: Service, request: ResponseRequest, previous: StoredResponse | None) -> PreparedResponse:
    """Restore the conversation, then render, tokenize and check it. Runs on a thread, because it may take long.

    Args:
        service: state of the routes of one model.
        request: the request.
        previous: response that it continues; None = it begins a conversation.

    Raises:
        ApiError: the request cannot be served.
    """
    own = read_input(request)
    items = [*restore_items(previous), *own]
    try:
        chat = build_chat_request(request, items)
    except ValidationError as error:
        message = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
        raise ApiError(400, f"input: {message.removeprefix('Value error, ')}", "input") from None
    max_messages = service.settings.limits.max_messages
    if len(chat.messages) > max_messages:
        raise ApiError(400, f"input: the conversation has more than {max_messages} messages", "input")
    try:
        prepared = prepare_chat(service, chat)
    except ApiError as error:
        raise rename_fields(error) from None
    if request.has_logprobs and prepared.make_parser(service) is not None:
        message = "log-probabilities belong to text, and this answer may have calls or reasoning; leave include out"
        raise ApiError(400, message, "include")
    field = prepared.submission.grammar_field
    submission = replace(prepared.submission, grammar_field=FIELD_NAMES.get(field or "", field))
    return PreparedResponse(chat, replace(prepared, submission=submission), json.dumps(list_items(own)).encode())


def rename_fields(error: ApiError) -> ApiError:
    """Return an error of a chat request with the names of this route's fields."""
    message = _FIELD_PATTERN.sub(lambda match: FIELD_NAMES[match[0]], error.message)
    return ApiError(error.status, message, FIELD_NAMES.get(error.param or "", error.param), error.headers)


def read_input(request: ResponseRequest) -> Sequence[Item]:
    """Return the items of a request; a text is a message of the user."""
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)]
    return request.input  # type: ignore[return-value]  # OtherItem raises an error when it is validated


def restore_items(response: StoredResponse | None) -> list[Item]:
    """Return the items of a stored conversation, from its beginning."""
    rows = [] if response is None else [row for part in response.chain for row in (*part.input_rows, *part.output_rows)]
    items: list[Item] = _ITEMS.validate_python(rows)
    return items


def build_chat_request(request: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """Build the chat request of a response.

    Raises:
        ValidationError: the items are no valid messages.
    """
    fields: dict[str, Any] = request.shared_fields
    for name in ("parallel_tool_calls", "stop", "prediction", "chat_template_kwargs", "top_logprobs"):
        if name in request.model_fields_set:
            fields[name] = getattr(request, name)
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _build_format(request.text.format)
    if request.tools:
        fields["tools"] = [_build_tool(tool) for tool in request.tools]
    if request.has_logprobs:
        fields["logprobs"] = True
    fields["tool_choice"] = _build_choice(request)
    return ChatRequest(messages=build_messages(items, request.instructions), **fields)


def _build_format(form: TextFormat) -> ResponseFormat:
    if form.schema_ is None:
        return ResponseFormat(type=form.type)
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return ResponseFormat(type=form.type, json_schema=JsonSchema.model_validate(schema))


def _build_tool(tool: FunctionTool) -> ToolDefinition:
    fields = {name: getattr(tool, name) for name in FunctionDefinition.model_fields}
    return ToolDefinition(type="function", function=FunctionDefinition(**fields))


def _build_choice(request: ResponseRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return _name_tool(choice)
    if isinstance(choice, AllowedTools):
        subset = ToolSubset(mode=choice.mode, tools=[_name_tool(tool) for tool in choice.tools])
        return AllowedToolsChoice(type="allowed_tools", allowed_tools=subset)
    return choice if request.tools or choice != "auto" else None  # agents send "auto" without tools too


def _name_tool(tool: NamedTool) -> NamedToolChoice:
    return NamedToolChoice(type="function", function=FunctionName(name=tool.name))
