"""Options of `foredraft serve` for the formats of tool calls and reasoning."""

from dataclasses import dataclass
from typing import Annotated

from foredraft.cli.model_list import ModelListOptions
from foredraft.cli.options import AUTO, NONE, _make_option
from foredraft.cli.shell import UsageError

SERVER_PANEL = "Server"
# Names of foredraft.server.messages.formats, which is not imported before a server starts; a test compares them.
CALL_FORMAT_NAMES = ("harmony", "mistral-args", "mistral", "hermes", "llama3", "json")
REASONING_FORMAT_NAMES = ("harmony", "think", "mistral", NONE)


@dataclass(frozen=True)
class MessageFormatOptions(ModelListOptions):
    """Formats of the answers in chats."""

    tool_call_parser: Annotated[
        str | None,
        _make_option(
            f"Format of tool calls: {', '.join(CALL_FORMAT_NAMES)}. Default: by the chat template.",
            panel=SERVER_PANEL,
            metavar="NAME",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _make_option(
            f"Format of reasoning: {', '.join(REASONING_FORMAT_NAMES)}. Default: by the chat template.",
            panel=SERVER_PANEL,
            metavar="NAME",
        ),
    ] = None


def read_format(option: str, name: str | None, names: tuple[str, ...]) -> str:
    """Return the name of a format. Raises UsageError for an unknown one."""
    if name not in (None, AUTO, *names):
        raise UsageError(f"{option} {name} does not exist; use one of {', '.join((AUTO, *names))}")
    return AUTO if name is None else name
