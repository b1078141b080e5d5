"""Items of `input`: messages, calls, their results, and reasoning that clients carry back."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from foredraft.server.errors import quote_name
from foredraft.server.schemas import StrictModel

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=128)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
_PART_TYPES = ("input_text", "output_text")
# Type of an item that is not implemented -> what to send instead.
_OTHER_ITEMS = {
    "item_reference": "send the item itself, or previous_response_id",
    "custom_tool_call": "offer a tool of type function",
    "custom_tool_call_output": "offer a tool of type function",
}


class TextPart(StrictModel):
    """Text of a message or of a result."""

    type: Literal["input_text", "output_text"]
    text: str
    # Fields of answers that clients send back. Log-probabilities, and what an SDK parses of the text, change nothing.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class OtherPart(StrictModel):
    """Part that is not implemented."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        name = quote_name(data.get("type")) if isinstance(data, dict) else "without a type"
        raise ValueError(f"a part {name} is not implemented; send text as input_text or output_text")


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("other")],
    Discriminator(lambda v: "text" if _read_type(v) in _PART_TYPES else "other"),
]
Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(fail_fast=True, max_length=1024), Tag("parts")],
    Discriminator(lambda v: "text" if isinstance(v, str) else "parts" if isinstance(v, list) else None),
]


class MessageItem(StrictModel):
    """Message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: ItemId | None = None
    status: Status | None = None
    phase: None = None

    @property
    def text(self) -> str:
        return join_parts(self.content)


class FunctionCallItem(StrictModel):
    """Call of a function by the model."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str
    id: ItemId | None = None
    status: Status | None = None
    # Fields that clients send back, at the values which answers have.
    async_: Literal[False] | None = None
    caller: None = None
    created_by: None = None
    namespace: None = None
    parsed_arguments: Any = None  # what an SDK parses of the arguments


class FunctionOutputItem(StrictModel):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text
    id: ItemId | None = None
    status: Status | None = None
    caller: None = None
    created_by: None = None
    name: None = None
    namespace: None = None

    @property
    def text(self) -> str:
        return join_parts(self.output)


class ReasoningText(StrictModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictModel):
    """Summary of reasoning, by another server."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True, max_length=1024)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=1024)] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @model_validator(mode="after")
    def _check_text(self) -> "ReasoningItem":
        if self.encrypted_content is not None and not self.content:
            raise ValueError("reasoning that another server has encrypted cannot be read; leave the item out")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class OtherItem(StrictModel):
    """Item that is not implemented."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind is None:
            raise ValueError("an item needs a type, or the role of a message")
        fix = _OTHER_ITEMS.get(str(kind), "send messages, function_call, function_call_output and reasoning")
        raise ValueError(f"an item of the type {quote_name(kind)} is not implemented; {fix}")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning_item")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(lambda v: _find_item_tag(v)),
]
Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
Items = Annotated[list[InputItem], Field(fail_fast=True)]
ResponseInput = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")] | Annotated[Items, Field(min_length=1), Tag("items")],
    Discriminator(lambda v: "text" if isinstance(v, str) else "items" if isinstance(v, list) else None),
]
ITEM_TAGS = {
    "message": "message",
    "function_call": "function_call",
    "function_call_output": "function_call_output",
    "reasoning": "reasoning_item",
}


def join_parts(content: str | list[Any]) -> str:
    """Join the parts of a content to one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _read_type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _find_item_tag(value: Any) -> str:
    kind = _read_type(value)
    if kind is None and isinstance(value, dict) and "role" in value:
        return "message"
    return ITEM_TAGS.get(kind, "other") if isinstance(kind, str) else "other"
