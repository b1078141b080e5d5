"""Parsers of tool calls and reasoning: outputs of every family, text that only looks like a call, and any cuts.

The texts follow the formats' public documentation. Guards against events that depend on how the text is cut, calls of
tools that do not exist, lost text, and white space around calls.
"""

import itertools
import random
from dataclasses import dataclass

import pytest

from foredraft.errors import ForedraftError
from foredraft.server.messages.assistant_message import AssistantMessage
from foredraft.server.messages.dialect import Dialect
from foredraft.server.messages.events import ArgumentsPiece, CallStart
from foredraft.server.messages.reasoning_format import ReasoningStart
from foredraft.server.messages.tools import NO_TOOLS, Tool, ToolUse

BEFORE, INSIDE = ReasoningStart.BEFORE, ReasoningStart.INSIDE
WEATHER, SUM = Tool("get_weather", "weather"), Tool("sum-up", "adds")
TOOLS = ToolUse((WEATHER, SUM))
PARIS = '{"city": "Paris \\"é\\" {", "days": [1, {"a": 2}]}'
Calls = list[tuple[str, str]]


@dataclass(frozen=True)
class Case:
    """Output of a model, and the message that it is."""

    calls_format: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    reasoning_format: str = "none"
    is_open: bool = False


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony(text: str, content: str = "", calls: tuple[tuple[str, str], ...] = (), reasoning: str = "") -> Case:
    return Case("harmony", text, content, calls, reasoning, "harmony")


