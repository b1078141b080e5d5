"""Items of `input`: messages, calls, their results, and reasoning that clients carry back."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from foredraft.server.content_parts import ImageDetail
from foredraft.server.errors import quote_name
from foredraft.server.schemas import StrictModel

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=128)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
_PART_TYPES = ("input_text", "output_text")
_PART_FIX = "send text as input_text or output_text, and images as input_image in messages of the user"
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


class ImagePart(StrictModel):
    """Image of a message of the user: data:image/...;base64,... or a file URL of the server's media folder."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: ImageDetail | None = None
    file_id: str | None = None

    @model_validator(mode="after")
    def _check_url(self) -> "ImagePart":
        if self.image_url is None or self.file_id is not None:
            raise ValueError("this server stores no files; send the image as image_url: data:image/png;base64,...")
        return self


class OtherPart(StrictModel):
    """Part that is not implemented."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        name = quote_name(data.get("type")) if isinstance(data, dict) else "without a type"
        raise ValueError(f"a part {name} is not implemented here; {_PART_FIX}")


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("other")],
    Discriminator(lambda v: "text" if _read_type(v) in _PART_TYPES else "other"),
]
Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(fail_fast=True, max_length=1024), Tag("parts")],
    Discriminator(lambda v: "text" if isinstance(v, str) else "parts" if isinstance(v, list) else None),
]

MessagePart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image_part")] | Annotated[OtherPart, Tag("other")],
    Discriminator(lambda v: _find_part_tag(v)),
]
MessageParts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[MessagePart], Field(fail_fast=True, max_length=1024), Tag("parts")],
    Discriminator(lambda v: "text" if isinstance(v, str) else "parts" if isinstance(v, list) else None),
]


class MessageItem(StrictModel):
    """Message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: MessageParts
    id: ItemId | None = None
    status: Status | None = None
    phase: None = None

    @model_validator(mode="after")
    def _check_images(self) -> "MessageItem":
        if self.role != "user" and self.has_images:
            raise ValueError("images belong to messages of the user")
        return self

    @property
    def text(self) -> str:
        return join_parts(self.content)

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        """Parts of the content; a text is one."""
        if isinstance(self.content, str):
            return [TextPart(type="input_text", text=self.content)]
        return self.content  # type: ignore[return-value]  # OtherPart raises an error when it is validated

    @property
    def has_images(self) -> bool:
        return any(isinstance(part, ImagePart) for part in self.parts)


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
    """Join the text of the parts of a content."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


def _read_type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _find_part_tag(value: Any) -> str:
    kind = _read_type(value)
    return "image_part" if kind == "input_image" else "text" if kind in _PART_TYPES else "other"


def _find_item_tag(value: Any) -> str:
    kind = _read_type(value)
    if kind is None and isinstance(value, dict) and "role" in value:
        return "message"
    return ITEM_TAGS.get(kind, "other") if isinstance(kind, str) else "other"
