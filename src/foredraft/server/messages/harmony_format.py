"""Format of tool calls and reasoning of gpt-oss."""

from dataclasses import dataclass

from foredraft.server.messages import harmony
from foredraft.server.messages.harmony import HarmonyParser
from foredraft.server.messages.lark_writer import ANY_TEXT, LarkWriter, quote
from foredraft.server.messages.parser import CallNumbering, MessageParser, PlainParser
from foredraft.server.messages.tools import ToolUse


@dataclass(frozen=True)
class HarmonyFormat:
    """Harmony as a format of calls. An answer has one call, because <|call|> ends it."""

    name: str = "harmony"
    template_signs: tuple[str, ...] = (harmony.CHANNEL,)
    tokens: tuple[str, ...] = harmony.TOKENS
    has_channels: bool = True

    def make_parser(self, numbering: CallNumbering) -> MessageParser:
        return HarmonyParser(PlainParser(), numbering)

    def write_calls(self, writer: LarkWriter, use: ToolUse) -> str:
        constrain, message = writer.spell(harmony.CONSTRAIN), writer.spell(harmony.MESSAGE)
        calls = [
            f'{quote(tool.name + " ")} {constrain} "json" {message} {writer.add_schema(tool.schema)}'
            for tool in use.tools
        ]
        call = writer.add_rule(" | ".join(calls))
        return f'{writer.spell(harmony.CHANNEL)} "commentary to={harmony.FUNCTIONS}" {call}'

    def write_answer(self, writer: LarkWriter, use: ToolUse) -> str:
        final = f'{writer.spell(harmony.CHANNEL)} "final" {writer.spell(harmony.MESSAGE)} {ANY_TEXT}'
        return f"{writer.add_rule(self.write_calls(writer, use))} | {final}"
