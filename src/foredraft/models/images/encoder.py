"""Encoder of images for the prompts of a vision-language target: the processor and the model's own image part."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.image_files import ImageLimits, import_pillow, read_image
from foredraft.models.images.decoder_input import encode_image
from foredraft.placed_images import EncodedImage, PlacedImages, expand_placeholders

PROBE_SIZE = (48, 40)  # pixels of the image with which a model is examined
PROBE_COLOUR = (200, 60, 120)


@dataclass(frozen=True)
class ImageEncoder:
    """Encoder of images, shared by copies of a target. Thread-safe: the lock is that of the target's modules."""

    model: Any
    processor: Any
    name: str  # of the model, in errors
    limits: ImageLimits
    implementations: dict[str, str]  # the model's own attention
    lock: Lock = field(default_factory=Lock, repr=False)

    def examine(self) -> None:
        """Encode an image without meaning. Raises ForedraftError if the model cannot be served with images."""
        self.encode([import_pillow().Image.new("RGB", PROBE_SIZE, PROBE_COLOUR)])

    @property
    def placeholder(self) -> str:
        """Text that stands for an image in a prompt."""
        return str(self.processor.image_token)

    @property
    def placeholder_id(self) -> int:
        """Token id of the placeholder."""
        return int(self.processor.tokenizer.convert_tokens_to_ids(self.placeholder))

    def check_count(self, count: int) -> None:
        """Raise ForedraftError for more images than a request may have."""
        if count > self.limits.max_images:
            raise ForedraftError(
                f"the request has {count} images and at most {self.limits.max_images} are read; give fewer, or raise "
                "max_images (--max-images)"
            )

    def read(self, sources: Sequence[Any]) -> list[Any]:
        """Read the images of one request. Raises ForedraftError for an image that is refused, or too many."""
        self.check_count(len(sources))
        return [read_image(source, self.limits) for source in sources]

    def encode(self, images: Sequence[Any]) -> list[EncodedImage]:
        """Encode images of Pillow, each by itself, so that its states do not depend on the others.

        Raises:
            ForedraftError: the processor or the model refuses an image.
        """
        inputs = [self._process(image) for image in images]
        with self.lock:
            return [self._encode(each) for each in inputs]

    def place(self, tokens: Sequence[int], images: Sequence[Any]) -> tuple[list[int], PlacedImages]:
        """Encode the images of a prompt and put them in place of its placeholders.

        Args:
            tokens: token ids with a placeholder per image.
            images: images of Pillow, at least one.

        Returns:
            Token ids of the prompt, and its images.

        Raises:
            ForedraftError: there are more or fewer placeholders, or an image is refused.
        """
        encoded = self.encode(images)
        try:
            ids, starts = expand_placeholders(tokens, self.placeholder_id, encoded)
        except ForedraftError as error:
            raise ForedraftError(
                f"{error}; write {self.placeholder} once for each image, or use a chat template that does (LLM.chat, "
                "--chat)"
            ) from None
        return ids, PlacedImages.place(len(ids), list(zip(starts, encoded, strict=True)))

    def _process(self, image: Any) -> dict[str, Any]:
        try:
            made = self.processor(
                text=[self.placeholder], images=[image], return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # processors raise any exception for sizes that they do not take
            raise ForedraftError(
                f"the processor of {self.name} refuses an image ({type(error).__name__}: {error!s:.120})"
            ) from error
        inputs = {name: value for name, value in made.items() if name != "attention_mask"}
        return {name: self._move(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _move(self, value: Tensor) -> Tensor:
        model = self.model
        return value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)

    def _encode(self, inputs: dict[str, Any]) -> EncodedImage:
        kind = f"{self.name} ({type(self.model).__name__})"
        try:
            return encode_image(self.model, self.implementations, inputs)
        except ForedraftError as error:
            raise ForedraftError(f"{kind} cannot be served with images: {error}") from None
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            raise ForedraftError(
                f"{kind} cannot encode an image ({type(error).__name__}: {error!s:.120}); leave the image out"
            ) from error
