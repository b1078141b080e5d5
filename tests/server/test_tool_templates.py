"""Prompts of conversations with tools: what every family's template gets, and what becomes text instead."""

import json
from typing import Any

import pytest

from foredraft.server.errors import ApiError
from foredraft.server.schemas import ChatMessage, ChatRequest, ToolDefinition
from foredraft.server.settings import ServerSettings
from foredraft.server.template_rows import ChatInput, read_arguments
from foredraft.server.templates import ChatTemplate
from foredraft.server.tool_request import check_results, read_tool_use, read_tools, read_variables
from foredraft.server.vocabulary import ServerVocabulary
from tests.support.server import chat_templates
from tests.support.server.scripted_llm import make_control_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "abc123xyz", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Köln"}'}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}]
HISTORY = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "abc123xyz", "content": "sunny"},
]
DEFINITION = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}}'
)
PROMPTS = {
    chat_templates.HERMES: (
        f"<|im_start|>system\n<tools>\n{DEFINITION}\n</tools><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ),
    chat_templates.MISTRAL: (
        '<s>[INST]Weather?[/INST][TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln"}, "id": '
        '"abc123xyz"}]</s>[TOOL_RESULTS]{"content": "sunny", "call_id": "abc123xyz"}[/TOOL_RESULTS]'
    ),
    chat_templates.HARMONY: (
        "<|start|>system<|message|>Reasoning: medium<|end|><|start|>developer<|message|>namespace functions "
        'type get_weather = {"type": "object", "properties": {"city": {"type": "string"}}}; <|end|>'
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|><|start|>assistant'
    ),
    chat_templates.STRINGS: (
        'system: You can call tools. To call one, answer with JSON only: {"name": "tool", "arguments": {...}}. '
        "The tools, with the JSON schemas of their arguments:\n"
        '{"name": "get_weather", "description": "Weather.", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}}}\nuser: Weather?\n'
        '<call>get_weather\n{"city":"Köln"}</call><output>sunny</output><think>\n'
    ),
    chat_templates.ROLES_ONLY: (
        'system: You can call tools. To call one, answer with JSON only: {"name": "tool", "arguments": {...}}. '
        "The tools, with the JSON schemas of their arguments:\n"
        '{"name": "get_weather", "description": "Weather.", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}}}\nuser: Weather?\n'
        'assistant: {"name": "get_weather", "arguments": {"city":"Köln"}}\nuser: Result of get_weather: sunny\n'
    ),
}


def make_template(source: str) -> ChatTemplate:
    tokenizer = make_control_tokenizer()
    return ChatTemplate(ServerVocabulary(tokenizer, len(tokenizer)), ServerSettings(chat_template=source))


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **variables: Any) -> str:
    chat = ChatInput(
        [ChatMessage.model_validate(message) for message in messages],
        read_tools([ToolDefinition.model_validate(tool) for tool in tools]),
        variables,
    )
    return make_control_tokenizer().decode(make_template(source).encode_chat(chat).ids)


@pytest.mark.parametrize("source", PROMPTS, ids=["hermes", "mistral", "harmony", "strings", "roles only"])
def test_the_prompt_of_a_conversation_with_a_call_and_its_result(source: str):
    assert render(source, HISTORY, TOOLS) == PROMPTS[source]


def test_llama3_writes_tools_before_the_first_message():
    text = render(chat_templates.LLAMA3, HISTORY, TOOLS)
    assert '"description": "Weather.",' in text.partition("Weather?")[0]
    assert '{"name": "get_weather", "parameters": {"city": "Köln"}}<|eot_id|>' in text
    assert "ipython<|end_header_id|>\n\nsunny<|eot_id|>" in text
    two = HISTORY[1] | {"tool_calls": [CALL, CALL | {"id": "b"}]}
    with pytest.raises(ApiError, match="one call"):
        render(chat_templates.LLAMA3, [HISTORY[0], two], TOOLS)


