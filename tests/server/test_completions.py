"""/v1/completions against the library itself, and its stream against its plain answer."""

import pytest

from foredraft import Sampling
from tests.support import tiny_models
from tests.support.server.live_server import RunningServer, make_small_llm

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PATH = "/v1/completions"


def text_of(chunks: list[dict], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def ids(text: str) -> list[int]:
    return list(tiny_models.tokenizer()(text).input_ids)


def library(prompt: str | list[int], **sampling) -> list:
    return make_small_llm().with_drafter(None).generate(prompt, Sampling(**sampling))


def test_a_completion_is_the_librarys(server: RunningServer):
    body = server.complete(**GREEDY)
    (expected,) = library("the end", temperature=0, max_tokens=24, ignore_eos=True)
    (choice,) = body["choices"]
    assert choice["text"] == expected.text
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert (body["object"], body["model"]) == ("text_completion", "small")
    assert body["id"].startswith("cmpl-")
    assert body["usage"]["prompt_tokens"] == len(ids("the end"))
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["total_tokens"] == 24 + len(ids("the end"))


def test_sixteen_tokens_by_default(server: RunningServer):
    assert server.complete(ignore_eos=True)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "prompt", ["the", ["the", "def"], ids("the"), [ids("the"), ids("def x")]], ids=["str", "strs", "ids", "lists"]
)
def test_every_kind_of_prompt(server: RunningServer, prompt):
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    body = server.complete(prompt, **GREEDY)
    expected = [library(p, temperature=0, max_tokens=24, ignore_eos=True)[0].text for p in many]
    assert [c["text"] for c in body["choices"]] == expected
    assert [c["index"] for c in body["choices"]] == list(range(len(many)))


def test_n_samples_of_each_prompt_with_a_seed(server: RunningServer):
    body = server.complete(["the", "def"], n=3, seed=5, max_tokens=12, temperature=1.2, ignore_eos=True)
    expected = []
    for prompt in ("the", "def"):
        expected += library(prompt, n=3, seed=5, max_tokens=12, temperature=1.2, ignore_eos=True)
    assert [c["text"] for c in body["choices"]] == [c.text for c in expected]
    assert len({c["text"] for c in body["choices"]}) > 3
    usage = body["usage"]
    assert usage["completion_tokens"] == 72
    assert usage["prompt_tokens"] == len(ids("the")) + len(ids("def"))  # once for all samples


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 3, "temperature": 1.0},
        {"stop": ["e"], "include_stop_str_in_output": True},
        {"stop": ["th", "a"], "temperature": 0.9},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True, "return_token_ids": True},
        {"echo": True, "n": 2, "prompt": ["the", "def"]},
        {"ignore_eos": False, "temperature": 1.3, "max_tokens": 60},
    ],
    ids=lambda extra: "+".join(extra) or "greedy",
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_is_the_plain_answer_in_pieces(server: RunningServer, extra, seed):
    body = {"prompt": "größe 東京 🍣", "seed": seed, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | extra
    plain = server.post_ok(PATH, **body)
    chunks = server.chunks(PATH, **body, stream_options={"include_usage": True})
    for choice in plain["choices"]:
        index = choice["index"]
        assert text_of(chunks, index) == choice["text"]
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [v for part in parts for v in part["logprobs"][name]] == values, name
        if "token_ids" in choice:
            assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["choices"] == []
    usage = dict(plain["usage"], prompt_tokens_details=chunks[-1]["usage"]["prompt_tokens_details"])
    assert chunks[-1]["usage"] == usage
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}


def test_split_characters_arrive_whole(server: RunningServer):
    """Every character beyond ASCII is several tokens here: no chunk shows half of one."""
    bias = {str(i): 12 for i in ids("東京🍣")}
    body = {"prompt": "a", "logit_bias": bias, "max_tokens": 60, "temperature": 1, "ignore_eos": True, "seed": 3}
    plain = server.post_ok(PATH, **body)
    chunks = server.chunks(PATH, **body)
    assert text_of(chunks) == plain["choices"][0]["text"]
    assert any(ord(c) > 0x2000 for c in plain["choices"][0]["text"])


