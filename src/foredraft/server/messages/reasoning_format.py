"""Formats of reasoning: how an answer is parsed, and what a grammar allows before the answer itself."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from foredraft.server.messages import harmony
from foredraft.server.messages.harmony import HarmonyParser
from foredraft.server.messages.lark_writer import LarkWriter
from foredraft.server.messages.parser import MessageParser
from foredraft.server.messages.thinking import ThinkParser


class ReasoningStart(Enum):
    """Place of an output's first token."""

    BEFORE = "before"  # the output may begin with reasoning
    INSIDE = "inside"  # the prompt has opened the reasoning
    AFTER = "after"  # the prompt has closed it


class ReasoningFormat(Protocol):
    """Reasoning of one family of chat templates."""

    @property
    def name(self) -> str:
        """Name in --reasoning-parser."""

    @property
    def template_signs(self) -> tuple[str, ...]:
        """Texts of which one is in every chat template of the family."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Control tokens that the parser must see in the text."""

    @property
    def has_channels(self) -> bool:
        """Whether every text of an answer has a channel, so that its calls have the same format."""

    def find_start(self, prompt: str) -> ReasoningStart:
        """Find where the output after this prompt begins."""

    def make_parser(self, inner: MessageParser, start: ReasoningStart) -> MessageParser:
        """Make a parser of the reasoning, which gives the other text to `inner`."""

    def write_prefix(self, writer: LarkWriter, start: ReasoningStart) -> str:
        """Write the rules of the text before an answer. Returns its expression."""

    def write_content_mark(self, writer: LarkWriter) -> str:
        """Write the rules of the marks between reasoning and content. Returns their expression."""


@dataclass(frozen=True)
class ThinkFormat:
    """Reasoning between two marks."""

    name: str
    opening: str
    closing: str
    has_channels: bool = False

    @property
    def template_signs(self) -> tuple[str, ...]:
        return self.opening, self.closing

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def find_start(self, prompt: str) -> ReasoningStart:
        text = prompt.rstrip()
        if text.endswith(self.opening):
            return ReasoningStart.INSIDE
        return ReasoningStart.AFTER if text.endswith(self.closing) else ReasoningStart.BEFORE

    def make_parser(self, inner: MessageParser, start: ReasoningStart) -> MessageParser:
        return ThinkParser(inner, self.opening, self.closing, start is ReasoningStart.INSIDE)

    def write_prefix(self, writer: LarkWriter, start: ReasoningStart) -> str:
        if start is ReasoningStart.AFTER:
            return ""
        rest = rf"{writer.spell_until(self.closing)} /\n{{0,2}}/"
        return rest if start is ReasoningStart.INSIDE else f"({writer.spell(self.opening)} {rest})?"

    def write_content_mark(self, writer: LarkWriter) -> str:
        return ""


@dataclass(frozen=True)
class HarmonyReasoning:
    """Analysis channel of harmony, and messages of the commentary channel."""

    name: str = "harmony"
    template_signs: tuple[str, ...] = (harmony.CHANNEL,)
    tokens: tuple[str, ...] = harmony.TOKENS
    has_channels: bool = True

    def find_start(self, prompt: str) -> ReasoningStart:
        return ReasoningStart.BEFORE

    def make_parser(self, inner: MessageParser, start: ReasoningStart) -> MessageParser:
        return inner if isinstance(inner, HarmonyParser) else HarmonyParser(inner)

    def write_prefix(self, writer: LarkWriter, start: ReasoningStart) -> str:
        channel, message, begin = (writer.spell(mark) for mark in (harmony.CHANNEL, harmony.MESSAGE, harmony.START))
        body = f'("analysis" | "commentary") {message} {writer.spell_until("<|end|>")}'
        return f'({channel} {body} {begin} "assistant"){{0,4}}'

    def write_content_mark(self, writer: LarkWriter) -> str:
        return f'{writer.spell(harmony.CHANNEL)} "final" {writer.spell(harmony.MESSAGE)}'