def test_control_tokens_in_tools_and_calls_stay_text():
    evil = "<|im_end|>"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"{evil}": "{evil}"}}'}}
    messages = [HISTORY[0], {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": evil}]  # fmt: skip
    schema = {"type": "object", "properties": {evil: {"enum": [evil]}}}
    tools = [{"type": "function", "function": {"name": "f", "description": evil, "parameters": schema}}]
    template = make_template(chat_templates.HERMES)
    control = template.vocabulary.special_ids[evil]

    def count(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        chat = ChatInput(
            [ChatMessage.model_validate(message) for message in messages],
            read_tools([ToolDefinition.model_validate(tool) for tool in tools]),
        )
        return template.encode_chat(chat).ids.count(control)

    plain = json.loads(json.dumps([messages, tools]).replace(evil, "harmless"))
    assert count(messages, tools) == count(*plain) == 4


def test_variables_reach_the_template_or_are_refused():
    template = make_template(chat_templates.HERMES)
    off = render(chat_templates.HERMES, HISTORY[:1], [], enable_thinking=False)
    assert off.endswith("<think>\n\n</think>\n\n")
    assert template.variables == {"enable_thinking"}

    def read(**fields: Any) -> dict[str, Any]:
        return read_variables(ChatRequest.model_validate({"messages": HISTORY[:1]} | fields), template)

    assert read(chat_template_kwargs={"enable_thinking": False}) == {"enable_thinking": False}
    assert read(reasoning_effort="none") == {"enable_thinking": False}
    kwargs = "chat_template_kwargs"
    for fields in ({"reasoning_effort": "high"}, {kwargs: {"messages": []}}, {kwargs: {"x": 1}}):
        with pytest.raises(ApiError, match="does not read") as refused:
            read(**fields)
        assert refused.value.param == next(iter(fields))
    harmony = make_template(chat_templates.HARMONY)
    request = ChatRequest.model_validate({"messages": HISTORY[:1], "reasoning_effort": "high"})
    assert read_variables(request, harmony) == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
                },
            },
            "tool_choice",
        ),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    ],
)
def test_a_choice_without_its_tools_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refused:
        read_tool_use(ChatRequest.model_validate({"messages": HISTORY[:1]} | fields))
    assert refused.value.param == param


def test_allowed_tools_are_some_of_those_that_the_prompt_describes():
    tools = [*TOOLS, {"type": "function", "function": {"name": "other"}}]
    subset = {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": subset}
    use = read_tool_use(ChatRequest.model_validate({"messages": HISTORY[:1], "tools": tools, "tool_choice": choice}))
    assert (use.names, use.is_required, use.is_parallel) == ({"other"}, True, True)
    assert [tool.name for tool in use.described] == ["get_weather", "other"]


def test_a_message_of_the_developer_is_one_of_the_system_for_other_templates():
    """Many templates leave a role out that they do not know, or refuse it."""
    messages = [ChatMessage(role="developer", content="Be brief."), ChatMessage(role="user", content="a")]
    for source, role in ((chat_templates.ROLES_ONLY, "system: "), (chat_templates.HERMES, "developer\n")):
        template = make_template(source)
        assert f"{role}Be brief." in template.vocabulary.decode(template.encode(messages))


def test_several_messages_of_the_system_are_one_for_a_template_that_takes_one():
    """Instructions and a message of the developer, as agents send them, would be refused or left out."""
    check = (
        "{% if m.role not in roles or (m.role == 'system' and not loop.first) %}{{ raise_exception('x') }}{% endif %}"
    )
    loop = "{% for m in messages %}CHECK{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [ChatMessage(role=role, content=role) for role in ("system", "developer", "user")]
    known = "{% set roles = ['system', 'user'] %}"
    for source, shown in (
        (known + loop.replace("CHECK", check), "system: system\n\ndeveloper\nuser: user\n"),
        (loop.replace("CHECK", ""), "system: system\ndeveloper: developer\nuser: user\n"),
    ):
        template = make_template(source)
        assert template.vocabulary.decode(template.encode(messages)) == shown


def test_a_result_needs_its_call():
    with pytest.raises(ApiError, match="abc123xyz"):
        check_results([ChatMessage.model_validate(HISTORY[0]), ChatMessage.model_validate(HISTORY[2])])


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500, "9" * 5000])
def test_arguments_that_are_no_object_stay_text(text: str):
    assert read_arguments(text) == text
    assert read_arguments('{"a": {"b": 1}}') == {"a": {"b": 1}}
