"""The server over every kind of drafting: clients get the output of the library, and no client sees another."""

import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Sampling
from foredraft.server.settings import ServerSettings
from tests.server.test_disconnect import request, wait_for
from tests.support import tiny_models, tiny_seq2seq
from tests.support.server.live_server import NAME, RunningServer, make_small_llm, run_server

STORE = {"suffix.store_tokens": 4096, "suffix.min_confidence": 0.01}
BODY = {"prompt": "and then the end", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft for `small`, as a folder."""
    path = tmp_path_factory.mktemp("draft")
    tiny_models.perturb(make_small_llm().target.model, 0.04).save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return path


@cache
def pair() -> LLM:
    """An encoder-decoder model that reads and writes text."""
    tokenizer = tiny_models.tokenizer()
    model = tiny_seq2seq.make_model("t5", vocab=len(tokenizer), tie_word_embeddings=False, ids={"eos_token_id": 0})
    return LLM(model, None, tokenizer=tokenizer, is_debug=True)


@pytest.fixture(params=["auto", "suffix+draft_model", "early_exit", "aggressive, pair", "suffix+lookahead, pair"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[RunningServer]:
    method, _, kind = request.param.partition(", ")
    spec: dict[str, Any] = {"method": method}
    if "suffix" in method:
        spec |= STORE
    if "draft_model" in method:
        spec["model"] = str(folder)
    with run_server((pair() if kind else make_small_llm()).with_drafter(spec)) as server:
        yield server


def test_answers_are_those_of_plain_decoding(served: RunningServer) -> None:
    """Whole, streamed, several, seeded, with log-probabilities, a grammar, a prediction, with penalties; one by one and
    after a client has left in the middle of them."""
    llm = served.service.llm
    plain = llm.with_drafter(None)
    alike: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5, "n": 3},
        {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.2},
        {"temperature": 0, "regex": "(the |end )*"},
        {"temperature": 0.7, "seed": 9, "max_tokens": 1},
        {"temperature": 0, "prompt": "e"},
    ]
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(request(BODY | {"max_tokens": 200, "stream": True}))
        wait_for(lambda: served.engine.has_work)
    for fields in alike:
        body = BODY | fields
        wanted = [choice.text for choice in plain.generate([body["prompt"]], _sampling(body))]
        assert [choice["text"] for choice in served.complete(**body)["choices"]] == wanted
        pieces = dict.fromkeys(range(len(wanted)), "")
        for chunk in served.chunks("/v1/completions", **body):
            for choice in chunk["choices"]:
                pieces[choice["index"]] += choice["text"]
        assert list(pieces.values()) == wanted
        answer = served.complete(**body, prediction={"type": "content", "content": wanted[0]})
        assert [choice["text"] for choice in answer["choices"]] == wanted
        if "logprobs" in fields:
            [completion] = plain.generate([body["prompt"]], _sampling(body))
            got = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert got == pytest.approx([entry.raw_logprob for entry in completion.logprobs], abs=1e-6)
    assert served.is_idle()
    served.engine.scheduler.check_integrity()
    assert served.engine.drafter.num_failures == 0


def _sampling(body: dict[str, Any]) -> Sampling:
    from foredraft.sampling.grammar import Grammar

    names = ("temperature", "seed", "n", "max_tokens", "ignore_eos", "logprobs", "repetition_penalty")
    regex = body.get("regex")
    grammar = None if regex is None else Grammar("regex", regex)
    return Sampling(**{name: body[name] for name in names if name in body}, grammar=grammar)


def test_a_pair_has_no_log_probabilities_of_what_it_reads() -> None:
    with run_server(pair().with_drafter("aggressive"), ServerSettings(model_names=(NAME,))) as server:
        for fields, word in (
            ({"prompt_logprobs": 1}, "the input of an encoder has no log-probabilities"),
            ({"echo": True, "logprobs": 1}, "the input of an encoder has no log-probabilities"),
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": []}, "prompt"),
        ):
            refused = server.post("/v1/completions", BODY | fields)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert word in message
            assert "\n" not in message
        body = BODY | {"temperature": 0}
        said = server.complete(**body)["choices"][0]["text"]
        assert server.complete(**body, echo=True)["choices"][0]["text"] == BODY["prompt"] + said
        silent = server.complete(**body | {"max_tokens": 0}, echo=True)["choices"][0]
        assert (silent["text"], silent["finish_reason"]) == (BODY["prompt"], "length")
        answer = server.chat("hello", max_tokens=5, temperature=0, ignore_eos=True)  # role: content lines
        assert answer["usage"]["completion_tokens"] == 5
        assert server.is_idle()


def test_a_chat_without_a_template_is_refused_where_plain_lines_are_not_wanted() -> None:
    with run_server(
        pair().with_drafter("ngram"), ServerSettings(model_names=(NAME,), has_plain_template=False)
    ) as server:
        refused = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        assert refused.status_code == 400
        assert "template" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["decoder", "pair"])
@pytest.mark.parametrize("method", ["suffix", "suffix+ngram"])
def test_a_tenant_sees_and_feels_nothing_of_another(method: str, kind: str) -> None:
    """The other tenant has had the very output that follows. Traces and figures equal those without it to the byte,
    and metrics hold no text."""
    body = BODY | {"temperature": 0, "foredraft_trace": True, "speculative_metrics": True}
    prefix = "suffix." if "+" in method else ""
    store = {name.replace("suffix.", prefix): value for name, value in STORE.items()}
    spec = {"method": method, "num_speculative_tokens": 5, **store}
    if "+" in method:  # a choice by measured time is never twice the same, alone or not
        spec["mode"] = "merge"

    def complete_with_salts(*salts: str) -> dict[str, Any]:
        """Complete once for each salt; return the last answer."""
        with run_server((pair() if kind == "pair" else make_small_llm()).with_drafter(spec)) as server:
            answers = [server.complete(**body, cache_salt=salt) for salt in salts]
            metrics = server.get("/metrics").text
        pieces = {piece for piece in answers[0]["choices"][0]["foredraft_trace"]["pieces"] if len(piece) > 2}
        labels = metrics.replace("foredraft", "").replace("vllm", "")
        assert not [piece for piece in pieces if f'"{piece}' in labels]
        assert not any(salt in metrics for salt in salts)
        last = answers[-1]
        return {"choices": last["choices"], "metrics": last["metrics"], "usage": last["usage"]}

    alone = complete_with_salts("ours-7391")
    assert complete_with_salts("theirs-5526", "ours-7391") == alone
    assert complete_with_salts("ours-7391", "ours-7391") != alone
