"""/v1/responses with the openai SDK: events, items, tools, formats, errors, and what agents do with them.

Guards against events that the SDK's models do not accept or that come in another order, streams that differ from the
plain response, and conversations that lose an item on their way back.
"""

import contextlib
import json
import typing
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import httpx
import openai
import pytest
from openai.types import responses as types

from foredraft.sampling.grammar import GrammarCompiler
from foredraft.sampling.grammar_cursor import PARSER_LIMITS
from foredraft.server.settings import ServerSettings
from tests.support.server import chat_templates
from tests.support.server.live_server import CHATML, NAME, PLAIN_HTTP, RunningServer, make_fresh_llm, run_server
from tests.support.server.scripted_llm import make_scripted_llm

PATH = "/v1/responses"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": CITY}
TIME = {"type": "function", "name": "get_time"}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCRIPT = f"Hm.\n</think>\n\nI look.\n{CALL}"
EVENT_TYPES = {
    typing.get_args(member.model_fields["type"].annotation)[0]: member
    for member in typing.get_args(typing.get_args(types.ResponseStreamEvent)[0])
}
TEXT_EVENTS = "content_part.added {0}.delta {0}.done content_part.done".split()


@contextlib.contextmanager
def serve_scripts(template: str, **settings: Any) -> Iterator[tuple[RunningServer, list[str]]]:
    llm, scripts = make_scripted_llm()
    with run_server(llm, ServerSettings(model_names=(NAME,), chat_template=template, **settings)) as server:
        yield server, scripts


@pytest.fixture(scope="module")
def thinking() -> Iterator[tuple[RunningServer, list[str]]]:
    with serve_scripts(chat_templates.THINKING) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[RunningServer, list[str]]]:
    """A server whose answers have neither reasoning nor, without tools, a parser."""
    template = CHATML + "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    with serve_scripts(template, has_spec_metrics=True) as found:
        yield found


@pytest.fixture(autouse=True)
def no_scripts(request: pytest.FixtureRequest) -> None:
    for name in {"thinking", "plain"} & set(request.fixturenames):
        request.getfixturevalue(name)[1].clear()


def make_client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def iterate_events(server: RunningServer, **body: Any) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream; each must be one of the SDK's strict models, under its name."""
    with httpx.stream("POST", server.url + PATH, json=body | {"stream": True}, **PLAIN_HTTP) as answer:
        assert answer.status_code == 200, answer.read()
        name = ""
        for line in answer.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert name == f"event: {event['type']}"
                EVENT_TYPES[event["type"]].model_validate(event, strict=True)
                yield event
            name = line


