"""Syntax of the tool calls of one family of chat templates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallSyntax:
    """Marks around calls that are JSON objects, in lists or alone."""

    opening: str  # text before a call or a list of calls
    closing: str = ""  # text after it; optional when it is read
    separator: str = ""  # character between two calls outside a list
    is_leading: bool = False  # a message that begins with JSON needs no opening
    arguments_mark: str = ""  # text between the name of a function and its arguments, as in name[ARGS]{...}
    id_mark: str = ""  # text before an id between the two, as in name[CALL_ID]id[ARGS]{...}

    @property
    def has_bare_names(self) -> bool:
        """Whether a call may be the name of a function and its arguments."""
        return bool(self.arguments_mark)
