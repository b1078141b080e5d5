"""The anthropic SDK against /v1/messages: bodies, its stream helper, an agent with tools, and its errors.

Guards against answers that the SDK's own models do not take.
"""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from foredraft.server.settings import ServerSettings
from tests.support.server import chat_templates
from tests.support.server.live_server import NAME, RunningServer, run_server
from tests.support.server.scripted_llm import make_scripted_llm

KEY = "sk-client"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "Weather.", "input_schema": CITY}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
USER = {"role": "user", "content": "the end?"}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningServer, list[str]]]:
    llm, scripts = make_scripted_llm()
    settings = ServerSettings(model_names=(NAME,), chat_template=chat_templates.THINKING, api_key=KEY)
    with run_server(llm, settings) as server:
        yield server, scripts


@pytest.fixture(scope="module")
def client(served: tuple[RunningServer, list[str]]) -> Any:
    made = anthropic.Anthropic(base_url=served[0].url, api_key=KEY, max_retries=0, _strict_response_validation=True)
    with made:
        yield made


def answer(client: Any, is_streamed: bool, **body: Any) -> Any:
    fields = {"model": NAME, "max_tokens": 1500, "temperature": 0} | body
    temperature = fields.pop("temperature")
    extra = {"temperature": temperature}
    if not is_streamed:
        return client.messages.create(**fields, extra_body=extra)
    with client.messages.stream(**fields, extra_body=extra) as stream:
        kinds = [event.type for event in stream]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        return stream.get_final_message()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_its_tool_until_the_model_answers(served: Any, client: Any, is_streamed: bool):
    scripts = served[1]
    scripts[:] = [f"Hm.\n</think>\n\nLook.\n{CALL}", "Good.</think>Done."]
    messages: list[Any] = [USER]
    body = {"tools": TOOLS, "thinking": THINKING, "system": "Be brief."}
    first = answer(client, is_streamed, messages=messages, **body)
    assert (first.stop_reason, [block.type for block in first.content]) == (
        "tool_use",
        ["thinking", "text", "tool_use"],
    )
    call = first.content[-1]
    assert (call.name, call.input) == ("get_weather", {"city": "Köln"})
    messages.append({"role": "assistant", "content": first.content})
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]})
    last = answer(client, is_streamed, messages=messages, **body)
    assert [getattr(block, block.type) for block in last.content] == ["Good.", "Done."]
    assert (last.stop_reason, last.usage.cache_read_input_tokens > 0) == ("end_turn", True)
    assert last.usage.output_tokens_details.thinking_tokens > 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_required_call_has_input(served: Any, client: Any, is_streamed: bool, choice: Any):
    served[1].clear()
    # without further properties: random weights write numbers such as 6E702 there, which no body can hold
    schema = CITY | {"properties": {"city": {"enum": ["a", "b"]}}, "additionalProperties": False}
    tools = [TOOLS[0] | {"input_schema": schema}]
    body = {"tools": tools, "tool_choice": choice | {"disable_parallel_tool_use": True}, "temperature": 1.0}
    message = answer(client, is_streamed, messages=[USER], thinking={"type": "disabled"}, **body)
    (call,) = message.content
    assert (message.stop_reason, call.input["city"] in ("a", "b")) == ("tool_use", True)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_sequence_is_named(served: Any, client: Any, is_streamed: bool):
    served[1][:] = ["one two"]
    body = {"messages": [USER], "stop_sequences": [" two"], "thinking": {"type": "disabled"}}
    message = answer(client, is_streamed, **body)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one", "stop_sequence", " two")


def test_tokens_are_counted(served: Any, client: Any):
    served[1][:] = ["</think>Yes."]
    counted = client.messages.count_tokens(model=NAME, messages=[USER], tools=TOOLS).input_tokens
    usage = answer(client, False, messages=[USER], tools=TOOLS).usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted


def test_errors_are_those_of_the_sdk(served: Any, client: Any):
    for fields, kind in (({"model": "other"}, anthropic.NotFoundError), ({"max_tokens": 0}, anthropic.BadRequestError)):
        with pytest.raises(kind) as refused:
            answer(client, False, messages=[USER], **fields)
        assert refused.value.body["error"]["type"] in ("not_found_error", "invalid_request_error")
    with pytest.raises(anthropic.AuthenticationError):
        answer(client.with_options(api_key="wrong"), False, messages=[USER])


def test_a_stream_that_is_left_ends(served: Any, client: Any):
    served[1].clear()
    with client.messages.stream(model=NAME, max_tokens=1500, messages=[USER]) as stream:
        next(iter(stream))
    assert served[0].is_idle()
