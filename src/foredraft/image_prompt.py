"""Prompts with images: as the caller gives them, and ready for a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.placed_images import PlacedImages

ImageSource = str | Path | bytes | Any  # path of a file, its bytes, or an image of Pillow


@dataclass(frozen=True)
class ImagePrompt:
    """Prompt of a vision-language model.

    Args:
        text: text or token ids, with the placeholder of the model, such as `<image>`, for every image. `LLM.chat`
            writes placeholders by the model's chat template.
        images: images in the order of the placeholders: paths, bytes of files, or images of Pillow.
    """

    text: str | Sequence[int]
    images: Sequence[ImageSource] = field(repr=False)


@dataclass(frozen=True)
class EncodedImagePrompt:
    """Prompt whose images are encoded already, from `LLM.encode_chat`; several requests may share it."""

    tokens: tuple[int, ...]
    images: PlacedImages = field(repr=False)
