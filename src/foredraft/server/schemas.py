"""Request schemas of the routes. Unknown fields are refused by name; no field is ignored silently.

Two kinds of fields have no effect. `user` is accepted and neither stored nor logged. The fields of NEUTRAL_VALUES are
accepted at the values listed there, which request the default behaviour, and refused at any other value.

Fields beyond OpenAI's and vLLM's:

- `typical_p`: typical sampling.
- `speculative`: {"num_speculative_tokens": K}; 0 = no drafts, "2-6" = from 2 to 6, "1:6,8:0" = by batch size.
- `verify`: verification rule of this request; `posterior_threshold` and `posterior_alpha`: its settings.
- `speculative_metrics`: statistics of this request in `metrics.speculative_decoding`.
- `foredraft_trace`: tokens, text, origins and draft trees in every chunk of a stream.
- `regex`: short for structured_outputs.regex.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from foredraft.draft_length.length_table import LengthTable
from foredraft.errors import ForedraftError
from foredraft.server.content_parts import ContentPart, ImageContentPart, TextContentPart, join_text
from foredraft.server.neutral_fields import drop_neutral
from foredraft.server.strict_model import StrictModel as StrictModel
from foredraft.verification.registry import VERIFY_OPTIONS

SEED_BOUND = 1 << 63  # seeds are 64-bit signed integers
Count = Annotated[int, Field(ge=0, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]

# Unimplemented field -> values at which it has no effect.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None,),
    "early_stopping": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None,),
    "logprob_token_ids": (None,),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}


MAX_REQUEST_DRAFT = 1024  # longest draft that a request may name, in tokens


class StreamOptions(StrictModel):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _check_lengths(value: int | str) -> int | str:
    """Return the draft lengths of a request. Raises ForedraftError for another form and for very long drafts."""
    longest = LengthTable.parse(value).most
    if longest is not None and longest > MAX_REQUEST_DRAFT:
        raise ForedraftError(f"num_speculative_tokens is at most {MAX_REQUEST_DRAFT}, got {value!r:.80}")
    return value


class SpeculativeOptions(StrictModel):
    """Draft options of one request."""

    # A length, a range such as "2-6", or a table by batch size such as "1:6,8:0".
    num_speculative_tokens: Annotated[int | str, AfterValidator(_check_lengths)]


class JsonSchema(StrictModel):
    """JSON schema of the output, in the format of OpenAI."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Format of the output, in the format of OpenAI."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """Grammar of the output. Exactly one field must be set."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None  # Lark syntax of llguidance


ContentParts = Annotated[list[ContentPart], Field(fail_fast=True, max_length=1024)]
TextParts = Annotated[list[TextContentPart], Field(fail_fast=True, max_length=1024)]
# The union is discriminated by type, because a validator that tries each member reports every entry for each of them.
MessageContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[ContentParts, Tag("parts")], Discriminator(lambda v: _find_content_kind(v))
]
TextContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextParts, Tag("parts")], Discriminator(lambda v: _find_content_kind(v))
]


class PredictedContent(StrictModel):
    """Predicted output, in the format of OpenAI."""

    type: Literal["content"]
    content: TextContent


class CalledFunction(StrictModel):
    """Function of a call in a message."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str


class MessageToolCall(StrictModel):
    """Call in a message of the assistant, in the format of OpenAI."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0)] | None = None  # clients repeat it from a stream


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    # Fields of answers that clients send back, at the values which answers have.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.role != "assistant" and (self.tool_calls is not None or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content belong to messages of the assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to messages of the role tool, and each of them needs it")
        if self.role != "user" and self.image_urls:
            raise ValueError("images belong to messages of the user")
        return self

    @property
    def image_urls(self) -> list[str]:
        """URLs of the images of the content, in order."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImageContentPart)]

    @property
    def text(self) -> str:
        return join_text(self.content or "")

    @property
    def size(self) -> int:
        """Characters of the message, those of its calls included."""
        calls = sum(len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.text) + len(self.reasoning_content or "") + calls


def list_image_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """List the URLs of the images of a conversation, in order."""
    return [url for message in messages for url in message.image_urls]


class FunctionDefinition(StrictModel):
    """Function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(StrictModel):
    """Tool, in the format of OpenAI."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """Name of a function."""

    name: str


class NamedToolChoice(StrictModel):
    """Choice of one function, in the format of OpenAI."""

    type: Literal["function"]
    function: FunctionName


class ToolSubset(StrictModel):
    """Tools that an answer may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(fail_fast=True, min_length=1, max_length=128)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools)


class AllowedToolsChoice(StrictModel):
    """Choice of some of the tools, in the format of OpenAI. The prompt describes all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedToolChoice, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(lambda v: _find_choice_kind(v)),
]


class RoutedRequest(StrictModel):
    """Request that may name a model of the server."""

    model: str | None = None


class SamplingRequest(RoutedRequest):
    """Fields of every route that generates."""

    min_tokens: Count = 0
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None  # bounds that keep divided logits finite
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-SEED_BOUND, lt=SEED_BOUND)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    skip_special_tokens: bool | None = None  # None = True
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")] | None = None
    user: str | None = None
    speculative: SpeculativeOptions | None = None
    verify: Annotated[str, Field(max_length=64, json_schema_extra={"enum": list(VERIFY_OPTIONS)})] | None = None
    posterior_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    posterior_alpha: Annotated[float, Field(gt=0)] | None = None
    speculative_metrics: bool = False

    @property
    def is_streaming(self) -> bool:
        return bool(self.stream)

    @property
    def shared_fields(self) -> dict[str, Any]:
        """Fields of this class that the client has set, for a request of another route."""
        return {name: getattr(self, name) for name in SamplingRequest.model_fields if name in self.model_fields_set}


class GenerationRequest(SamplingRequest):
    """Fields of completions and of chat completions."""

    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: PredictedContent | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    foredraft_trace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, cls.model_fields, NEUTRAL_VALUES)


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("texts")]
    | Annotated[list[int], Field(fail_fast=True), Tag("ids")]
    | Annotated[list[list[int]], Field(fail_fast=True), Tag("lists")],
    Discriminator(lambda v: _find_prompt_kind(v)),
]


class CompletionRequest(GenerationRequest):
    """Completion of one or several prompts (POST /v1/completions)."""

    prompt: Prompt
    suffix: str | None = None  # text after the completion, which then fills in the middle; "" = none
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: int | None = None


class ChatRequest(GenerationRequest):
    """Completion of a conversation (POST /v1/chat/completions)."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: Literal[False] = False

    @property
    def has_images(self) -> bool:
        return bool(list_image_urls(self.messages))


class TokenizeRequest(RoutedRequest):
    """Tokenization of a text, or of messages that the chat template renders (POST /tokenize)."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None

    @property
    def has_images(self) -> bool:
        return bool(self.messages and list_image_urls(self.messages))


class DetokenizeRequest(RoutedRequest):
    """Conversion of token ids to text (POST /detokenize)."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def _find_content_kind(content: Any) -> str | None:
    return "text" if isinstance(content, str) else "parts" if isinstance(content, list) else None


def _find_choice_kind(choice: Any) -> str:
    if isinstance(choice, str):
        return "word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


def _find_prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return {str: "texts", int: "ids", list: "lists"}.get(type(first))
