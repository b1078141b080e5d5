"""Formats of tool calls: how an answer is parsed, and which grammar enforces its calls."""

from dataclasses import dataclass
from typing import Protocol

from foredraft.server.messages.call_parser import CallParser
from foredraft.server.messages.call_syntax import CallSyntax
from foredraft.server.messages.lark_writer import LarkWriter, quote
from foredraft.server.messages.parser import CallNumbering, MessageParser
from foredraft.server.messages.tools import Tool, ToolUse

NO_JSON = r"/[^{\[\s](.|\n)*/"  # text that does not begin as a call
MAX_CALLS = 16  # calls of one answer under a grammar, because a small model may repeat them without end


class CallFormat(Protocol):
    """Tool calls of one family of chat templates."""

    @property
    def name(self) -> str:
        """Name in --tool-call-parser."""

    @property
    def template_signs(self) -> tuple[str, ...]:
        """Texts of which one is in every chat template of the family."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Control tokens that the parser must see in the text."""

    @property
    def has_channels(self) -> bool:
        """Whether every text of an answer has a channel, so that its reasoning has the same format."""

    def make_parser(self, numbering: CallNumbering) -> MessageParser:
        """Make the parser of content and calls."""

    def write_calls(self, writer: LarkWriter, use: ToolUse) -> str:
        """Write the rules of an answer that calls tools. Returns its expression."""

    def write_answer(self, writer: LarkWriter, use: ToolUse) -> str:
        """Write the rules of an answer whose calls, if it has any, follow their schemas. Returns its expression."""


@dataclass(frozen=True)
class JsonCallFormat:
    """Format with calls in JSON."""

    name: str
    template_signs: tuple[str, ...]
    syntax: CallSyntax
    tokens: tuple[str, ...] = ()
    arguments_key: str = "arguments"
    has_lists: bool = False  # several calls are a list, not calls one after the other
    takes_several: bool = True  # an answer may have several calls
    line_break: str = ""  # between the marks and the call
    has_channels: bool = False

    def make_parser(self, numbering: CallNumbering) -> MessageParser:
        return CallParser(self.syntax, numbering)

    def write_calls(self, writer: LarkWriter, use: ToolUse) -> str:
        opening = "" if self.syntax.is_leading else writer.spell(self.syntax.opening)
        return self._write_group(writer, use, opening)

    def write_answer(self, writer: LarkWriter, use: ToolUse) -> str:
        if self.syntax.is_leading:
            text = writer.spell_without(self.syntax.opening, NO_JSON)
            return f"({self._write_group(writer, use, '')} | {text})?"
        first = writer.add_rule(self._write_group(writer, use, writer.spell_until(self.syntax.opening)))
        return f"{first}? {writer.spell_without(self.syntax.opening)}"

    def _write_group(self, writer: LarkWriter, use: ToolUse, opening: str) -> str:
        """Write a call with its marks, or several where the format joins them."""
        call = writer.add_rule(" | ".join(self._write_call(writer, tool) for tool in use.tools))
        closing = writer.spell(self.syntax.closing) if self.syntax.closing and opening else ""
        has_several = use.is_parallel and self.takes_several
        if self.has_lists:
            more = f' (", " {call}){{0,{MAX_CALLS - 1}}}' if has_several else ""
            calls = f'"[" {call}{more} "]"' if has_several or opening else call
            return f"{opening} {calls}"
        break_ = quote(self.line_break) if self.line_break else ""
        one = writer.add_rule(f"{opening} {break_} {call} {break_} {closing}")
        return f"{one} ({break_} {one}){{0,{MAX_CALLS - 1}}}" if has_several else one

    def _write_call(self, writer: LarkWriter, tool: Tool) -> str:
        arguments = writer.add_schema(tool.schema)
        head = f'{{"name": "{tool.name}", "{self.arguments_key}": '
        return f'{quote(head)} {arguments} "}}"'


@dataclass(frozen=True)
class NamedCallFormat(JsonCallFormat):
    """Format with calls that are a name and its arguments."""

    def _write_call(self, writer: LarkWriter, tool: Tool) -> str:
        return f"{quote(tool.name)} {writer.spell(self.syntax.arguments_mark)} {writer.add_schema(tool.schema)}"