ONE, BOTH = (("get_weather", PARIS),), (("get_weather", PARIS), ("sum-up", "{}"))
ANALYSIS = "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + PARIS
LIST = f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "sum-up", "arguments": {{}}}}]'
ONE_JSON = f'{{"name": "get_weather", "arguments": {PARIS}}}'
CASES = [
    Case("hermes", hermes("get_weather", PARIS), "", ONE),
    Case("hermes", f"I look.\n\n{hermes('get_weather', PARIS)}\n{hermes('sum-up', '{}')}\n", "I look.", BOTH),
    Case("hermes", hermes("get_weather", PARIS) + " Done. ", "Done. ", ONE),
    Case("hermes", f'<tool_call>{{"arguments": {PARIS}, "id": [1], "name": "get_weather"}}', "", ONE),
    Case("hermes", '<tool_call>{"name": "sum-up"}</tool_call>', "", (("sum-up", "{}"),)),
    Case("hermes", '<tool_call>{"name":"sum-up","arguments":"{\\"a\\":1}"}</tool_call>', "", (("sum-up", '{"a":1}'),)),
    Case("hermes", '<tool_call>{"name": "sum-up", "arguments": {"a": 1', "", (("sum-up", '{"a": 1'),)),
    Case("mistral", f"[TOOL_CALLS]{LIST}", "", BOTH),
    Case("mistral", f"Let me see. [TOOL_CALLS] {LIST}", "Let me see.", BOTH),
    Case("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]sum-up[ARGS]{{}}", "", BOTH),
    Case("mistral-args", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}", "", ONE),
    Case("mistral-args", f"[TOOL_CALLS]get_weather{PARIS}", "", ONE),
    Case("llama3", f'{{"name": "get_weather", "parameters": {PARIS}}}', "", ONE),
    Case("llama3", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}', "", ONE),
    Case("llama3", f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "sum-up", "parameters": {{}}}}', "",
         BOTH),
    Case("json", ONE_JSON, "", ONE),
    Case("json", f"\n{LIST}\n", "", BOTH),
    Case("json", f"Sure:\n```json\n{ONE_JSON}\n```", "Sure:", ONE),
    harmony(ANALYSIS + CALL, "", ONE, "Need weather."),
    harmony("<|channel|>final<|message|>It is sunny.", "It is sunny."),
    harmony(ANALYSIS + "<|channel|>final<|message|>Sunny.", "Sunny.", (), "Need weather."),
    harmony("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, "I look.", ONE),
    harmony("<|start|>assistant to=functions.sum-up<|channel|>commentary json<|message|>{}", "", (("sum-up", "{}"),)),
    harmony(CALL + "<|call|><|start|>assistant<|channel|>commentary to=functions.sum-up<|message|><|call|>", "", BOTH),
    Case("hermes", "<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Yes.", (), "Hm, 1 < 2.", "think"),
    Case("hermes", f"Hm.\n</think>\n\n{hermes('sum-up', '{}')}", "", (("sum-up", "{}"),), "Hm.", "think", True),
    Case("hermes", "Yes. <think>no</think>", "Yes. <think>no</think>", (), "", "think"),
    Case("hermes", "<think>cut", "", (), "cut", "think"),
    Case("mistral", f"[THINK]Hm.[/THINK][TOOL_CALLS]{LIST}", "", BOTH, "Hm.", "mistral"),
]  # fmt: skip
# Text that only looks like a call is content, whole.
PROSE = [
    ("hermes", "Use <tool_call> and </tool_call>."),
    ("hermes", "a <tool_cal"),
    ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "sum-up", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "sum-up", '),
    ("mistral", "[TOOL_CALLS]of course, {x}"),
    ("mistral", '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
    ("mistral", "see [1] and [TOOL"),
    ("llama3", '{"name": "Bob", "age": 3}'),
    ("llama3", "{not json}"),
    ("llama3", 'The call is {"name": "get_weather", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("json", '[{"name": "get_weather", "parameters": 3}]'),
    ("json", "[1, 2]"),
    ("json", '```json\n{"a": 1}\n``` is JSON'),
    ("json", "  two spaces before, and after  "),
]


def parse(case: Case, pieces: list[str], use: ToolUse = TOOLS) -> tuple[str, str, Calls]:
    dialect = Dialect.from_template(None, {}, case.calls_format, case.reasoning_format)
    ids = map("id{}".format, itertools.count())
    parser = dialect.make_parser(use, INSIDE if case.is_open else BEFORE, lambda: next(ids))
    assert parser is not None
    message, started = AssistantMessage(), 0
    for events in [*map(parser.push, pieces), parser.finish()]:
        for event in events:
            if isinstance(event, CallStart):
                assert event.index == started
                started += 1
            if isinstance(event, ArgumentsPiece):
                assert event.index == started - 1
                assert event.text
        message.add(events)
    assert [call.id for call in message.tool_calls] == [f"id{i}" for i in range(started)]
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


def cut(text: str, rng: random.Random) -> list[str]:
    """Cut a text at random places; few, or many, or everywhere."""
    share = rng.choice((0.02, 0.2, 0.6, 1.0))
    places = [0, *(i for i in range(1, len(text)) if rng.random() < share), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.calls_format}: {case.text[:40]}")
def test_an_output_is_its_message_whatever_its_cuts(case: Case):
    expected = case.reasoning, case.content, list(case.calls)
    assert parse(case, [case.text]) == expected
    rng = random.Random(case.text)
    for _ in range(40):
        assert parse(case, cut(case.text, rng)) == expected


@pytest.mark.parametrize(("name", "text"), PROSE)
def test_text_that_only_looks_like_a_call_is_content(name: str, text: str):
    rng = random.Random(text)
    for pieces in [[text], *(cut(text, rng) for _ in range(40))]:
        assert parse(Case(name, text), pieces) == ("", text, [])


MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```json", "```", "<think>",
    "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "analysis", "final", "commentary",
    " to=functions.sum-up", "{", "}", "[", "]", '"name": ', '"sum-up"', '"arguments": ', '"', ":", ",", ";", " ", "\n",
    "x", "\\", "{}", ONE_JSON, hermes("sum-up", "{}"), "sum-up", "<tool", "<", "12",
]  # fmt: skip
FORMATS = [
    ("hermes", "think"), ("hermes", "none"), ("mistral", "mistral"), ("llama3", "none"), ("json", "think"),
    ("harmony", "harmony"), ("mistral-args", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("calls_format", "reasoning_format"), FORMATS)
def test_random_texts_have_one_meaning_for_all_cuts(calls_format: str, reasoning_format: str):
    """Also guards against text that is lost: without harmony, all that is not in a call or a mark is somewhere."""
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice(MARKS) for _ in range(rng.randint(1, 14)))
        case = Case(calls_format, text, reasoning_format=reasoning_format, is_open=rng.random() < 0.3)
        whole = parse(case, [text])
        for _ in range(3):
            assert parse(case, cut(text, rng)) == whole, text
        if calls_format != "harmony" and not whole[2]:
            said = "".join((whole[0] + whole[1]).split())
            marks = ("<think>", "</think>", "[THINK]", "[/THINK]")
            assert len(said) >= len("".join(text.split())) - sum(map(len, marks))


def test_arguments_stream_before_they_are_complete():
    parser = Dialect.from_template(None, {}, "hermes").make_parser(TOOLS, BEFORE)
    assert parser is not None
    assert parser.push('<tool_call>{"name": "sum-up", "arguments": ') == []
    first, piece = parser.push('{"a": ')
    assert isinstance(first, CallStart)
    assert piece == ArgumentsPiece(0, '{"a": ')
    assert parser.push('"xy') == [ArgumentsPiece(0, '"xy')]
    assert parser.push('"}}') == [ArgumentsPiece(0, '"}')]


def test_a_text_without_tools_and_reasoning_needs_no_parser():
    assert Dialect.from_template(None, {}).make_parser(NO_TOOLS, BEFORE) is None
    thinking = Case("json", "<think>a</think>{}", reasoning_format="think")
    assert parse(thinking, [thinking.text], NO_TOOLS) == ("a", "{}", [])


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ '<|channel|>' }}", "harmony", "harmony"),
        ("[TOOL_CALLS]{{ x }}[ARGS]", "mistral-args", None),
        ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
        ("<tool_call> <think>", "hermes", "think"),
        ("<|start_header_id|>", "llama3", None),
        ("{{ tools }}", "json", None),
        (None, "json", None),
    ],
)
def test_the_template_chooses_the_formats(template: str | None, calls: str, reasoning: str | None):
    dialect = Dialect.from_template(template, {})
    assert dialect.calls.name == calls
    assert (dialect.reasoning.name if dialect.reasoning else None) == reasoning


@pytest.mark.parametrize(
    ("calls", "reasoning"), [("x", "auto"), ("auto", "x"), ("harmony", "think"), ("hermes", "harmony")]
)
def test_formats_that_do_not_exist_or_go_together_are_refused(calls: str, reasoning: str):
    with pytest.raises(ForedraftError, match="parser"):
        Dialect.from_template("", {}, calls, reasoning)
