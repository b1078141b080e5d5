"""Tools of a request, and which of them the answer may or must call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# OpenAI: a function without `parameters` takes none.
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """Function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON schema of its arguments; None = it takes none
    is_strict: bool = False  # its arguments must follow the schema, even if no call is required

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments, which are an object."""
        return {"type": "object"} | dict(NO_PARAMETERS if self.parameters is None else self.parameters)

    def to_row(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.schema}}


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may call."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False  # the answer must call one of them
    is_parallel: bool = True  # it may call several
    offered: tuple[Tool, ...] = ()  # tools that the prompt describes; () = those above

    @property
    def described(self) -> tuple[Tool, ...]:
        """Tools that the prompt describes."""
        return self.offered or self.tools

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of a tool must follow its schema."""
        return any(tool.is_strict for tool in self.tools)


NO_TOOLS = ToolUse()
