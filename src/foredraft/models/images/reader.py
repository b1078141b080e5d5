"""The part of a target that reads images."""

from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.models.images.encoder import ImageEncoder


@dataclass
class ImageReader:
    """Base of targets, which may have an image encoder. Copies of a target share it."""

    image_encoder: ImageEncoder | None = field(kw_only=True, default=None)  # None = images are not read

    def require_image_encoder(self, name: str) -> ImageEncoder:
        """Return the image encoder. Raises ForedraftError if the target of this name was loaded without one."""
        if self.image_encoder is None:
            raise ForedraftError(
                f"{name} was loaded without its image part; load a vision-language model with max_images=N, N "
                "images per request at most (--max-images N)"
            )
        return self.image_encoder
