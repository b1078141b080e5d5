"""Options of the commands that run many requests at the same time."""

import re
from dataclasses import dataclass
from typing import Annotated

import typer

from foredraft.cli.options import ModelOptions, _make_option
from foredraft.cli.shell import UsageError

LOAD_PANEL = "Load"
_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """Sizes of an engine for many requests."""

    max_batch: Annotated[
        int,
        typer.Option(
            "--max-batch",
            "--max-num-seqs",
            help="Most requests that run at the same time.",
            rich_help_panel=LOAD_PANEL,
            min=1,
        ),
    ] = 32
    kv_memory: Annotated[
        str | None,
        _make_option(
            "Memory of the KV cache, such as 2GiB. Default: a quarter of the free memory; 80 % of a GPU's.",
            panel=LOAD_PANEL,
        ),
    ] = None

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of --kv-memory; None = the default. Raises UsageError for a text that is no size."""
        return None if self.kv_memory is None else parse_size(self.kv_memory)


def parse_size(text: str, option: str = "--kv-memory") -> int:
    """Return the bytes of a size such as 2GiB, 512M or 1.5g.

    Args:
        text: number with an optional unit, a power of 1024 in upper or lower case.
        option: option that gives it, for the error. Default --kv-memory.

    Raises:
        UsageError: the text is no size, or less than one byte.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    size = 0 if match is None else int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper()))
    if size < 1:
        raise UsageError(f"{option} takes a size such as 2GiB or 512M, got {text!r}")
    return size
