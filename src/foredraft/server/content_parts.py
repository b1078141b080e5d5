"""Parts of the contents of messages: text and images, in the format of OpenAI."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, field_validator

from foredraft.server.strict_model import StrictModel

OTHER_PART_ERROR = (
    "send parts of type 'text', and images as 'image_url' in messages of the user; this server reads no sounds or files"
)

ImageDetail = Literal["auto", "low", "high", "original"]


class TextContentPart(StrictModel):
    """Text part of the content of a message."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "text":
            raise ValueError(OTHER_PART_ERROR)
        return value


class ImageUrl(StrictModel):
    """Image of a part: data:image/...;base64,... or a file URL of the server's media folder."""

    url: str
    detail: ImageDetail | None = None  # the model's own processor decides the size


class ImageContentPart(StrictModel):
    """Image part of the content of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def make_image_part(url: str) -> ImageContentPart:
    """Return the part of an image by its URL."""
    return ImageContentPart(type="image_url", image_url=ImageUrl(url=url))


ContentPart = Annotated[
    Annotated[TextContentPart, Tag("text_part")] | Annotated[ImageContentPart, Tag("image_part")],
    Discriminator(lambda value: _find_part_kind(value)),
]


def join_text(content: str | Sequence[TextContentPart | ImageContentPart]) -> str:
    """Join the text of the parts of a content."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextContentPart))


def _find_part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "image_part" if kind == "image_url" else "text_part"
