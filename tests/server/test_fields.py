"""Request fields: each has an effect, or accepts only values that request nothing; others are refused by name."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from foredraft import Sampling, make_typical_rule
from foredraft.server.sampling_params import build_options
from foredraft.server.schemas import NEUTRAL_VALUES, ChatRequest, CompletionRequest
from foredraft.server.settings import ServerSettings
from foredraft.verification.rules import TypicalAcceptance
from tests.support import tiny_models
from tests.support.server.live_server import CHATML, NAME, RunningServer, make_small_llm, run_server

BASE = {"prompt": "the end", "temperature": 1.0, "seed": 7, "max_tokens": 30, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "a"}],
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 30,
    "ignore_eos": True,
}
ALL = list(range(20, 120))

# field -> a value at which the answer must differ from BASE's
CHANGES = {
    "prompt": "def",
    "suffix": None,
    "max_tokens": 5,
    "min_tokens": None,  # below: it needs an end
    "n": 2,
    "temperature": 0.0,
    "top_p": 0.1,
    "top_k": 1,
    "min_p": 0.9,
    "typical_p": 0.05,
    "repetition_penalty": 5.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {"30": 100},
    "allowed_token_ids": ALL[:3],
    "bad_words": None,
    "seed": 8,
    "stop": None,
    "stop_token_ids": ALL,
    "include_stop_str_in_output": None,
    "ignore_eos": None,
    "stream": None,
    "stream_options": None,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["the", "end"]},
    "regex": "[0-9]{4}",
    "prediction": None,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 1,
    "add_special_tokens": None,
    "return_token_ids": True,
    "skip_special_tokens": None,
    "return_tokens_as_token_ids": None,
    "priority": None,
    "cache_salt": None,
    "request_id": "mine",
    "model": None,
    "user": None,
    "speculative": None,
    "verify": "typical",
    "posterior_threshold": None,
    "posterior_alpha": None,
    "speculative_metrics": True,
    "foredraft_trace": True,
    "echo": True,
    "logprobs": 1,
    "best_of": None,
}
# changed nowhere but tested elsewhere, or without effect on the text; every field is in one of the two
ELSEWHERE = {
    "stream", "stream_options", "prediction", "priority", "cache_salt", "model", "user", "speculative", "best_of",
    "add_special_tokens", "min_tokens", "bad_words", "stop", "include_stop_str_in_output", "ignore_eos",
    "return_tokens_as_token_ids", "posterior_threshold", "posterior_alpha", "suffix", "skip_special_tokens",
}  # fmt: skip


def answer(server: RunningServer, body: dict) -> dict:
    found = server.post_ok("/v1/completions", **body)
    return {name: value for name, value in found.items() if name not in ("id", "created", "usage")}


def test_the_lists_are_complete():
    assert set(CHANGES) == set(CompletionRequest.model_fields)
    assert {name for name, value in CHANGES.items() if value is None} == ELSEWHERE


@pytest.mark.parametrize("name", [name for name, value in CHANGES.items() if value is not None])
def test_a_field_changes_the_answer(server: RunningServer, name: str):
    assert answer(server, BASE) == answer(server, BASE)
    body = BASE | {name: CHANGES[name]}
    if name == "request_id":
        assert server.post_ok("/v1/completions", **body)["id"] == "cmpl-mine"
    else:
        assert answer(server, body) != answer(server, BASE)


def test_fields_that_need_each_other(server: RunningServer):
    text = answer(server, BASE)["choices"][0]["text"]
    assert answer(server, BASE | {"stop": text[5:8]})["choices"][0]["text"] == text[: text.index(text[5:8])]
    token_ids = server.complete(**{k: v for k, v in BASE.items() if k != "prompt"}, return_token_ids=True)
    first = token_ids["choices"][0]["token_ids"][0]
    word = tiny_models.tokenizer().decode([first])
    banned = server.post_ok("/v1/completions", **BASE, bad_words=[word], return_token_ids=True)
    assert first not in banned["choices"][0]["token_ids"]
    ended = BASE | {"stop_token_ids": [first]}
    assert answer(server, ended)["choices"][0]["stop_reason"] == first
    later = server.post_ok("/v1/completions", **ended, min_tokens=9)
    assert later["usage"]["completion_tokens"] > 9
    eos = BASE | {"logit_bias": {"3": 100}}
    assert server.post_ok("/v1/completions", **eos)["usage"]["completion_tokens"] == 30
    assert server.post_ok("/v1/completions", **eos | {"ignore_eos": False})["usage"]["completion_tokens"] == 1
    spelt = server.post_ok("/v1/completions", **BASE, logprobs=0, return_tokens_as_token_ids=True)
    assert spelt["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{first}"


def test_fields_without_effect_on_the_text(server: RunningServer):
    plain = answer(server, BASE)
    for extra in (
        {"user": "somebody"}, {"priority": -3}, {"cache_salt": "x"}, {"model": "small"}, {"best_of": 1},
        {"model": None},
        {"speculative": {"num_speculative_tokens": 2}}, {"speculative": {"num_speculative_tokens": "1:0-2,8:0"}},
        {"prediction": {"type": "content", "content": "the"}},
        {"response_format": {"type": "text"}}, {"add_special_tokens": False}, {"stream": False}, {"top_k": -1},
    ):  # fmt: skip
        assert answer(server, BASE | extra) == plain, extra


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BASE), ("/v1/chat/completions", CHAT)])
def test_neutral_values_are_taken_and_all_others_named(server: RunningServer, path: str, body: dict):
    plain = server.post_ok(path, **body)["choices"]
    known = CompletionRequest if "prompt" in body else ChatRequest
    for name, values in NEUTRAL_VALUES.items():
        assert name not in known.model_fields or name == "suffix"  # a field of completions, refused by this model
        for value in values:
            assert server.post_ok(path, **body | {name: value})["choices"] == plain, (name, value)
        for value in ("nonsense", 3.5, [1], {"a": 1}):
            refused = server.post(path, body | {name: value})
            assert refused.status_code == 400, (name, value)
            assert refused.json()["error"]["param"] == name
            assert name in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", ["nonsense", "best_off", "Temperature", "", "logprob", "guided_json"])
def test_an_unknown_field_is_named(server: RunningServer, path: str, name: str):
    body = {
        "/v1/completions": BASE,
        "/v1/chat/completions": CHAT,
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [9]},
    }
    for value in (None, 1, "x"):
        refused = server.post(path, body[path] | {name: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == name
        assert name in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5), ("typical_p", 0), ("repetition_penalty", 0), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"30": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"99999": 1}),
        ("logit_bias", []), ("seed", 1 << 63), ("seed", 1.5), ("n", 0), ("n", 17), ("n", 10**30), ("max_tokens", -1),
        ("max_tokens", 10**30), ("min_tokens", 31), ("stop", [""]), ("stop", 3), ("stop_token_ids", [-1]),
        ("stop_token_ids", [99999]), ("allowed_token_ids", []), ("allowed_token_ids", [99999]), ("bad_words", [""]),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("prompt_logprobs", -1), ("best_of", 2),
        ("stream", "yes"), ("stream_options", {"include_usage": True}), ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}), ("structured_outputs", {}), ("regex", "("), ("regex", ""),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"structural_tag": "x"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
        ("prompt", []), ("prompt", ""), ("prompt", None), ("prompt", [[]]), ("prompt", [-1]), ("prompt", [99999]),
        ("prompt", [1, "a"]), ("prompt", [["a"]]), ("prompt", {"a": 1}), ("prompt", [True]), ("echo", 1),
        ("speculative", {"num_speculative_tokens": -1}),
        ("speculative", {"num_speculative_tokens": "4:1"}), ("speculative", {"num_speculative_tokens": 1025}),
        ("speculative", {"num_speculative_tokens": True}), ("speculative", {"k": 1}), ("cache_salt", ""),
        ("request_id", "a b"), ("priority", 1 << 40), ("truncate_prompt_tokens", 0), ("prediction", {"type": "x"}),
        ("verify", ""), ("verify", "typicl"), ("verify", "Match"), ("verify", 1), ("verify", ["match"]),
        ("verify", "x" * 65), ("posterior_threshold", 0), ("posterior_threshold", 1.1), ("posterior_threshold", "1"),
        ("posterior_threshold", 0.5), ("posterior_alpha", 0), ("posterior_alpha", -1), ("posterior_alpha", 0.5),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_a_400_with_its_field(server: RunningServer, name: str, value: object):
    refused = server.post("/v1/completions", BASE | {name: value})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert name in (error["param"] or error["message"])
    assert "/" not in error["message"]


LOSSY = BASE | {"verify": "typical"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_rule_of_a_request_verifies_it_and_a_lossy_one_is_reported(server: RunningServer, path: str):
    base = BASE if path == "/v1/completions" else CHAT
    lossy = server.post_ok(path, **base, verify="typical")
    assert lossy["verification"] == "typical"
    assert all(chunk["verification"] == "typical" for chunk in server.chunks(path, **base, verify="typical"))
    plain = server.post_ok(path, **base)
    for verify in (None, "auto", "match", "reject", "block", "spectr"):
        answer = server.post_ok(path, **base, verify=verify)
        assert "verification" not in answer
        is_reproducible = verify in (None, "auto", "match")
        assert (answer["choices"] == plain["choices"]) == is_reproducible, verify
    assert lossy["choices"] != plain["choices"]


def test_the_thresholds_of_a_request_decide_what_is_accepted(server: RunningServer):
    """Guards thresholds that are read and not used. The loosest accepts every draft token with any probability."""
    accepted = []
    for threshold, alpha in ((1e-9, 1e-9), (0.999, 9.0)):
        body = LOSSY | {"posterior_threshold": threshold, "posterior_alpha": alpha, "speculative_metrics": True}
        body |= {"speculative": {"num_speculative_tokens": 3}}
        answer = server.post_ok("/v1/completions", **body)
        accepted.append(answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"])
    assert accepted[0] > accepted[1]


def test_thresholds_without_a_rule_change_that_of_the_server(server: RunningServer):
    for name, value in (("posterior_threshold", 0.5), ("posterior_alpha", 0.5)):
        refused = server.post("/v1/completions", BASE | {name: value, "verify": "reject"}).json()["error"]
        assert refused["param"] == name
        assert "is a setting of the rule typical, not of reject" in refused["message"]
    llm = make_small_llm().with_drafter(make_small_llm().drafter, verify=make_typical_rule(0.2, 0.4))
    with run_server(llm) as lossy:
        assert make_request(lossy, BASE | {"posterior_alpha": 0.5}).spec.rule.verify == TypicalAcceptance(0.2, 0.5)
        assert make_request(lossy, BASE).spec.rule.verify == TypicalAcceptance(0.2, 0.4)
        assert make_request(lossy, LOSSY).spec.rule.verify == TypicalAcceptance()
        assert make_request(lossy, BASE | {"verify": "auto"}).spec.rule.is_lossless
        assert "verification" not in lossy.post_ok("/v1/completions", **BASE, verify="auto")


def make_request(server: RunningServer, body: dict):
    """Return the request that the server makes of a body, without running it."""
    request = CompletionRequest.model_validate(body)
    options = build_options(request, (), server.service.llm.rule)
    return server.service.llm.prepare(body["prompt"], Sampling(seed=1), options)[0].request


def test_requests_of_different_rules_share_a_batch(server: RunningServer):
    """Each answer is that of the request alone: rules and thresholds do not leak between requests."""
    fixed = {"speculative": {"num_speculative_tokens": 3}}
    bodies = [BASE | fixed | {"verify": verify} for verify in ("match", "reject", "block", "spectr", "typical")]
    bodies += [LOSSY | fixed | {"posterior_threshold": value} for value in (1e-6, 1e-3)]
    alone = [answer(server, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(lambda body: answer(server, body), bodies)) == alone


def test_two_grammars_exclude_each_other(server: RunningServer):
    refused = server.post("/v1/completions", BASE | {"regex": "a", "response_format": {"type": "json_object"}})
    assert "exclude each other" in refused.json()["error"]["message"]


def test_more_tokens_than_the_context_holds_are_as_many_as_fit_or_refused(server: RunningServer):
    cut = server.complete(max_tokens=1000, prompt="the end", ignore_eos=True)["usage"]
    assert cut["total_tokens"] == 256
    room = 256 - cut["prompt_tokens"]
    with run_server(
        settings=ServerSettings(model_names=(NAME,), chat_template=CHATML, has_strict_max_tokens=True)
    ) as strict:
        refused = strict.post("/v1/completions", {"prompt": ["the", "the end"], "max_tokens": room + 1})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "max_tokens")
        assert (
            f"max_tokens is {room + 1}, the prompt has {256 - room} tokens and the context holds 256"
            in error["message"]
        )
        assert f"at most {room}" in error["message"]
        whole = strict.complete(prompt="the end", max_tokens=room, ignore_eos=True)
        assert whole["usage"]["completion_tokens"] == room
        for name in ("max_tokens", "max_completion_tokens"):
            refused = strict.post("/v1/chat/completions", {"messages": CHAT["messages"], name: 256})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        unbounded = strict.chat("a", ignore_eos=True)  # no unavailable feature was requested
        assert unbounded["usage"]["total_tokens"] == 256


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
# field of a chat alone -> fields with which the answer must differ from CHAT's; None: has no effect
CHAT_CHANGES = {
    "messages": {"messages": [{"role": "user", "content": "b"}]},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 1},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "chat_template_kwargs": {"chat_template_kwargs": {"tone": "x"}},
    "reasoning_effort": {"reasoning_effort": "high"},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True},
    "echo": None,  # only False is accepted, for clients that send it
}
VARIABLES = CHATML + "{% if tone %}{{ tone }}{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"


def test_every_field_of_a_chat_has_an_effect():
    assert set(CHAT_CHANGES) == set(ChatRequest.model_fields) - set(CompletionRequest.model_fields) | {
        "logprobs", "echo",
    }  # fmt: skip
    with run_server(settings=ServerSettings(model_names=(NAME,), chat_template=VARIABLES)) as server:
        plain = server.post_ok("/v1/chat/completions", **CHAT)["choices"]
        for name, extra in CHAT_CHANGES.items():
            if extra is None:
                continue
            found = server.post_ok("/v1/chat/completions", **CHAT | extra)["choices"]
            assert found != plain, name


def test_no_tools_may_be_given_and_none_of_them_used(server: RunningServer):
    plain = server.post_ok("/v1/chat/completions", **CHAT)["choices"]
    for extra in ({"tools": [], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "none"},
                  {"reasoning_effort": "none", "chat_template_kwargs": {}, "parallel_tool_calls": True}):  # fmt: skip
        assert server.post_ok("/v1/chat/completions", **CHAT, **extra)["choices"] == plain, extra
