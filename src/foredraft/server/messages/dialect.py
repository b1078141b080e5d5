"""Dialect of one model: the formats of its tool calls and of its reasoning."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foredraft.errors import ForedraftError
from foredraft.sampling.grammar import Grammar
from foredraft.server.messages.call_format import CallFormat
from foredraft.server.messages.formats import AUTO, NONE, find_call_format, find_reasoning_format
from foredraft.server.messages.lark_writer import LarkWriter
from foredraft.server.messages.parser import CallNumbering, MessageParser, PlainParser, make_call_id
from foredraft.server.messages.reasoning_format import ReasoningFormat, ReasoningStart
from foredraft.server.messages.tools import ToolUse

JSON_KINDS = ("json_schema", "json_object")


@dataclass(frozen=True)
class Dialect:
    """Formats in which a model writes calls and reasoning."""

    calls: CallFormat
    reasoning: ReasoningFormat | None
    special_ids: Mapping[str, int]  # control tokens of the vocabulary

    @classmethod
    def from_template(
        cls, template: str | None, special_ids: Mapping[str, int], calls: str = AUTO, reasoning: str = AUTO
    ) -> "Dialect":
        """Choose the formats by name, or by the source of the chat template.

        Raises:
            ForedraftError: there is no such format, or the two do not go together.
        """
        calls_format, reasoning_format = find_call_format(calls, template), find_reasoning_format(reasoning, template)
        has_channels = reasoning_format is not None and reasoning_format.has_channels
        if calls_format.has_channels != has_channels:
            raise ForedraftError(
                f"the tool-call parser {calls_format.name} does not go with the reasoning parser "
                f"{NONE if reasoning_format is None else reasoning_format.name}; leave both to auto"
            )
        return cls(calls_format, reasoning_format, special_ids)

    def find_start(self, prompt: str, own: Grammar | None = None) -> ReasoningStart:
        """Find where an output begins.

        Args:
            prompt: text of the prompt, or its end.
            own: grammar of the content. Before a grammar that is not for JSON there is no reasoning.
        """
        if self.reasoning is None or (own is not None and own.kind not in JSON_KINDS):
            return ReasoningStart.AFTER
        return self.reasoning.find_start(prompt)

    def list_shown_tokens(self, use: ToolUse) -> tuple[int, ...]:
        """List the control tokens whose text the parser needs."""
        marks = set(() if self.reasoning is None else self.reasoning.tokens)
        marks |= set(self.calls.tokens if use.tools else ())
        return tuple(sorted(self.special_ids[mark] for mark in marks if mark in self.special_ids))

    def make_parser(
        self, use: ToolUse, start: ReasoningStart, make_id: Callable[[], str] = make_call_id
    ) -> MessageParser | None:
        """Make the parser of one answer; None if all of its text is content.

        Args:
            use: tools that the answer may call.
            start: place of the output's first token.
            make_id: function that makes the id of a call.
        """
        if not use.tools and self.reasoning is None:
            return None
        numbering = CallNumbering(use.names, make_id)
        parser: MessageParser = self.calls.make_parser(numbering) if use.tools else PlainParser()
        return parser if self.reasoning is None else self.reasoning.make_parser(parser, start)

    def needs_grammar(self, use: ToolUse) -> bool:
        """Whether the calls of an answer are enforced."""
        return bool(use.tools) and (use.is_required or use.is_strict or not use.is_parallel)

    def build_grammar(self, use: ToolUse, own: Grammar | None, start: ReasoningStart) -> Grammar | None:
        """Build the grammar of an answer; None if every text is allowed.

        Args:
            use: tools that the answer may or must call.
            own: grammar of the content, which the request sets itself.
            start: place of the output's first token.

        Raises:
            ForedraftError: the grammars exclude each other, or the schema of a tool cannot be used.
        """
        if own is not None and not self._can_combine(use, own):
            return own
        if own is None and not self.needs_grammar(use):
            return None
        writer = LarkWriter(self.special_ids)
        prefix = "" if self.reasoning is None else self.reasoning.write_prefix(writer, start)
        if own is not None:
            mark = "" if self.reasoning is None else self.reasoning.write_content_mark(writer)
            answer = f"{mark} {writer.add_schema(json.loads(own.source or _ANY_OBJECT))}"
            answer += f" | {self.calls.write_calls(writer, use)}" if use.tools else ""
        else:
            write = self.calls.write_calls if use.is_required else self.calls.write_answer
            answer = write(writer, use)
        return writer.build(f"{prefix} ({answer})")

    def _can_combine(self, use: ToolUse, own: Grammar) -> bool:
        """Whether reasoning or calls may stand beside the grammar of the content. Raises ForedraftError."""
        if use.tools and use.is_required:
            raise ForedraftError("an answer that must call a tool has no content for another grammar; leave one out")
        is_json = own.kind in JSON_KINDS
        if use.tools and not is_json:
            raise ForedraftError(f"tools go with JSON as the content, not with a {own.kind} grammar; leave one out")
        return is_json and (bool(use.tools) or self.reasoning is not None)


_ANY_OBJECT = '{"type": "object"}'