def read_events(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    events = list(iterate_events(server, **body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def list_kinds(events: list[dict[str, Any]]) -> list[str]:
    """List the types of the events, equal neighbours once."""
    return [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in events)]


def strip_ids(body: Any) -> Any:
    """Return a response without what differs from one response to the next."""
    if isinstance(body, list):
        return [strip_ids(one) for one in body]
    if not isinstance(body, dict):
        return body
    varying = ("id", "call_id", "created_at", "completed_at", "input_tokens_details")
    return {name: strip_ids(value) for name, value in body.items() if name not in varying}


def test_the_events_of_a_stream_come_in_the_published_order(thinking: tuple[RunningServer, list[str]]):
    server, scripts = thinking
    scripts[:] = [SCRIPT] * 2
    body = {"input": "the end?", "tools": TOOLS, "temperature": 0}
    events = read_events(server, **body)
    item = ["output_item.added", "output_item.done"]
    texts = [[part.format(kind) for part in TEXT_EVENTS] for kind in ("reasoning_text", "output_text")]
    call = [f"function_call_arguments.{part}" for part in ("delta", "done")]
    inner = [one for part in (*texts, call) for one in (item[0], *part, item[1])]
    assert list_kinds(events) == ["created", "in_progress", *inner, "completed"]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == last["output"]
    for event in events:
        if event["type"].endswith((".delta", ".done")) and "item_id" in event:
            assert event["item_id"] == last["output"][event["output_index"]]["id"]
    for kind, field in (("reasoning_text", "text"), ("output_text", "text"), ("function_call_arguments", "arguments")):
        parts = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        (done,) = [event[field] for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(parts) == done
        assert kind == "reasoning_text" or len(parts) > 1
    whole = server.post_ok(PATH, **body)
    types.Response.model_validate(whole, strict=True)
    assert strip_ids(whole) == strip_ids(last)
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm.")  # a token is a character here
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]


def run_agent(client: openai.OpenAI, is_stored: bool, is_streamed: bool) -> tuple[list[str], Any]:
    """Call the model and its tools until it answers. Returns the calls and the last response."""
    functions = {"get_weather": lambda city: f"sunny in {city}", "get_time": lambda: "noon"}
    calls, history, previous = [], [{"role": "user", "content": "the end?"}], None
    own: list[Any] = list(history)
    for _ in range(5):
        body: dict[str, Any] = {"model": NAME, "tools": TOOLS, "temperature": 0, "instructions": "Be brief."}
        body |= {"previous_response_id": previous, "input": own} if is_stored else {"store": False, "input": history}
        if is_streamed:
            with client.responses.stream(**body) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**body)
        history += [item.model_dump() for item in response.output]
        own, previous = [], response.id
        for item in response.output:
            if item.type == "function_call":
                result = functions[item.name](**json.loads(item.arguments))
                calls.append(result)
                own.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
        if not own:
            return calls, response
        history += own
    raise AssertionError("the agent does not end")


def test_an_agent_gets_the_same_prompts_with_and_without_stored_responses(thinking: tuple[RunningServer, list[str]]):
    server, scripts = thinking
    clock = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    counts = []
    with make_client(server) as client:
        for is_stored, is_streamed in ((True, False), (False, True)):
            scripts[:] = [f"Both.</think>I look.\n{CALL}\n{clock}", f"</think>{CALL}", "Ah.</think>Done."]
            calls, last = run_agent(client, is_stored, is_streamed)
            assert calls == ["sunny in Köln", "noon", "sunny in Köln"]
            assert last.output_text == "Done."
            counts.append(last.usage.input_tokens)
        assert len(set(counts)) == 1


def test_a_required_call_follows_its_schema(thinking: tuple[RunningServer, list[str]]):
    server, _ = thinking
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    named = {"type": "function", "name": "get_weather"}
    body = {"input": "the end?", "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}, "seed": 1}
    for choice, name in (("required", None), (named, "get_weather"), (allowed, "get_time")):
        found = server.post_ok(PATH, **body, tool_choice=choice, max_output_tokens=600)
        assert (found["status"], found["tool_choice"]) == ("completed", choice)
        for item in found["output"]:
            assert item["type"] == "function_call"
            assert name in (None, item["name"])
            assert set(json.loads(item["arguments"])) == ({"city"} if item["name"] == "get_weather" else set())
    free = server.post_ok(PATH, **body, tool_choice="none", max_output_tokens=20)
    assert {item["type"] for item in free["output"]} == {"message"}
    assert free["usage"]["input_tokens"] < found["usage"]["input_tokens"]


def test_the_format_of_the_text_is_enforced(plain: tuple[RunningServer, list[str]]):
    server, _ = plain
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = server.post_ok(PATH, input="the end", text={"format": form}, max_output_tokens=200)
    assert found["text"]["format"] == form
    assert isinstance(json.loads(found["output"][0]["content"][0]["text"])["ok"], bool)
    body = {"input": "a", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 8}
    assert server.post_ok(PATH, **body)["output"][0]["content"][0]["text"].startswith("{")


def test_an_output_that_is_cut_is_incomplete(plain: tuple[RunningServer, list[str]]):
    server, scripts = plain
    call = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
    for script, tools, kind, size in (("Seven", [], "message", 3), (call, TOOLS, "function_call", len(call) - 5)):
        scripts[:] = [script] * 2
        body = {"input": "the end?", "max_output_tokens": size, "tools": tools}
        found, events = server.post_ok(PATH, **body), read_events(server, **body)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [(item["type"], item["status"]) for item in found["output"]] == [(kind, "incomplete")]
        assert events[-1]["type"] == "response.incomplete"
        assert strip_ids(events[-1]["response"]) == strip_ids(found)


def test_an_empty_answer_is_an_empty_message(plain: tuple[RunningServer, list[str]]):
    server, scripts = plain
    scripts[:] = [""] * 2
    found = server.post_ok(PATH, input="the end")
    assert [(item["type"], item["content"][0]["text"]) for item in found["output"]] == [("message", "")]
    kinds = list_kinds(read_events(server, input="the end"))
    parts = "output_item.added content_part.added output_text.done content_part.done output_item.done"
    assert kinds[2:-1] == parts.split()


def test_log_probabilities_belong_to_every_token_of_a_text(plain: tuple[RunningServer, list[str]]):
    server, _ = plain
    body = {"input": "the end", "seed": 2, "max_output_tokens": 12, "top_logprobs": 2}
    body["include"] = ["message.output_text.logprobs"]
    found, events = server.post_ok(PATH, **body), read_events(server, **body)
    entries = found["output"][0]["content"][0]["logprobs"]
    assert len(entries) == found["usage"]["output_tokens"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == entries[: len(streamed)]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries
    refused = server.post(PATH, body | {"tools": TOOLS})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")


FIELDS = {
    "instructions": {"instructions": "b"},
    "input": {"input": [{"role": "developer", "content": "b"}, {"role": "user", "content": "a"}]},
    "reasoning": {"reasoning": {"effort": "high"}},
    "tools": {"tools": TOOLS},
    "max_output_tokens": {"max_output_tokens": 3},
    "text": {"text": {"format": {"type": "json_object"}}},
    "temperature": {"temperature": 0.2},
    "stop": {"stop": ["e", "a", "o", " "]},
    "seed": {"seed": 9},
    "logit_bias": {"logit_bias": {"20": 100}},
    "regex": {"regex": "[0-9]+"},
    "verify": {"verify": "typical"},
    "speculative": {"speculative": {"num_speculative_tokens": 0}},
    "prediction": {"prediction": {"type": "content", "content": "abc"}},
    "request_id": {"request_id": "mine"},
    "metadata": {"metadata": {"a": "b"}},
    "store": {"store": False},
}


def test_every_field_has_an_effect(plain: tuple[RunningServer, list[str]]):
    server, _ = plain
    body = {"input": "a", "seed": 3, "max_output_tokens": 20}
    without = server.post_ok(PATH, **body)
    for name, extra in FIELDS.items():
        found = server.post_ok(PATH, **body | extra)
        if name == "request_id":
            assert found["id"] == "resp_mine"
        elif name in ("metadata", "store"):
            assert found[name] == extra[name] != without[name]
        else:
            changed = [key for key in ("output", "status", "metrics", "usage", "verification")
                       if strip_ids(found.get(key)) != strip_ids(without.get(key))]  # fmt: skip
            assert changed, name


def test_fields_of_clients_that_change_nothing_are_accepted(plain: tuple[RunningServer, list[str]]):
    """Codex and the SDKs of agents send them with every request."""
    server, _ = plain
    extra = {
        "background": False, "truncation": "disabled", "service_tier": "auto", "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": [], "reasoning": {"summary": "auto"}, "conversation": None,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "thread", "client_metadata": {"a": "b"},
        "user": "me", "text": {"verbosity": "medium"}, "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    body = {"input": "a", "seed": 3, "max_output_tokens": 8}
    found = [server.post_ok(PATH, **body | more)["output"][0]["content"] for more in ({}, extra)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        ({"background": True}, 400, "stream the response"),
        ({"tools": [{"type": "web_search"}]}, 400, "offer a function that your program runs"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, 400, "stand beside `type`"),
        ({"max_tokens": 3}, 400, "max_tokens is called max_output_tokens"),
        ({"truncation": "auto"}, 400, "a shorter input"),
        ({"previous_response_id": "resp_x"}, 404, "at most 64 MiB"),
        ({"max_output_tokens": 10**9}, 400, "max_output_tokens is 1000000000"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, 400, "no message before it"),
        ({"x": 1}, 400, "'x' is not a field of this route"),
    ],
)
def test_what_is_refused_says_what_to_do(extra: dict[str, Any], status: int, words: str, strict: RunningServer):
    answer = strict.post(PATH, {"input": "a"} | extra)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(extra))


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    settings = ServerSettings(model_names=(NAME,), chat_template=CHATML, has_strict_max_tokens=True)
    with run_server(make_fresh_llm(), settings) as server:
        yield server


def test_speculation_is_reported(plain: tuple[RunningServer, list[str]]):
    server, _ = plain
    figures = server.post_ok(PATH, input="a", max_output_tokens=20)["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] > 0
    assert server.post_ok(PATH, input="a", max_output_tokens=3, verify="typical")["verification"] == "typical"


def test_an_error_on_the_way_is_an_event_and_a_failed_response():
    llm = make_fresh_llm()
    small = GrammarCompiler(llm.tokenizer, llm.target.vocab_size, PARSER_LIMITS | {"max_lexer_states": 80})
    llm._requests = replace(llm._requests, grammars=small)
    with run_server(llm, ServerSettings(model_names=(NAME,), chat_template=CHATML)) as server:
        body = {"input": "a", "max_output_tokens": 200, "regex": "[ab]{300}"}
        *_, error, failed = read_events(server, **body)
        assert (error["type"], error["param"], error["code"]) == ("error", "regex", "400")
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "invalid_prompt"
        assert server.get(f"{PATH}/{failed['response']['id']}").status_code == 404
        assert server.post(PATH, body).status_code == 400


def test_a_response_that_the_server_ends_has_failed(plain: tuple[RunningServer, list[str]]):
    server, _ = plain
    events = []
    for event in iterate_events(server, input="a", ignore_eos=True, max_output_tokens=1900):
        if event["type"].endswith("text.delta") and not any(seen["type"].endswith("text.delta") for seen in events):
            server.service.worker.abort_all()
        events.append(event)
    last = events[-1]["response"]
    assert (events[-1]["type"], last["error"]["code"], last["store"]) == ("response.failed", "server_error", False)
    assert last["usage"]["output_tokens"] > 0
    assert last["output"][0]["status"] == "incomplete"
    assert server.get(f"{PATH}/{last['id']}").status_code == 404


def test_a_client_that_leaves_ends_its_response(plain: tuple[RunningServer, list[str]]):
    server, _ = plain
    body = {"input": "a", "ignore_eos": True, "max_output_tokens": 1900, "stream": True, "request_id": "left"}
    with httpx.stream("POST", server.url + PATH, json=body, **PLAIN_HTTP) as answer:
        next(answer.iter_text())
    assert server.is_idle()
    assert server.get(f"{PATH}/resp_left").status_code == 404
