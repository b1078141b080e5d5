"""Images of a chat request: their URLs become bytes, and their states replace the placeholders of the template."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from foredraft.errors import ForedraftError
from foredraft.image_files import decode_data_url
from foredraft.image_prompt import ImageSource
from foredraft.placed_images import PlacedImages
from foredraft.server.errors import ApiError
from foredraft.server.service import Service

MAX_SHOWN = 60  # characters of a URL in an error


def place_images(service: Service, ids: list[int], urls: Sequence[str]) -> tuple[list[int], PlacedImages | None]:
    """Put the images of a request into its token ids.

    Args:
        service: state of the routes of one model.
        ids: token ids of the rendered messages.
        urls: URLs of the images, in order.

    Returns:
        Token ids of the prompt, and its images; None without images.

    Raises:
        ApiError: 400 for a model that reads no images, and for images that are refused.
    """
    if not urls:
        return ids, None
    encoder = service.llm.target.image_encoder
    if encoder is None:
        raise ApiError(400, "this model reads no images; serve a vision-language model with --max-images N", "messages")
    try:
        encoder.check_count(len(urls))
        images = encoder.read([read_url(url, service.settings.media_folder) for url in urls])
        return encoder.place(ids, images)
    except ForedraftError as error:
        raise ApiError(400, str(error).replace(encoder.name, service.settings.model_names[0]), "messages") from None


def read_url(url: str, folder: str | None) -> ImageSource:
    """Return the bytes of a data URL, or the path of a file URL.

    Args:
        url: URL of an image.
        folder: folder with the files that clients may name. None = none.

    Raises:
        ForedraftError: the URL is of another kind, or its file is not in the folder. Nothing is fetched.
    """
    kind = url.partition(":")[0].lower()
    if kind == "data":
        return decode_data_url(url)
    shown = repr(url[:MAX_SHOWN])
    if kind != "file":
        raise ForedraftError(f"the image URL {shown} is not fetched; send the image as data:image/png;base64,...")
    if folder is None:
        raise ForedraftError(
            f"the image URL {shown} names a file of the server, which --allowed-local-media-path does not allow; send "
            "the image as data:image/png;base64,..."
        )
    path = _find_file(url, Path(folder).resolve())
    if path is None:
        raise ForedraftError(f"the image URL {shown} names no file of the server's media folder; correct its path")
    return path


def _find_file(url: str, root: Path) -> Path | None:
    """Return the file of a file URL if it lies in a folder, links resolved; otherwise None."""
    try:
        parts = urlsplit(url)
        path = Path(os.path.realpath(unquote(parts.path)))
        is_inside = parts.netloc in ("", "localhost") and path.is_relative_to(root) and path.is_file()
    except (ValueError, OSError):  # a zero byte, a malformed host, a name that is too long
        return None
    return path if is_inside else None
