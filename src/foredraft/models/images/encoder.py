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
ImageInputs = dict[str, Any]  # arguments of a model for a prompt of one image alone, as its processor makes them


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
        self.encode([self._process(import_pillow().Image.new("RGB", PROBE_SIZE, PROBE_COLOUR))])

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

    def read(self, sources: Sequence[Any]) -> list[ImageInputs]:
        """Read and process the images of one request, one after another: one at a time is unpacked in memory.

        Args:
            sources: paths, bytes of files, or images of Pillow.

        Raises:
            ForedraftError: an image is refused, or there are too many.
        """
        self.check_count(len(sources))
        return [self._read_one(source, i, len(sources)) for i, source in enumerate(sources)]

    def encode(self, images: Sequence[ImageInputs]) -> list[EncodedImage]:
        """Encode images, each by itself, so that its states do not depend on the others.

        Args:
            images: images as of `read`.

        Raises:
            ForedraftError: the model refuses an image.
        """
        with self.lock:
            return [self._encode(each) for each in images]

    def place(self, tokens: Sequence[int], images: Sequence[ImageInputs]) -> tuple[list[int], PlacedImages]:
        """Encode the images of a prompt and put them in place of its placeholders.

        Args:
            tokens: token ids with a placeholder per image.
            images: images as of `read`, at least one.

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

    def _read_one(self, source: Any, index: int, count: int) -> ImageInputs:
        try:
            return self._process(read_image(source, self.limits))
        except ForedraftError as error:
            raise ForedraftError(f"image {index + 1} of {count}: {error}" if count > 1 else str(error)) from error

    def _process(self, image: Any) -> ImageInputs:
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

    def _encode(self, inputs: ImageInputs) -> EncodedImage:
        kind = f"{self.name} ({type(self.model).__name__})"
        try:
            return encode_image(self.model, self.implementations, inputs)
        except ForedraftError as error:
            raise ForedraftError(f"{kind} cannot be served with images: {error}") from None
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            raise ForedraftError(
                f"{kind} cannot encode an image ({type(error).__name__}: {error!s:.120}); leave the image out"
            ) from error
