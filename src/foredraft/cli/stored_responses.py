"""Options of `foredraft serve` for the stored responses of /v1/responses."""

from dataclasses import dataclass
from typing import Annotated

import typer

from foredraft.cli.engine_options import parse_size
from foredraft.cli.message_formats import SERVER_PANEL, MessageFormatOptions
from foredraft.cli.options import _make_option


@dataclass(frozen=True)
class StoredResponseOptions(MessageFormatOptions):
    """Bounds of the stored responses."""

    stored_responses: Annotated[
        int,
        typer.Option(
            help="Most responses of /v1/responses that are stored in memory; the last used ones stay. 0 stores none.",
            rich_help_panel=SERVER_PANEL,
            min=0,
            max=1 << 20,
        ),
    ] = 1024
    stored_response_memory: Annotated[
        str, _make_option("Most memory of the stored responses, such as 64MiB.", panel=SERVER_PANEL, metavar="SIZE")
    ] = "64MiB"

    @property
    def stored_response_bytes(self) -> int:
        """Bytes of --stored-response-memory. Raises UsageError for a text that is no size."""
        return parse_size(self.stored_response_memory, "--stored-response-memory")
