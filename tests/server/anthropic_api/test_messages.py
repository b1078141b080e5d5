"""/v1/messages by its exact JSON: blocks, events, stop reasons, usage, and errors in its own format.

Guards against streams that differ from the plain answer, fields that reach no prompt, and errors of another format.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foredraft.server.anthropic_api.output_blocks import parse_input
from foredraft.server.settings import ServerSettings
from tests.support.server import chat_templates
from tests.support.server.live_server import NAME, PLAIN_HTTP, RunningServer, run_server
from tests.support.server.scripted_llm import make_scripted_llm

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
KEY = "sk-messages"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather.", "input_schema": CITY}
LONG = "mcp__" + "t" * 100
TIME = {"type": "custom", "name": LONG, "input_schema": {"type": "object", "additionalProperties": False}}
USER = {"role": "user", "content": "the end?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
BODY: dict[str, Any] = {"model": NAME, "max_tokens": 300, "messages": [USER], "temperature": 0}


@pytest.fixture(scope="module")
def thinking() -> Iterator[tuple[RunningServer, list[str]]]:
    """A template with calls, reasoning and its switch; a server with a key."""
    llm, scripts = make_scripted_llm()
    settings = ServerSettings(model_names=(NAME,), chat_template=chat_templates.THINKING, api_key=KEY)
    with run_server(llm, settings) as server:
        server.headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
        yield server, scripts


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[RunningServer, list[str]]]:
    llm, scripts = make_scripted_llm()
    settings = ServerSettings(model_names=(NAME,), chat_template=chat_templates.ROLES_ONLY)
    with run_server(llm, settings) as server:
        yield server, scripts


def ask(server: RunningServer, path: str = PATH, **fields: Any) -> dict[str, Any]:
    body = BODY | fields if path == PATH else {"messages": [USER]} | fields
    answer = server.post(path, body, headers=server.headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refuse(server: RunningServer, path: str = PATH, **fields: Any) -> tuple[int, str, str]:
    """Return status, type and message of an error."""
    answer = server.post(path, BODY | fields, headers=server.headers)
    body = answer.json()
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def read_events(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; the name of each is its type."""
    body = BODY | {"stream": True} | fields
    with httpx.stream("POST", server.url + PATH, json=body, headers=server.headers, **PLAIN_HTTP) as answer:
        assert answer.status_code == 200
        parts = [part.splitlines() for part in answer.read().decode().split("\n\n") if part.startswith("event: ")]
    events = [json.loads(lines[1].removeprefix("data: ")) for lines in parts]
    assert [lines[0] for lines in parts] == [f"event: {event['type']}" for event in events]
    return events


