"""Options of `foredraft serve` and `foredraft batch` for images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.options import ModelParts, _make_option
from foredraft.cli.shell import UsageError
from foredraft.cli.stored_responses import StoredResponseOptions

if TYPE_CHECKING:
    from foredraft.server.settings import RequestLimits


IMAGE_PANEL = "Images"


@dataclass(frozen=True)
class ImageInputOptions(ModelParts):
    """Images in requests."""

    max_images: Annotated[
        int,
        typer.Option(
            help="Most images of a request, for a vision-language model; 0 leaves its image part out.",
            rich_help_panel=IMAGE_PANEL,
            min=0,
            max=64,
        ),
    ] = 0
    allowed_local_media_path: Annotated[
        str | None,
        _make_option(
            "Folder with images that requests may name by file URLs. Default: none. http URLs are never fetched.",
            panel=IMAGE_PANEL,
            metavar="FOLDER",
        ),
    ] = None

    @property
    def num_images(self) -> int:
        """Images of a request at most."""
        return self.max_images

    @property
    def media_folder(self) -> str | None:
        """Folder of --allowed-local-media-path, as an absolute path. Raises UsageError if there is none."""
        if self.allowed_local_media_path is None:
            return None
        folder = Path(self.allowed_local_media_path).expanduser()
        if not folder.is_dir():
            raise UsageError(f"--allowed-local-media-path {self.allowed_local_media_path!r} is no folder; correct it")
        if not self.max_images:
            raise UsageError("--allowed-local-media-path is for images; add --max-images N, or leave it out")
        return str(folder.resolve())

    def make_limits(self) -> "RequestLimits":
        """Return the limits of requests, whose bodies may hold images."""
        from foredraft.server.settings import make_request_limits

        return make_request_limits(self.max_images)


@dataclass(frozen=True)
class ImageServeOptions(ImageInputOptions, StoredResponseOptions):
    """Images and stored responses of a server."""
