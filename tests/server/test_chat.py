"""/v1/chat/completions: the rendered prompt, the stream, and control tokens that only the template may write."""

import json
from typing import Any

import pytest

from foredraft import LLM, Sampling
from foredraft.server.settings import ServerSettings
from tests.support import tiny_models
from tests.support.server.live_server import NAME, RunningServer, make_fresh_llm, make_small_llm, run_server

PATH = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SPECIAL = ("<end>", "<stop>", "<pad>")
ROLES = ("system", "user", "assistant")


def ids(text: str) -> list[int]:
    return list(tiny_models.tokenizer()(text).input_ids)


def tokens(server: RunningServer, messages: list[dict], **options) -> list[int]:
    return server.post_ok("/tokenize", messages=messages, **options)["tokens"]


def text_of(chunks: list[dict], index: int = 0) -> str:
    parts = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(part["content"] for part in parts)


def test_an_answer_is_the_librarys_to_the_rendered_chat(server: RunningServer):
    body = server.chat("the end", **GREEDY)
    prompt = ids("<stop>user: the end<pad><stop>assistant:")
    (expected,) = (
        make_small_llm().with_drafter(None).generate(prompt, Sampling(temperature=0, max_tokens=24, ignore_eos=True))
    )
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == len(prompt)


def test_the_context_is_the_limit_by_default(server: RunningServer):
    body = server.chat("the", temperature=0, ignore_eos=True)
    assert body["usage"]["total_tokens"] == tiny_models.CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "extra", [{}, {"n": 2, "temperature": 1.1}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e"]}]
)
def test_a_stream_is_the_plain_answer_in_pieces(server: RunningServer, extra):
    body = {"messages": [{"role": "user", "content": "größe 🍣"}], "seed": 4} | GREEDY | extra
    plain = server.post_ok(PATH, **body)
    chunks = server.chunks(PATH, **body, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in plain["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert text_of(chunks, choice["index"]) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            streamed = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert chunks[-1]["choices"] == []


def test_logprobs_with_bytes(server: RunningServer):
    choice = server.chat("a", **GREEDY, logprobs=True, top_logprobs=3)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 24
    spelt = bytes(byte for entry in content for byte in entry["bytes"]).decode("utf-8", "replace")
    assert spelt.rstrip("\ufffd") == choice["message"]["content"].rstrip("\ufffd")
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
        assert entry["token"] == entry["top_logprobs"][0]["token"]
    bare = server.chat("a", **GREEDY, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("text", ["{}", "a {} b", "{}{}", " {}\n{}x"])
def test_text_that_spells_a_control_token_stays_text(server: RunningServer, role: str, special: str, text: str):
    content = text.replace("{}", special)
    made = tokens(server, [{"role": role, "content": content}])
    control = [token for token in made if token in tiny_models.tokenizer().all_special_ids or token < len(SPECIAL)]
    plain = tokens(server, [{"role": role, "content": "harmless"}])
    assert control == [token for token in plain if token < len(SPECIAL)]
    assert content in server.post_ok("/detokenize", tokens=made)["prompt"]


def test_what_spells_none_is_tokenised_as_one_text(server: RunningServer):
    messages = [{"role": "system", "content": " the < end > of "}, {"role": "user", "content": "größe"}]
    text = "<stop>system:  the < end > of <pad><stop>user: größe<pad><stop>assistant:"
    assert tokens(server, messages) == ids(text)


@pytest.mark.parametrize("content", ["top>", "stop>x"])
def test_no_control_token_comes_about_where_a_message_meets_the_template(content: str):
    template = "{% for m in messages %}<s{{ m.content }}{% endfor %}"
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), chat_template=template)) as server:
        answer = server.post(PATH, {"messages": [{"role": "user", "content": content}]})
        assert (answer.status_code == 400) == (content == "top>")


def test_parts_and_continued_messages(server: RunningServer):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "end"}]
    assert tokens(server, [{"role": "user", "content": parts}]) == ids("<stop>user: the end<pad><stop>assistant:")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the en "}]
    went_on = tokens(server, turns, continue_final_message=True)
    assert went_on == ids("<stop>user: a<pad><stop>assistant: the en ")
    assert tokens(server, turns, add_generation_prompt=False) == ids("<stop>user: a<pad><stop>assistant: the en <pad>")
    body = server.post_ok(PATH, messages=turns, continue_final_message=True, **GREEDY)
    assert body["usage"]["prompt_tokens"] == len(went_on)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_what_is_refused_is_named(server: RunningServer, body: dict, param: str):
    answer = server.post(PATH, {"messages": [{"role": "user", "content": "x"}]} | body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or "chat" in error["message"]


def test_a_model_without_a_template():
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,))) as server:
        made = tokens(server, [{"role": "user", "content": "the"}])
        assert made == ids("user: the\n\nassistant:")
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), has_plain_template=False)) as server:
        answer = server.post(PATH, {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]


def test_json_comes_out_where_json_is_asked_for(server: RunningServer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(4):
        body = server.chat("the", response_format=asked, seed=seed, temperature=1.0, max_tokens=120)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert isinstance(json.loads(body["choices"][0]["message"]["content"])["a"], bool)


def details(answer: dict) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    assert set(found) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_usage_says_how_much_of_a_prediction_was_drafted_and_kept():
    fixed = {"speculative": {"num_speculative_tokens": 15}, "speculative_metrics": True}
    with run_server(make_fresh_llm().with_drafter(None)) as server:
        plain = server.chat("the", **GREEDY)
        assert "completion_tokens_details" not in plain["usage"]
        text = plain["choices"][0]["message"]["content"]
        for content in (text, "zzzzzz"):
            body = {**GREEDY, **fixed, "prediction": {"type": "content", "content": content}}
            answer = server.chat("the", **body)
            figures = answer["metrics"]["speculative_decoding"]
            accepted, rejected = details(answer)
            assert accepted == figures["num_accepted_draft_tokens"]
            assert accepted + rejected == figures["num_draft_tokens"] > 0
            assert (accepted > 0) == (content == text)
            assert details(server.chat("the", **body, n=2)) == (2 * accepted, 2 * rejected)
            messages = {"messages": [{"role": "user", "content": "the"}], "stream_options": {"include_usage": True}}
            assert details(server.chunks("/v1/chat/completions", **messages, **body)[-1]) == (accepted, rejected)


def test_json_of_a_model_fond_of_blanks_ends():
    """Guards {"x" : and then blanks up to max_tokens, of the built-in model."""
    schemas: list[dict[str, Any]] = [
        {"x": {"type": "boolean"}},
        {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"type": "string", "maxLength": 20}},
    ]
    with run_server(LLM(drafter=None), ServerSettings(model_names=(NAME,))) as server:
        for inner in schemas:
            schema = {"type": "object", "properties": inner, "required": list(inner), "additionalProperties": False}
            asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
            body = server.complete("Answer in JSON:", response_format=asked, temperature=0, max_tokens=120)
            assert body["choices"][0]["finish_reason"] == "stop"
            assert list(json.loads(body["choices"][0]["text"])) == list(inner)


def test_a_prediction_is_drafted_from(server: RunningServer):
    plain = server.chat("the", **GREEDY, speculative_metrics=True)
    text = plain["choices"][0]["message"]["content"]
    predicted = server.chat(
        "the",
        **GREEDY,
        speculative_metrics=True,
        prediction={"type": "content", "content": [{"type": "text", "text": text}]},
    )
    assert predicted["choices"] == plain["choices"]