def join_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the message from a stream, as clients do."""
    message = events[0]["message"]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    texts: dict[int, str] = {}
    for event in events[1:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(message["content"]) == len(texts)
            message["content"].append(event["content_block"])
            texts[index] = ""
        elif event["type"] == "content_block_delta":
            kind, text = event["delta"].values()
            assert {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}[
                message["content"][index]["type"]
            ] == kind
            texts[index] += text
        else:
            assert event == {"type": "content_block_stop", "index": len(texts) - 1}
    for block, text in zip(message["content"], texts.values(), strict=True):
        block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def drop_random(message: dict[str, Any]) -> dict[str, Any]:
    """Drop the ids, and the division of the prompt by the cache, which the first request has filled."""
    usage = message["usage"]
    num_prompt = sum(usage.pop(name) for name in list(usage) if name.endswith("input_tokens"))
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content, "usage": usage | {"prompt": num_prompt}}


def test_thinking_text_and_calls_are_blocks_and_the_stream_is_the_plain_answer(thinking):
    server, scripts = thinking
    scripts[:] = [f"Hm.\n</think>\n\nBoth.\n{CALL}\n{CALL}"] * 2
    body = ask(server, tools=[WEATHER, TIME])
    call = {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln"}}
    ids = [block.pop("id") for block in body["content"] if block["type"] == "tool_use"]
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Both."}, call, call,
    ]  # fmt: skip
    assert len(set(ids)) == 2
    assert (body["type"], body["role"], body["model"], body["stop_reason"]) == (
        "message",
        "assistant",
        NAME,
        "tool_use",
    )
    assert body["stop_sequence"] is None
    usage = dict(body["usage"])
    assert 0 < usage.pop("output_tokens_details")["thinking_tokens"] < usage["output_tokens"]
    assert set(usage) == {
        "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens",
    }  # fmt: skip
    events = read_events(server, tools=[WEATHER, TIME])
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 2
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] > 0
    assert drop_random(join_events(events)) == drop_random(body)


def test_a_conversation_reaches_the_prompt_with_all_of_its_blocks(thinking):
    """Neighbours of one role are one message; a result that is an error says so."""
    server, _ = thinking
    mark = {"type": "ephemeral", "ttl": "1h"}
    use = {"type": "tool_use", "id": "c1", "name": LONG, "input": {"a": "ö"}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "broken"}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": mark}]},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"},
                                          {"type": "text", "text": "Look."}, use]},
        {"role": "user", "content": [result | {"is_error": True}, {"type": "text", "text": "three"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", "cache_control": mark}]
    fields = {"messages": messages, "system": system, "tools": [TIME], "cache_control": mark}
    function = {"name": LONG[:64], "parameters": TIME["input_schema"]}
    call = {"id": "c1", "function": {"name": LONG[:64], "arguments": '{"a": "ö"}'}}
    same = [
        {"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "Look.", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: broken"}, {"role": "user", "content": "three"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": function}]
    answer = server.post("/tokenize", {"messages": same, "tools": tools}, headers=server.headers).json()
    short = json.loads(json.dumps(fields).replace(LONG, LONG[:64]))
    assert ask(server, COUNT, **short) == {"input_tokens": answer["count"]}
    usage = ask(server, **fields, max_tokens=1)["usage"]
    num_prompt = sum(usage[name] for name in usage if name.endswith("input_tokens"))
    assert ask(server, COUNT, **fields) == {"input_tokens": num_prompt}


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"get_weather", LONG}), ({"type": "tool", "name": "get_weather"}, {"get_weather"})],
)
def test_a_required_call_follows_its_schema(plain, choice: dict[str, Any], names: set[str]):
    server, scripts = plain
    scripts.clear()
    for seed in range(2):
        chosen = choice | {"disable_parallel_tool_use": bool(seed)}
        body = ask(server, tools=[WEATHER, TIME], tool_choice=chosen, temperature=1.0, seed=seed, max_tokens=1500)
        assert body["stop_reason"] == "tool_use"
        for block in body["content"]:
            assert (block["type"], block["name"] in names) == ("tool_use", True)
            assert set(block["input"]) == ({"city"} if block["name"] == "get_weather" else set())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ('{"a": [1, "\\u00f6", null]}', {"a": [1, "ö", None]}),
        ('{"a": "b", "c": "Kö', {"a": "b"}),
        ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"INVALID_JSON": '{"a": "\\ud800"}'}),
        ('{"a":' * 99, {"INVALID_JSON": '{"a":' * 99}),
        (f'{{"a": {"1" * 5000}}}', {"INVALID_JSON": f'{{"a": {"1" * 5000}}}'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_the_input_of_a_call_is_json_that_a_body_can_hold(text: str, value: dict[str, Any]):
    assert parse_input(text) == value


def test_every_end_has_its_reason(plain):
    server, scripts = plain
    scripts[:] = ["one two three"] * 2
    body = ask(server, stop_sequences=["x", " two"])
    assert (body["content"], body["stop_reason"], body["stop_sequence"]) == (
        [{"type": "text", "text": "one"}], "stop_sequence", " two",
    )  # fmt: skip
    body = ask(server, stop_sequences=["x"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    num_words = 1950 - ask(server, COUNT)["input_tokens"]
    full = [{"role": "user", "content": "the" + " the" * num_words}]
    end = ask(server, messages=full, max_tokens=2000, ignore_eos=True)
    assert end["stop_reason"] == "model_context_window_exceeded"
    scripts[:] = ['{"name": "get_weather", "arguments": {"city": "Köln"}}'] * 2
    whole = ask(server, tools=[WEATHER])
    scripts[:] = ['{"name": "get_weather", "arguments": {"city": "Köln"}}']
    cut = ask(server, tools=[WEATHER], max_tokens=whole["usage"]["output_tokens"] - 4)
    assert cut["stop_reason"] == "max_tokens"
    assert "Köln".startswith(cut["content"][0]["input"].get("city", ""))
    scripts[:] = ["nothing"]
    assert ask(server, tools=[WEATHER], tool_choice={"type": "none"})["stop_reason"] == "end_turn"


def test_a_last_message_of_the_assistant_is_continued(plain):
    server, scripts = plain
    scripts.clear()
    fields = {"temperature": 0, "max_tokens": 8}
    messages = [USER, {"role": "assistant", "content": "the"}]
    chat = {"messages": messages, "continue_final_message": True} | fields
    expected = server.post_ok("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
    assert ask(server, messages=messages, **fields)["content"] == [{"type": "text", "text": expected}]


def test_json_is_a_format_of_the_answer(plain):
    server, scripts = plain
    scripts.clear()
    asked = {"format": {"type": "json_schema", "schema": CITY}}
    (block,) = ask(server, output_config=asked, temperature=1.0, seed=1)["content"]
    assert set(json.loads(block["text"])) == {"city"}


def test_thinking_is_a_switch_of_the_template_or_refused(thinking, plain):
    server, scripts = thinking
    budget = {"type": "enabled", "budget_tokens": 100}
    for field, script, kinds in (
        (budget, "Hm.</think>Yes.", ["thinking", "text"]),
        ({"type": "adaptive"}, "Hm.</think>Yes.", ["thinking", "text"]),
        ({"type": "disabled"}, "Yes.", ["text"]),
    ):
        scripts[:] = [script]
        assert [block["type"] for block in ask(server, thinking=field)["content"]] == kinds
    assert ask(server, COUNT, thinking={"type": "disabled"}) != ask(server, COUNT, thinking=budget)
    assert "less than max_tokens" in refuse(server, thinking=budget | {"budget_tokens": 300})[2]
    server, scripts = plain
    scripts[:] = ["Yes."]
    assert ask(server, thinking={"type": "disabled"})["content"] == [{"type": "text", "text": "Yes."}]
    assert refuse(server, thinking=budget)[2].startswith("thinking: this model has no reasoning")


def test_a_template_that_always_reasons_cannot_be_stopped():
    llm, _ = make_scripted_llm()
    settings = ServerSettings(model_names=(NAME,), chat_template=chat_templates.STRINGS)
    with run_server(llm, settings) as server:
        assert refuse(server, thinking={"type": "disabled"})[2].startswith("thinking: the chat template")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "no image is fetched"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "of the user"),
        ({"messages": [USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "send their results"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "no tool 'other'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice goes with tools"),
        ({"stop": ["a"]}, "stop_sequences"),
        ({"response_format": {}}, "output_config.format"),
        ({"output_config": {"effort": "low"}}, "does not read output_config.effort"),
        ({"service_tier": "priority"}, "'service_tier' is not implemented"),
        ({"mcp_servers": [{}]}, "MCP"),
        ({"unknown": 1}, "'unknown' is not a field"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "shorten it"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_with_the_field_and_the_fix(plain, fields: dict[str, Any], part: str):
    status, kind, message = refuse(plain[0], **fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert part in message


def test_neutral_fields_are_accepted(plain):
    server, scripts = plain
    scripts[:] = ["Yes."]
    fields = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard", "container": None, "mcp_servers": [],
        "context_management": {"edits": []}, "top_k": 5, "top_p": 0.9, "tool_choice": {"type": "auto"}, "tools": [],
        "speculative": {"num_speculative_tokens": 2}, "speculative_metrics": True, "output_config": {"effort": "high"},
    }  # fmt: skip
    body = ask(server, **fields)
    assert body["content"] == [{"type": "text", "text": "Yes."}]
    assert "speculative_decoding" in body["metrics"]


def test_errors_before_and_outside_the_route_have_its_format(thinking):
    server, _ = thinking
    assert refuse(server, model="other")[:2] == (404, "not_found_error")
    assert refuse(server, path=f"{PATH}/batches")[:2] == (404, "not_found_error")
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong", "x-api-key": KEY}):
        answer = server.post(PATH, BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert server.post(PATH, BODY, headers={"authorization": f"Bearer {KEY}", "x-api-key": "other"}).status_code == 200
    answer = server.post_raw(PATH, b"{", **server.headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = server.post_raw(PATH, b" " * 3_000_000, **server.headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    assert server.get("/v1/none", headers=server.headers).json()["error"]["code"] == 404  # OpenAI's format elsewhere


def test_a_client_that_leaves_ends_its_request(plain):
    server, scripts = plain
    scripts.clear()
    body = BODY | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", server.url + PATH, json=body, **PLAIN_HTTP) as answer:
        assert next(answer.iter_lines()) == "event: message_start"
    assert server.is_idle()
    assert server.engine.scheduler.allocator.num_available == server.engine.scheduler.allocator.num_pages - 1


def test_an_error_in_a_stream_is_its_last_event(plain):
    """The deadline ends the request."""
    llm, _ = make_scripted_llm()
    settings = ServerSettings(model_names=(NAME,), chat_template=chat_templates.ROLES_ONLY, request_timeout=0.05)
    with run_server(llm, settings) as server:
        event = read_events(server, max_tokens=1900, ignore_eos=True)[-1]
        assert (event["type"], event["error"]["type"]) == ("error", "timeout_error")
        assert refuse(server, max_tokens=1900, ignore_eos=True)[:2] == (504, "timeout_error")
