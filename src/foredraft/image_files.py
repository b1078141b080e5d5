"""Reading of image files within limits. Pillow is imported when the first image is read."""

import base64
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

PILLOW_ERROR = "images need Pillow; install it with: pip install 'foredraft[images]'"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of the first frame


@dataclass(frozen=True)
class ImageLimits:
    """Limits of the images of a request."""

    max_images: int = 8  # per request
    max_bytes: int = 20 << 20  # of one file
    max_pixels: int = 64 << 20  # of one image, before the model's processor changes its size
    max_aspect: int = 200  # long side by short side: some processors scale the short side up to a fixed size


def read_image(source: Any, limits: ImageLimits) -> Any:
    """Read one image.

    Args:
        source: path of a file, its bytes, a URL with data, or an image of Pillow.
        limits: bytes and pixels at most.

    Returns:
        An image of Pillow in mode RGB, upright as its metadata says.

    Raises:
        ForedraftError: Pillow is missing, or the image cannot be read, has another format, or is too large.
    """
    pillow = import_pillow()
    if isinstance(source, pillow.Image.Image):
        return _decode(pillow, lambda: source, limits)
    if isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]*:", source, re.IGNORECASE) and not Path(source).exists():
        source = decode_data_url(source)
    if isinstance(source, str | Path):
        source = _read_file(Path(source).expanduser(), limits)
    if not isinstance(source, bytes | bytearray):
        raise ForedraftError(f"an image is a path, the bytes of a file or an image of Pillow, got {source!r:.80}")
    if len(source) > limits.max_bytes:
        raise ForedraftError(f"an image has {len(source)} bytes and at most {limits.max_bytes} are read; shrink it")
    return _decode(pillow, lambda: pillow.Image.open(io.BytesIO(bytes(source)), formats=FORMATS), limits)


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a URL `data:image/png;base64,...`.

    Raises:
        ForedraftError: it is another URL, which is never fetched, or no base64.
    """
    head, comma, data = url.partition(",")
    if not comma or not re.fullmatch(r"data:image/[a-z0-9.+-]+(;[a-z0-9.=_-]+)*;base64", head[:200], re.IGNORECASE):
        raise ForedraftError(
            f"the image URL {url[:40]!r} is not data:image/...;base64,...; images are not fetched: send their bytes so"
        )
    return decode_base64(data)


def decode_base64(data: str) -> bytes:
    """Return the bytes of base64. Line breaks, as the program base64 writes them, are left out.

    Raises:
        ForedraftError: it is no base64, or its end is missing.
    """
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise ForedraftError(
            f"the base64 of an image is not valid ({error}); encode the whole file again, with + and / and with padding"
        ) from None


def import_pillow() -> Any:
    """Import Pillow. Raises ForedraftError without it."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise ForedraftError(PILLOW_ERROR) from None
    return PIL


def _read_file(path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except OSError as error:
        raise ForedraftError(
            f"the image {path} cannot be read ({error.strerror or error}); give another path"
        ) from None


def _decode(pillow: Any, open_image: Callable[[], Any], limits: ImageLimits) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.Image.DecompressionBombWarning)  # the limit here is its own
            image = open_image()
            _check_size(image.size, limits)  # the header has the size; nothing is decoded yet
            return _convert_colours(pillow.ImageOps.exif_transpose(image))
    except ForedraftError:
        raise
    except pillow.Image.DecompressionBombError:
        raise ForedraftError(
            f"an image has more pixels than the {limits.max_pixels} that are read; shrink it"
        ) from None
    except pillow.UnidentifiedImageError:
        raise ForedraftError(f"an image has none of the formats {', '.join(FORMATS)}; convert it") from None
    except Exception as error:  # a damaged file may raise any exception in Pillow's readers
        raise ForedraftError(
            f"an image cannot be read ({type(error).__name__}: {error!s:.80}); save it again"
        ) from None


def _convert_colours(image: Any) -> Any:
    """Convert an image to mode RGB. Transparency is left out, as in transformers."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about the direct way, which has the same colours
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")  # Pillow would cut values above 255
    return image.convert("RGB")


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    if min(size) < 1 or size[0] * size[1] > limits.max_pixels:
        raise ForedraftError(
            f"an image has {size[0]} x {size[1]} pixels and at most {limits.max_pixels} are read; shrink it"
        )
    if max(size) > min(size) * limits.max_aspect:
        raise ForedraftError(
            f"an image has {size[0]} x {size[1]} pixels, and a side is more than {limits.max_aspect} times the other; "
            "crop it"
        )
