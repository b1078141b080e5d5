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
