"""Schemas of POST /v1/messages and /v1/messages/count_tokens. Unknown fields are refused; none is ignored silently.

`metadata.user_id` and `user` are accepted and neither stored nor logged. Fields of NEUTRAL_VALUES are accepted at the
values listed there, which request what the server does anyway.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foredraft.server.anthropic_api.input_blocks import (
    BlockMessage,
    CacheMark,
    ImageBlock,
    TextOnly,
    ToolName,
)
from foredraft.server.errors import ApiError, quote_name
from foredraft.server.neutral_fields import drop_neutral
from foredraft.server.schemas import (
    FunctionDefinition,
    PredictedContent,
    RoutedRequest,
    SamplingRequest,
    StrictModel,
)

# An edit that keeps all thinking changes no conversation.
_KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Unimplemented field -> values at which it has no effect.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "context_management": (None, {}, {"edits": []}, _KEEP_THINKING),
    "diagnostics": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
}
# Unimplemented field -> what to do instead of leaving it out.
FIXES = {
    "context_management": "leave it out, and shorten the messages in the client",
    "mcp_servers": "leave it out; the client calls MCP servers, and describes their tools in tools",
    "service_tier": 'leave it out, or send "auto"',
    "speed": "leave it out; see speculative and verify",
}
# Field of another route -> field of this one.
RENAMED_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "output_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


class LongNamedDefinition(FunctionDefinition):
    """Function that the model may call. Names may be longer than in OpenAI's API."""

    name: ToolName


class ClientTool(StrictModel):
    """Tool that the client runs."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheMark | None = None
    # Arguments are always sent as they are generated, which true asks for and false does not exclude.
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"a tool of the type {quote_name(kind)} is not implemented; describe a tool that the client runs, with "
                "name and input_schema"
            )
        if isinstance(data, dict) and "function" in data:
            raise ValueError("in this route a tool has name, description and input_schema")
        return data


class ToolSelection(StrictModel):
    """Choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> "ToolSelection":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type tool, and this type needs it")
        return self


class ThinkingOptions(StrictModel):
    """Thinking before the answer.

    `budget_tokens` reaches chat templates that read `thinking_budget`. With any other template only `max_tokens` bounds
    the thinking.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    # Thinking is sent as it is generated; no model here summarizes it.
    display: Literal["summarized"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> "ThinkingOptions":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens belongs to the type enabled, and this type needs it")
        return self


class ContentFormat(StrictModel):
    """Format of the text of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class AnswerOptions(StrictModel):
    """Options of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ContentFormat | None = None


class ClientMetadata(StrictModel):
    """Metadata of a request."""

    user_id: Annotated[str, Field(max_length=4096)] | None = None


class ConversationRequest(RoutedRequest):
    """Fields of a conversation of blocks that its prompt is made of."""

    messages: Annotated[list[BlockMessage], Field(fail_fast=True, min_length=1)]
    system: TextOnly | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolSelection | None = None
    thinking: ThinkingOptions | None = None
    output_config: AnswerOptions | None = None
    cache_control: CacheMark | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def has_images(self) -> bool:
        return any(isinstance(block, ImageBlock) for message in self.messages for block in message.blocks)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, cls.model_fields, NEUTRAL_VALUES, FIXES, RENAMED_FIELDS)


class CountTokensRequest(ConversationRequest):
    """Number of the tokens of a conversation (POST /v1/messages/count_tokens)."""


class MessageRequest(ConversationRequest, SamplingRequest):
    """Next message of a conversation of blocks (POST /v1/messages)."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)]
    stop_sequences: list[str] | None = None
    metadata: ClientMetadata | None = None
    prediction: PredictedContent | None = None

    @model_validator(mode="after")
    def _check_thinking(self) -> "MessageRequest":
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ApiError(400, "thinking: budget_tokens must be less than max_tokens", "thinking")
        return self