def test_usage_with_every_chunk(server: RunningServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.chunks(PATH, prompt="the", stream_options=options, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert all("usage" not in chunk for chunk in server.chunks(PATH, prompt="the", **GREEDY))


def test_echo_with_logprobs_is_the_prompts_own(server: RunningServer):
    prompt = "the end of the"
    body = server.complete(prompt, **GREEDY, echo=True, logprobs=3)
    (expected,) = library(prompt, temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    (choice,) = body["choices"]
    assert choice["text"] == prompt + expected.text
    logprobs = choice["logprobs"]
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx([e.raw_logprob for e in entries[1:]], abs=1e-9)
    assert len(logprobs["tokens"]) == len(entries) == len(logprobs["text_offset"])
    for entry, top in zip(entries[1:], logprobs["top_logprobs"][1:], strict=True):
        assert max(top.values()) == pytest.approx(entry.raw_top[0][1], abs=1e-9)
        assert entry.raw_logprob == pytest.approx(min(top.values()), abs=1e-9) or len(top) == 3
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            # a broken character shows with the token after it
            assert choice["text"][offset:].lstrip("\N{REPLACEMENT CHARACTER}").startswith(token)


def test_echo_alone_writes_nothing(server: RunningServer):
    """Evaluators request the log-probabilities of a text, and no continuation."""
    body = server.complete(ids("the end"), max_tokens=0, echo=True, logprobs=1)
    (choice,) = body["choices"]
    assert choice["text"] == "the end"
    assert len(choice["logprobs"]["tokens"]) == len(ids("the end"))
    assert body["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    answer = server.post(PATH, {"prompt": "a", "max_tokens": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_prompt_logprobs_in_vllms_shape(server: RunningServer):
    body = server.complete("the end", **GREEDY, prompt_logprobs=2)
    (expected,) = library("the end", max_tokens=1, prompt_logprobs=2)
    shown = body["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    for entry, found in zip(expected.prompt_logprobs[1:], shown[1:], strict=True):
        assert found[str(entry.token_id)]["logprob"] == pytest.approx(entry.raw_logprob, abs=1e-9)
        assert found[str(entry.raw_top[0][0])]["rank"] == 1


def test_the_stop_string_is_shown_only_if_asked(server: RunningServer):
    text = server.complete(**GREEDY)["choices"][0]["text"]
    word = text[6:9]
    cut = server.complete(**GREEDY, stop=word)["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", word)
    assert cut["text"] == text[: text.index(word)]
    shown = server.complete(**GREEDY, stop=[word], include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == text[: text.index(word)] + word


def test_a_traced_stream_shows_where_tokens_come_from(server: RunningServer):
    chunks = server.chunks(PATH, prompt="the", foredraft_trace=True, **GREEDY)
    traces = [chunk["choices"][0]["foredraft_trace"] for chunk in chunks]
    assert sum(len(t["token_ids"]) for t in traces) == 24
    assert {o for t in traces for o in t["origins"]} >= {"accepted", "corrected"}
    assert "".join(p for t in traces for p in t["pieces"]) == text_of(chunks)
    assert any(len(step["tokens"]) > 1 for t in traces for step in t["steps"])
    whole = server.complete("the", foredraft_trace=True, **GREEDY)["choices"][0]["foredraft_trace"]
    assert whole["token_ids"] == [token for t in traces for token in t["token_ids"]]


def test_figures_of_speculation(server: RunningServer):
    body = server.complete(**GREEDY, speculative_metrics=True, foredraft_trace=True)
    figures = body["metrics"]["speculative_decoding"]
    accepted = body["choices"][0]["foredraft_trace"]["origins"].count("accepted")
    assert figures["num_accepted_draft_tokens"] == accepted > 0
    histogram = figures["acceptance_histogram"]
    assert sum(histogram) == figures["num_spec_steps"] > 0
    assert sum(i * count for i, count in enumerate(histogram)) == accepted
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_spec_steps"])
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    assert "metrics" not in server.complete(**GREEDY)
    assert "metrics" not in server.complete(**GREEDY, n=2, speculative_metrics=True)


def test_speculation_can_be_switched_off_for_a_request(server: RunningServer):
    trace = server.complete(**GREEDY, foredraft_trace=True, speculative={"num_speculative_tokens": 0})
    assert set(trace["choices"][0]["foredraft_trace"]["origins"]) == {"plain"}
    assert trace["choices"][0]["text"] == server.complete(**GREEDY)["choices"][0]["text"]


def test_cached_tokens_are_reported(server: RunningServer):
    prompt = "the end of the and the and then " * 3
    first = server.complete(prompt, **GREEDY, cache_salt="here")["usage"]
    again = server.complete(prompt, **GREEDY, cache_salt="here")["usage"]
    other = server.complete(prompt, **GREEDY, cache_salt="there")["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == other["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]


def test_a_context_that_is_too_short(server: RunningServer):
    answer = server.post(PATH, {"prompt": "the " * 400})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert server.complete("the " * 400, truncate_prompt_tokens=8)["usage"]["prompt_tokens"] == 8
