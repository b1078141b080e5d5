"""Tokenizers whose native code panics, which Python sees as a BaseException: an error of the request, never more."""

from collections.abc import Iterator
from functools import cache

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from foredraft import LLM, ForedraftError, Sampling
from foredraft.errors import is_panic
from foredraft.server.settings import ServerSettings
from foredraft.tokenization.detokenizer import WindowDetokenizer
from tests.support import tiny_models
from tests.support.server.live_server import NAME, RunningServer, run_server

PANIC = "a" * 60 + "b"  # beyond the number of ways that the pattern may try


@cache
def panicking() -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "<end>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_models.llama(3, seed=1), None, tokenizer=panicking())


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with run_server(
        llm.with_drafter(None), ServerSettings(model_names=(NAME,), chat_template="{{ messages[0].content }}")
    ) as found:
        yield found


def test_the_tokenizer_does_panic():
    with pytest.raises(BaseException, match="retry-limit") as caught:
        panicking()(PANIC)
    assert is_panic(caught.value)
    assert not isinstance(caught.value, Exception)


def test_the_library_raises_its_own_error(llm: LLM):
    with pytest.raises(ForedraftError, match="the tokenizer cannot read this text"):
        llm.generate([PANIC], Sampling(max_tokens=2))
    with pytest.raises(ForedraftError, match="the tokenizer cannot read this text"):
        llm.generate(["a"], Sampling(max_tokens=2, bad_words=(PANIC,)))
    assert len(llm.generate(["a"], Sampling(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_the_server_answers_400(server: RunningServer):
    message = [{"role": "user", "content": PANIC}]
    for path, body in (
        ("/v1/completions", {"prompt": PANIC}),
        ("/v1/completions", {"prompt": "a", "echo": True, "prediction": {"type": "content", "content": PANIC}}),
        ("/v1/completions", {"prompt": "a", "bad_words": [PANIC]}),
        ("/v1/chat/completions", {"messages": message}),
        ("/tokenize", {"prompt": PANIC}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, answer.text
        assert "the tokenizer cannot read this text" in answer.json()["error"]["message"]
    assert server.complete("a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_a_panic_anywhere_else_is_a_500_with_a_body(server: RunningServer):
    class Panics:
        def decode(self, *_: object, **__: object) -> str:
            return panicking()(PANIC)

    vocabulary = server.service.vocabulary
    real, vocabulary.tokenizer = vocabulary.tokenizer, Panics()
    try:
        answer = server.post("/detokenize", {"tokens": [1]})
    finally:
        vocabulary.tokenizer = real
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_panic_while_decoding_is_an_error_that_the_engine_survives():
    class Panics:
        backend_tokenizer = None

        def decode(self, *_: object, **__: object) -> str:
            return panicking()(PANIC)

    with pytest.raises(ForedraftError, match="cannot decode"):
        WindowDetokenizer(Panics(), [1])
