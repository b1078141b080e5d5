"""Schema of POST /v1/responses. Unknown fields are refused by name; no field is ignored silently.

`user` and `client_metadata` are accepted and neither stored nor logged. `prompt_cache_key` chooses the replica, and
nothing else: a prefix that was computed is reused without it. Fields of NEUTRAL_VALUES are accepted at the values
listed there, which request the default behaviour.

The include "reasoning.encrypted_content" is accepted, because what it is for works without it: reasoning items always
have their text in `content`, and clients may carry it back.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from foredraft.server.errors import quote_name
from foredraft.server.neutral_fields import drop_neutral
from foredraft.server.responses_api.input_items import MessageItem, ResponseInput
from foredraft.server.schemas import (
    Count,
    FunctionDefinition,
    FunctionName,
    PredictedContent,
    SamplingRequest,
    StrictModel,
)

# Unimplemented field -> values at which it has no effect.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "background_options": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None, "in_memory"),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "stream_options": (None, {}, {"include_obfuscation": False}),
    "truncation": (None, "disabled"),
}
# Unimplemented field -> what to do instead of leaving it out.
FIXES = {
    "background": "leave it out, and stream the response",
    "conversation": "continue a response with previous_response_id",
    "prompt": "send instructions and input",
    "truncation": 'leave it out, or send "disabled" and a shorter input',
}
# Field of chat completions -> field of this route.
RENAMED_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(FunctionDefinition):
    """Function that the model may call. Without `strict` its arguments are free, unlike at OpenAI."""

    type: Literal["function"]
    # Fields that SDKs send, at values without effect.
    allowed_callers: None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind != "function":
            name = quote_name(kind)
            raise ValueError(f"a tool of the type {name} is not implemented; offer a function that your program runs")
        if "function" in data:
            raise ValueError("in this route the fields of `function` stand beside `type`")
        return data


class NamedTool(FunctionName):
    """Choice of one function."""

    type: Literal["function"]


class AllowedTools(StrictModel):
    """Choice of some of the tools. The prompt describes all of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=128)]


class OtherChoice(StrictModel):
    """Choice that is not implemented."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        name = quote_name(data.get("type")) if isinstance(data, dict) else "that is no object"
        raise ValueError(f"a choice {name} is not implemented; send a word, a function or allowed_tools")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[OtherChoice, Tag("other")],
    Discriminator(lambda v: _find_choice_tag(v)),
]


class TextFormat(StrictModel):
    """Format of the content."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to the type json_schema, and this type needs it")
        return self


class TextOptions(StrictModel):
    """Options of the content."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the default is the only one


class ReasoningOptions(StrictModel):
    """Options of the reasoning."""

    effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    # "auto" is the best summary that the model has. No model here has one; `content` has the reasoning itself.
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseRequest(SamplingRequest):
    """Response to a conversation of items (POST /v1/responses)."""

    input: ResponseInput
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: bool | None = None  # None = as the server does
    max_output_tokens: Count | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=8)]
        | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    client_metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    stop: str | list[str] | None = None
    prediction: PredictedContent | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, cls.model_fields, NEUTRAL_VALUES, FIXES, RENAMED_FIELDS)

    @property
    def has_images(self) -> bool:
        items = () if isinstance(self.input, str) else self.input
        return any(isinstance(item, MessageItem) and item.has_images for item in items)

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def _find_choice_tag(value: Any) -> str:
    if isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "named", "allowed_tools": "allowed"}.get(str(kind), "other")
