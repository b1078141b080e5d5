"""Preparation of a conversation of blocks as a chat request, and the names of its fields in errors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from foredraft.server.anthropic_api.conversation import build_messages
from foredraft.server.anthropic_api.input_blocks import join_blocks
from foredraft.server.anthropic_api.schema import (
    ClientTool,
    ConversationRequest,
    CountTokensRequest,
    LongNamedDefinition,
    MessageRequest,
    ToolSelection,
)
from foredraft.server.anthropic_api.thinking_switch import read_thinking
from foredraft.server.chat_preparation import PreparedChat, encode_messages, prepare_chat
from foredraft.server.errors import ApiError
from foredraft.server.schemas import (
    ChatRequest,
    FunctionName,
    JsonSchema,
    NamedToolChoice,
    ResponseFormat,
    ToolDefinition,
)
from foredraft.server.service import Service
from foredraft.server.tool_request import EFFORT, read_tool_use

# Field of a chat request -> field of this route.
FIELD_NAMES = {
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_FIELD_PATTERN = re.compile(r"\b(?:continue_final_message|reasoning_effort|response_format)\b|^stop\b")
DEFAULT_EFFORT = "high"  # of the published API: it is the same without the field
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True)
class PreparedMessage:
    """Message that is ready for the engine."""

    chat: ChatRequest
    prepared: PreparedChat


def prepare_message(service: Service, request: MessageRequest) -> PreparedMessage:
    """Render, tokenize and check a conversation. Runs on a thread, because it may take long.

    Raises:
        ApiError: the request cannot be served.
    """
    fields = request.shared_fields | {"max_tokens": request.max_tokens}
    if request.stop_sequences is not None:
        fields["stop"] = request.stop_sequences
    if request.prediction is not None:
        fields["prediction"] = request.prediction
    try:
        chat = _build_chat_request(service, request, fields)
        prepared = prepare_chat(service, chat)
    except ApiError as error:
        raise _rename_fields(error) from None
    field = prepared.submission.grammar_field
    submission = replace(prepared.submission, grammar_field=FIELD_NAMES.get(field or "", field))
    return PreparedMessage(chat, replace(prepared, submission=submission))


def count_tokens(service: Service, request: CountTokensRequest) -> int:
    """Count the tokens of the prompt of a conversation, which may be longer than the context.

    Raises:
        ApiError: the conversation cannot be rendered.
    """
    try:
        chat = _build_chat_request(service, request, {})
        return len(encode_messages(service, chat, read_tool_use(chat), is_counted=True).ids)
    except ApiError as error:
        raise _rename_fields(error) from None


def _build_chat_request(service: Service, request: ConversationRequest, fields: Mapping[str, Any]) -> ChatRequest:
    """Build the chat request of a conversation, with further fields."""
    fields = {**fields, **_build_tools(request), **_build_output(request, EFFORT in service.chat_template.variables)}
    variables = read_thinking(request.thinking, service) | (request.chat_template_kwargs or {})
    if variables:
        fields["chat_template_kwargs"] = variables
    try:
        messages = build_messages(request.messages, join_blocks(request.system or ""))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ApiError(400, f"messages: {first['msg'].removeprefix('Value error, ')}", "messages") from None
    if messages[-1].role == "assistant":
        if messages[-1].tool_calls:
            raise ApiError(400, "messages: the last one calls tools; send their results after it", "messages")
        fields["continue_final_message"] = True
    return ChatRequest(messages=messages, **fields)


def _build_tools(request: ConversationRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    choice = request.tool_choice
    if request.tools:
        fields["tools"] = [_build_tool(tool) for tool in request.tools]
    if choice is not None:
        if request.tools or choice.type != "auto":  # agents send "auto" without tools too
            fields["tool_choice"] = _build_choice(choice)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _build_tool(tool: ClientTool) -> ToolDefinition:
    function = LongNamedDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _build_choice(choice: ToolSelection) -> Any:
    if choice.name is not None:
        return NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    return _CHOICES[choice.type]


def _build_output(request: ConversationRequest, reads_effort: bool) -> dict[str, Any]:
    """Build the fields of the form of the answer. The default effort is left out if the template reads none."""
    options = request.output_config
    fields: dict[str, Any] = {}
    if options is not None and options.effort is not None and (reads_effort or options.effort != DEFAULT_EFFORT):
        fields["reasoning_effort"] = options.effort
    if options is not None and options.format is not None:
        schema = JsonSchema.model_validate({"schema": options.format.schema_, "strict": True})
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    return fields


def _rename_fields(error: ApiError) -> ApiError:
    """Return an error of a chat request with the names of this route's fields."""
    message = _FIELD_PATTERN.sub(lambda match: FIELD_NAMES[match[0]], error.message)
    return ApiError(error.status, message, FIELD_NAMES.get(error.param or "", error.param), error.headers)
