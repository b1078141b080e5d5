"""One way to write a handover, and the registry of all."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from foredraft.errors import ForedraftError, suggest
from foredraft.handover.deployment import Handover

API_KEY_VARIABLE = "FOREDRAFT_API_KEY"  # environment variable with the API key; the key itself is never written


@dataclass(frozen=True)
class OutputFormat:
    """One way to write a handover.

    Attributes:
        name: value of --format.
        file: name of the file in the folder of --out.
        write: returns the text. It raises ForedraftError if the engine cannot be started that way.
    """

    name: str
    file: str
    write: Callable[[Handover], str]


@cache
def load_formats() -> dict[str, OutputFormat]:
    """Import all formats. Returns them by name."""
    import foredraft.handover.formats as package

    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    return {module.FORMAT.name: module.FORMAT for module in modules}


def find_format(name: str) -> OutputFormat:
    """Return the format of a name. Raises ForedraftError for an unknown one."""
    formats = load_formats()
    if name not in formats:
        raise ForedraftError(f"unknown format {name!r}; use one of: {', '.join(formats)}{suggest(name, [*formats])}")
    return formats[name]
