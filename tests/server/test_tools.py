"""Tools and reasoning in /v1/chat/completions: the prompt, the answer, its stream, and what an agent does with them.

Guards against streams that differ from the plain answer, control tokens that the parser does not see, results that the
template does not get, and schemas that a required call does not follow.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from foredraft.server.settings import ServerSettings
from tests.support.server import chat_templates
from tests.support.server.live_server import NAME, RunningServer, run_server
from tests.support.server.scripted_llm import make_scripted_llm

PATH = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
USER = {"role": "user", "content": "the end?"}
ARGUMENTS = '{"city": "Köln"}'
CALL = {"id": "abc123xyz", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc123xyz", "content": "sunny"},
]
# Family -> template, output with a call, reasoning before it.
FAMILIES = {
    "hermes": (
        chat_templates.THINKING,
        f'Hm.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "Hm.",
    ),
    "llama3": (chat_templates.LLAMA3, f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', ""),
    "mistral": (
        chat_templates.MISTRAL, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', ""
    ),
    "mistral-args": (
        chat_templates.MISTRAL + "{# [ARGS] #}", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", ""
    ),
    "harmony": (
        chat_templates.HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
        "Hm.",
    ),
    "json": (chat_templates.ROLES_ONLY, f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}', ""),
}  # fmt: skip


@contextlib.contextmanager
def serve_scripts(template: str, **settings: Any) -> Iterator[tuple[RunningServer, list[str]]]:
    llm, scripts = make_scripted_llm()
    with run_server(llm, ServerSettings(model_names=(NAME,), chat_template=template, **settings)) as server:
        yield server, scripts


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, RunningServer, list[str]]]:
    with serve_scripts(FAMILIES[request.param][0]) as (server, scripts):
        yield request.param, server, scripts


@pytest.fixture(scope="module")
def hermes() -> Iterator[tuple[RunningServer, list[str]]]:
    with serve_scripts(chat_templates.HERMES) as found:
        yield found


def make_client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def accumulate(client: openai.OpenAI, **body: Any) -> tuple[Any, list[Any]]:
    """Return the choice that the SDK's own helper makes of a stream, and the deltas."""
    deltas = []
    with client.chat.completions.stream(model=NAME, **body) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                deltas.append(event.chunk.choices[0].delta)
        return stream.get_final_completion().choices[0], deltas


