"""Random tools, and answers that must call them: parsed, checked against their schemas, with drafts and without."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft import LLM, RequestOptions, Sampling
from foredraft.server.messages.assistant_message import AssistantMessage
from foredraft.server.messages.dialect import Dialect
from foredraft.server.messages.reasoning_format import ReasoningStart
from foredraft.server.messages.tools import Tool, ToolUse
from tests.support.grammar_cases import make_schema, matches_schema

FORMATS = ("hermes", "mistral", "mistral-args", "llama3", "json", "harmony")
MAX_TOKENS = 1900  # room for as many calls as a grammar allows


def write_answers(llm: LLM, uses: Sequence["RandomUse"]) -> list[str]:
    """Return the text that a model writes for each of the uses, in one batch."""
    prompts = [llm.tokenizer(f"the end {use.seed}").input_ids for use in uses]
    options = [RequestOptions(shown_tokens=use.dialect.list_shown_tokens(use.use)) for use in uses]
    return [done.text for done in llm.generate(prompts, [use.build_sampling() for use in uses], options=options)]


@dataclass(frozen=True)
class RandomUse:
    """Tools of one request, and the format of its answer."""

    seed: int
    dialect: Dialect
    use: ToolUse

    @classmethod
    def from_seed(cls, seed: int, special_ids: dict[str, int]) -> "RandomUse":
        rng = random.Random(seed)
        tools = tuple(Tool(f"tool_{i}", "random", _make_object(rng)) for i in range(rng.randint(1, 3)))
        if is_named := bool(seed % 2):
            tools = (rng.choice(tools),)
        name = FORMATS[seed // 2 % len(FORMATS)]
        reasoning = "harmony" if name == "harmony" else "none"
        dialect = Dialect.from_template(None, special_ids, name, reasoning)
        return cls(seed, dialect, ToolUse(tools, is_required=True, is_parallel=not is_named and seed % 4 == 0))

    def build_sampling(self) -> Sampling:
        grammar = self.dialect.build_grammar(self.use, None, ReasoningStart.BEFORE)
        # Random weights rarely end a text: bodies of harmony end at once.
        bias = {self.dialect.special_ids["<|end|>"]: 100.0}
        temperature = (0.0, 0.8)[self.seed // 12 % 2]
        return Sampling(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=self.seed, grammar=grammar, logit_bias=bias
        )

    def find_fault(self, text: str) -> str | None:
        """Return why the answer is no valid call of the tools; None if it is one."""
        parser = self.dialect.make_parser(self.use, ReasoningStart.BEFORE)
        assert parser is not None
        message = AssistantMessage()
        message.add(parser.push(text))
        message.add(parser.finish())
        if not message.tool_calls or message.content:
            return f"no call alone: {text!r}"
        schemas = {tool.name: tool.parameters for tool in self.use.tools}
        for call in message.tool_calls:
            try:
                value = json.loads(call.arguments)
            except ValueError:
                return f"no JSON: {call.arguments!r}"
            if not matches_schema(value, dict(schemas[call.name] or {})):
                return f"{call.arguments!r} does not match {schemas[call.name]}"
        is_single = not self.use.is_parallel
        return f"{len(message.tool_calls)} calls" if is_single and len(message.tool_calls) > 1 else None


def _make_object(rng: random.Random) -> dict[str, Any]:
    """Make the schema of an object."""
    while True:
        schema = make_schema(rng)
        if schema.get("type") == "object":
            return schema
