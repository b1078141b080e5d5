"""Options of a command from a configuration file instead of a command line."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import typer

from foredraft.cli import shell
from foredraft.cli.suggest import format_unknown_option


def parse_named_options(command: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check options as the command line does, and return all options with their defaults.

    Args:
        command: function with a command's options.
        values: options by name, with - or _. A flag takes true or false, a repeatable option a list.

    Raises:
        UsageError: an option is unknown or has an invalid value.
    """
    app = typer.Typer()
    app.command("command", cls=shell.Command)(command)
    parser: Any = typer.main.get_command(app)
    known = {name.lstrip("-"): name for parameter in parser.params for name in parameter.opts if name.startswith("--")}
    arguments = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if name not in known or name == "help":
            raise shell.UsageError(format_unknown_option(f"--{name}", list(known.values())))
        arguments += _format_option(known[name], value)
    try:
        return dict(parser.make_context("foredraft serve", arguments).params)
    except shell.ClickUsageError as error:
        raise shell.UsageError(str(error.format_message())) from None


def _format_option(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, Mapping):
        return [f"{name}={json.dumps(value)}"]
    return [f"{name}={item}" for item in (value if isinstance(value, list | tuple) else [value])]