def test_a_call_is_parsed_streamed_and_answered(family: tuple[str, RunningServer, list[str]]):
    """Two calls of the model: one calls a tool, the next one reads its result."""
    name, server, scripts = family
    script, reasoning = FAMILIES[name][1:]
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "temperature": 0}
    scripts[:] = [script] * 2
    with make_client(server) as client:
        plain = client.chat.completions.create(model=NAME, **body).choices[0]
        choice, deltas = accumulate(client, **body)
        (call,) = plain.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Köln"})
        assert (plain.finish_reason, plain.message.content) == ("tool_calls", None)
        assert getattr(plain.message, "reasoning_content", "") == reasoning
        (streamed,) = choice.message.tool_calls
        assert (streamed.function.name, streamed.function.arguments) == ("get_weather", call.function.arguments)
        assert choice.finish_reason == "tool_calls"
        started, *pieces = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
        assert (started.id, started.type, started.function.arguments) == (streamed.id, "function", "")
        assert len(pieces) > 1
        assert all(piece.id is None and piece.function.name is None for piece in pieces)
        assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == reasoning
        answered = [plain.message.model_dump(exclude_unset=True)]
        answered.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        final = "<|channel|>final<|message|>Sunny." if name == "harmony" else "Sunny."
        scripts[:] = ["</think>" + final if name == "hermes" else final]
        last = client.chat.completions.create(model=NAME, **body | {"messages": [USER, *answered]}).choices[0]
        assert (last.message.content, last.finish_reason, last.message.tool_calls) == ("Sunny.", "stop", None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_required_call_follows_its_schema(family: tuple[str, RunningServer, list[str]], choice: Any):
    name, server, scripts = family
    scripts.clear()
    asked = {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "temperature": 1.0}
    if name == "hermes":  # the reasoning of random weights has no end
        asked |= {"chat_template_kwargs": {"enable_thinking": False}}
    if name == "harmony":
        asked |= {"logit_bias": {str(server.service.vocabulary.special_ids["<|end|>"]): 100}}
    for seed in range(2):
        body = server.post_ok(PATH, **asked, seed=seed, max_tokens=600, parallel_tool_calls=bool(seed))
        (found,) = body["choices"]
        assert found["finish_reason"] == "tool_calls", found
        for call in found["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            is_weather = call["function"]["name"] == "get_weather" and choice == "required"
            assert set(arguments) == ({"city"} if is_weather else set())


def run_agent(client: openai.OpenAI, functions: dict[str, Any], messages: list[Any], is_streamed: bool) -> list[Any]:
    """Call the model and its tools until it answers, as agents do. Returns the conversation."""
    for _ in range(5):
        body: dict[str, Any] = {"messages": messages, "tools": TOOLS, "temperature": 0}
        if is_streamed:
            message = accumulate(client, **body)[0].message
        else:
            message = client.chat.completions.create(model=NAME, **body).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return messages
        for entry in messages[-1].get("tool_calls", ()):
            entry["function"].pop("parsed_arguments", None)
        for call in message.tool_calls:
            result = functions[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("the agent does not end")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_its_tools_until_the_model_answers(hermes: tuple[RunningServer, list[str]], is_streamed: bool):
    server, scripts = hermes
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    scripts[:] = [f'Both.\n{call}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>', call, "Done."]
    seen: list[str] = []
    functions = {
        "get_weather": lambda city: seen.append(city) or f"sunny in {city}",
        "get_time": lambda: seen.append("time") or "noon",
    }
    with make_client(server) as client:
        messages = run_agent(client, functions, [USER], is_streamed)
    assert seen == ["Köln", "time", "Köln"]
    assert [message["role"] for message in messages] == "user assistant tool tool assistant tool assistant".split()
    assert (messages[1]["content"], messages[-1]["content"]) == ("Both.", "Done.")
    assert scripts == []


def read_stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream, with their deltas joined."""
    found = [{"content": "", "reasoning": "", "calls": {}, "tokens": [], "finish": None} for _ in range(body["n"])]
    for chunk in server.chunks(PATH, **body):
        for choice in chunk["choices"]:
            one, delta = found[choice["index"]], choice["delta"]
            one["content"] += delta.get("content") or ""
            one["reasoning"] += delta.get("reasoning_content") or ""
            one["tokens"] += choice.get("token_ids", [])
            one["finish"] = choice["finish_reason"] or one["finish"]
            for call in delta.get("tool_calls", ()):
                known = one["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
    return found


def test_a_stream_of_several_choices_is_the_plain_answer(family: tuple[str, RunningServer, list[str]]):
    """Random weights under a grammar, with reasoning if the family has some; token ids are those of the answer."""
    name, server, scripts = family
    scripts.clear()
    body = {
        "messages": [USER], "tools": TOOLS, "tool_choice": "required", "seed": 3, "n": 2, "max_tokens": 60,
        "return_token_ids": True, "logprobs": name == "json",
    }  # fmt: skip
    plain = server.post_ok(PATH, **body)["choices"]
    for one, choice in zip(read_stream(server, **body), plain, strict=True):
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert list(one["calls"].values()) == calls
        assert one["content"] == (message["content"] or "")
        assert one["reasoning"] == message.get("reasoning_content", "")
        assert (one["tokens"], one["finish"]) == (choice["token_ids"], choice["finish_reason"])


def test_json_as_the_content_goes_with_tools(family: tuple[str, RunningServer, list[str]]):
    """The answer is JSON of its schema, or calls of the tools. Another grammar, or a required call, excludes that."""
    name, server, scripts = family
    scripts.clear()
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 300}
    if name == "hermes":
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if name == "harmony":
        body["logit_bias"] = {str(server.service.vocabulary.special_ids["<|end|>"]): 100}
    kinds = set()
    for seed in range(6):
        (choice,) = server.post_ok(PATH, **body, response_format=asked, seed=seed, parallel_tool_calls=False)["choices"]
        message = choice["message"]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(message["content"])["ok"], bool)
        else:
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) is not None
    assert kinds <= {"stop", "tool_calls"}
    for extra in ({"regex": "a"}, {"response_format": asked, "tool_choice": "required"}):
        refused = server.post(PATH, body | extra)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(extra)))


def test_strict_tools_constrain_the_calls_of_a_free_answer(hermes: tuple[RunningServer, list[str]]):
    """The script calls with wrong arguments; the grammar leaves it no such token."""
    server, scripts = hermes
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {"town": 1}}\n</tool_call>'
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 200, "seed": 1}
    for tool, is_valid in ((WEATHER, False), (strict, True)):
        scripts[:] = [f"I look. {wrong}"]
        (choice,) = server.post_ok(PATH, **body, tools=[tool])["choices"]
        (call,) = choice["message"]["tool_calls"][:1]
        assert ("city" in call["function"]["arguments"]) == is_valid


def test_one_call_at_most_if_calls_are_not_parallel(hermes: tuple[RunningServer, list[str]]):
    server, scripts = hermes
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for is_parallel in (True, False):
        scripts[:] = [f"{call}\n{call}"]
        body = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": is_parallel, "max_tokens": 200}
        (choice,) = server.post_ok(PATH, **body)["choices"]
        assert len(choice["message"]["tool_calls"]) == (2 if is_parallel else 1)


def test_an_output_that_is_cut_keeps_its_reason(hermes: tuple[RunningServer, list[str]]):
    server, scripts = hermes
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    for extra, reason in (({"max_tokens": 50}, "length"), ({"stop": ["K"]}, "tool_calls")):
        scripts[:] = [call]
        (choice,) = server.post_ok(PATH, messages=[USER], tools=TOOLS, **extra)["choices"]
        assert choice["finish_reason"] == reason
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS[: ARGUMENTS.index("K")] or (
            reason == "length"
        )


def test_reasoning_can_be_left_in_the_content():
    with serve_scripts(chat_templates.THINKING, reasoning_parser="none") as (server, scripts):
        scripts[:] = ["Hm.</think> Yes."]
        assert server.chat("the end")["choices"][0]["message"]["content"] == "Hm.</think> Yes."


def test_json_follows_the_reasoning():
    """The grammar of the content begins after the reasoning that the prompt opens."""
    with serve_scripts(chat_templates.THINKING) as (server, scripts):
        scripts[:] = ['Hm.\n</think>\n{"a": 1}']
        message = server.chat("the end", response_format={"type": "json_object"})["choices"][0]["message"]
        assert (message["reasoning_content"], json.loads(message["content"])) == ("Hm.", {"a": 1})
        scripts[:] = ["yes"]
        message = server.chat("the end", regex="yes|no")["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "yes", "refusal": None}
