"""The field `suffix`: prompts of every family, text that spells control tokens, echo, ends, and refusals."""

from collections.abc import Iterator
from functools import cache

import openai
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from foredraft import LLM
from foredraft.server.errors import ApiError
from foredraft.server.infill import FORMATS, InfillTokens
from foredraft.server.vocabulary import ServerVocabulary
from tests.support import tiny_models
from tests.support.server.live_server import NAME, RunningServer, run_server

BYTE_LEVEL = [form for form in FORMATS if not form.adds_space]
SPACED = [form for form in FORMATS if form.adds_space]
QWEN = FORMATS[0]


def list_names(form) -> list[str]:
    return [name for name in (form.prefix, form.suffix, form.middle) if name]


@cache
def make_byte_level(names: tuple[str, ...], is_special: bool = False) -> PreTrainedTokenizerFast:
    """Make the small tokenizer with further tokens; those of Qwen2.5-Coder are added and not special."""
    backend = Tokenizer.from_str(tiny_models.tokenizer().backend_tokenizer.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    made.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in names])
    return made


@cache
def make_spaced(names: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Make a tokenizer that begins a text with <s> and adds a space to it, as those of Llama and Mistral do."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef"]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return made


def spell(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids)


def encode(tokenizer: PreTrainedTokenizerFast, prompt, suffix: str, begins: bool = True) -> list[int]:
    vocabulary = ServerVocabulary(tokenizer, len(tokenizer))
    return InfillTokens.find(vocabulary).encode(vocabulary, prompt, suffix, begins)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("form", BYTE_LEVEL, ids=lambda form: form.prefix)
def test_prefix_then_suffix_then_the_middle(form, is_special: bool):
    tokenizer = make_byte_level(tuple(list_names(form)), is_special)
    ids = encode(tokenizer, "ab", "c")
    assert spell(tokenizer, ids) == [form.prefix, "a", "b", form.suffix, "c", form.middle]
    assert encode(tokenizer, tokenizer("ab").input_ids, "c") == ids


def test_code_llama_and_codestral_begin_a_text_and_add_no_space_before_the_suffix():
    llama, mistral = (make_spaced(tuple(list_names(form))) for form in SPACED)
    assert spell(llama, encode(llama, "ab", "c d")) == [
        "<s>", "▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "▁", "d", "▁<MID>",
    ]  # fmt: skip
    assert spell(mistral, encode(mistral, "ab", "c")) == ["<s>", "[SUFFIX]", "c", "[PREFIX]", "▁", "a", "b"]
    assert spell(mistral, encode(mistral, "", "c", begins=False)) == ["[SUFFIX]", "c", "[PREFIX]"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.prefix)
def test_a_text_cannot_spell_control_tokens(form):
    """Guards a suffix that closes the gap itself, and a prompt that ends the request's own prefix."""
    names = tuple(list_names(form))
    tokenizer = make_spaced(names) if form.adds_space else make_byte_level(names)
    outer = "<s>" if form.adds_space else "<stop>"
    text = f"a{''.join(names)}{outer}b"
    found = spell(tokenizer, encode(tokenizer, text, text))
    for name in names:
        assert found.count(name) == 1
    assert found.count(outer) == int(form.adds_space)  # the beginning of the text alone


def test_a_tokenizer_without_such_tokens_is_refused():
    for tokenizer in (tiny_models.tokenizer(), None):
        with pytest.raises(ApiError, match="suffix needs fill-in-the-middle tokens") as refused:
            InfillTokens.find(ServerVocabulary(tokenizer, 320))
        assert (refused.value.status, refused.value.param) == (400, "suffix")


@pytest.fixture(scope="module")
def coder() -> Iterator[RunningServer]:
    tokenizer = make_byte_level((*list_names(QWEN), "<|file_sep|>"))
    with run_server(LLM(tiny_models.llama(len(tokenizer), seed=5), "ngram", tokenizer=tokenizer)) as found:
        yield found


BODY = {"prompt": "def ab", "suffix": "return", "max_tokens": 12, "seed": 3, "ignore_eos": True}


def test_a_server_fills_in_streamed_and_not(coder: RunningServer):
    tokenizer = coder.service.llm.tokenizer
    answer = coder.post_ok("/v1/completions", **BODY, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == encode(tokenizer, "def ab", "return")
    assert answer["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
    chunks = coder.chunks("/v1/completions", **BODY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    without = coder.post_ok("/v1/completions", **BODY | {"suffix": ""}, return_token_ids=True)["choices"][0]
    assert without["prompt_token_ids"] == tokenizer("def ab").input_ids
    several = coder.post_ok("/v1/completions", **BODY | {"prompt": ["def ab", ""]}, return_token_ids=True)["choices"]
    assert several[0]["text"] == choice["text"]
    assert several[1]["prompt_token_ids"] == encode(tokenizer, "", "return")


def test_the_sdk_sends_a_suffix_and_echo_repeats_the_prompt_alone(coder: RunningServer):
    with openai.OpenAI(base_url=f"{coder.url}/v1", api_key="unused", max_retries=0) as client:
        asked = {"model": NAME, "prompt": "def ab", "suffix": "return", "max_tokens": 12, "seed": 3}
        plain = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
        echoed = client.completions.create(**asked, echo=True, extra_body={"ignore_eos": True}).choices[0].text
        assert echoed == "def ab" + plain
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            client.completions.create(**asked, extra_body={"truncate_prompt_tokens": 4})


def test_the_middle_ends_at_the_tokens_of_the_format(coder: RunningServer):
    token = coder.service.llm.tokenizer.convert_tokens_to_ids("<|file_sep|>")
    body = BODY | {"logit_bias": {str(token): 100}, "ignore_eos": False}
    [choice] = coder.post_ok("/v1/completions", **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", token)
    [choice] = coder.post_ok("/v1/completions", **body | {"suffix": ""})["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"suffix": 3}, "suffix"),
        ({"suffix": "a" * 100_000}, "suffix"),
        ({"prompt": [99999]}, "prompt"),
    ],
)
def test_what_goes_with_no_suffix_is_a_400_with_its_field(coder: RunningServer, fields: dict, param: str):
    refused = coder.post("/v1/completions", BODY | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_model_without_such_tokens_and_a_chat_refuse_the_field(server: RunningServer):
    refused = server.post("/v1/completions", BODY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    assert "fill-in-the-middle tokens" in refused.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}
    refused = server.post("/v1/chat/completions", chat)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
