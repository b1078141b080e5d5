"""Messages of a request: blocks of text, thinking, calls and their results. Every other block is refused by name.

`cache_control` is accepted, because what it is for works without it: the prefix cache is automatic. It keeps every full
page of a prompt while there is room.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from foredraft.server.errors import quote_name
from foredraft.server.schemas import CalledFunction, MessageToolCall, StrictModel

BLOCK_SEPARATOR = "\n\n"  # between blocks of text of the user and of the system
MAX_BLOCKS = 1024  # of one message
_OTHER_BLOCKS = {
    "image": "send images in messages of the user, outside of results",
    "document": "send its text in a block of the type text",
    "search_result": "send its text in a block of the type text",
    "redacted_thinking": "leave it out; thinking that another server has encrypted cannot be read",
}
_BLOCK_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class CacheMark(StrictModel):
    """Mark behind which another server begins to cache a prompt. Here every prompt is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ImageSource(StrictModel):
    """Bytes of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp"]
    data: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind != "base64":
            raise ValueError(
                f"a source of the type {quote_name(kind)} is not read, and no image is fetched; send the image as "
                '{"type": "base64", "media_type": "image/png", "data": ...}'
            )
        return data


class ImageBlock(StrictModel):
    """Image of a message of the user."""

    type: Literal["image"]
    source: ImageSource
    cache_control: CacheMark | None = None

    @property
    def url(self) -> str:
        """URL with the bytes of the image."""
        return f"data:{self.source.media_type};base64,{self.source.data}"


class ThinkingBlock(StrictModel):
    """Thinking of the model. Its signature is not checked: this server signs none."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    cache_control: CacheMark | None = None


class DirectCaller(StrictModel):
    """Caller of a tool: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(StrictModel):
    """Call of a tool by the model."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheMark | None = None
    # Fields that SDKs send back, at the values which answers have.
    caller: DirectCaller | None = None
    toolset_name: None = None


class RefusedBlock(StrictModel):
    """Block that is not implemented."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") is None:
            raise ValueError("a block is an object with a type, such as text")
        kind = data["type"]
        fix = _OTHER_BLOCKS.get(str(kind), "send text, image, thinking, tool_use and tool_result")
        raise ValueError(f"a block of the type {quote_name(kind)} is not implemented here; {fix}")


def check_text_kind(value: Any) -> Any:
    """Raise ValueError for a content that is neither a text nor a list."""
    if not isinstance(value, str | list):
        raise ValueError("give a text or a list of blocks")
    return value


def find_block_tag(value: Any) -> str:
    """Return the tag of a block. The brackets hide it in the places that errors name."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"[{kind}]" if isinstance(kind, str) and kind in _BLOCK_TYPES else "[other]"


def find_text_tag(value: Any) -> str:
    """Return the tag of a block where only text is allowed."""
    return "[text]" if find_block_tag(value) == "[text]" else "[other]"


TextOnlyBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")] | Annotated[RefusedBlock, Tag("[other]")], Discriminator(find_text_tag)
]
TextOnly = Annotated[
    Annotated[str, Tag("[str]")]
    | Annotated[list[TextOnlyBlock], Field(fail_fast=True, max_length=MAX_BLOCKS), Tag("[blocks]")],
    Discriminator(lambda v: "[str]" if isinstance(v, str) else "[blocks]"),
    BeforeValidator(check_text_kind),
]


class ToolResultBlock(StrictModel):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOnly = ""
    is_error: bool = False
    cache_control: CacheMark | None = None
    toolset_name: None = None

    @property
    def text(self) -> str:
        """Text that the model reads. Templates have no sign of an error, so the text begins with it."""
        text = join_blocks(self.content)
        return f"Error: {text}" if self.is_error else text


InputBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ImageBlock, Tag("[image]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[RefusedBlock, Tag("[other]")],
    Discriminator(find_block_tag),
]
InputContent = Annotated[
    Annotated[str, Tag("[str]")]
    | Annotated[list[InputBlock], Field(fail_fast=True, max_length=MAX_BLOCKS), Tag("[blocks]")],
    Discriminator(lambda v: "[str]" if isinstance(v, str) else "[blocks]"),
    BeforeValidator(check_text_kind),
]
Block = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_ROLE_BLOCKS: dict[str, tuple[type[StrictModel], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class BlockMessage(StrictModel):
    """One message of a conversation of blocks."""

    role: Literal["user", "assistant", "system"]
    content: InputContent

    @model_validator(mode="after")
    def _check_blocks(self) -> "BlockMessage":
        for block in self.blocks:
            if not isinstance(block, _ROLE_BLOCKS[self.role]):
                raise ValueError(f"a block of the type {block.type} does not belong to a message of the {self.role}")
        return self

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the content; a text is one."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content  # type: ignore[return-value]  # RefusedBlock raises an error when it is validated


class LongNamedFunction(CalledFunction):
    """Function of a call. Names may be longer than in OpenAI's API."""

    name: ToolName


class LongNamedCall(MessageToolCall):
    """Call in a message of the assistant."""

    function: LongNamedFunction


def join_blocks(content: Any) -> str:
    """Join blocks of text of the user or of the system. A text stays as it is."""
    return content if isinstance(content, str) else BLOCK_SEPARATOR.join(block.text for block in content)
