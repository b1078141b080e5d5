"""One option of `foredraft serve`, as another engine has it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServerFlag:
    """Equal of an option, or the reason why there is none.

    Attributes:
        flag: flag of the engine's server; None = it has none.
        note: what differs, or what to do without a flag. It is shown if the option is given.
        argument: name of the argument of the engine itself, for Ray Serve; None = it belongs to the HTTP server.
        argument_value: its value; None = that of the option.
        is_switch: True if the flag takes no value.
        takes_several: True if the flag takes several values behind each other.
        is_folder: True if the value may be a local file or folder, which a container must see.
        config: entries of the engine's configuration file for a value; None = there are none.
        values: values that the engine accepts; None = all.
        convert: conversion of the value to that of the flag.
    """

    flag: str | None = None
    note: str = ""
    argument: str | None = None
    argument_value: Any = None
    is_switch: bool = False
    takes_several: bool = False
    is_folder: bool = False
    config: Callable[[Any], Mapping[str, Any]] | None = None
    values: frozenset[Any] | None = None
    convert: Callable[[Any], Any] = lambda value: value

    @property
    def is_equal(self) -> bool:
        """Whether the engine has the option."""
        return self.flag is not None or self.config is not None


def no_flag(reason: str) -> ServerFlag:
    """Return the entry of an option that an engine does not have."""
    return ServerFlag(note=reason)
