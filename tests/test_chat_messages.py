"""Chat messages to prompt tokens, with a real tokenizer and template."""

import asyncio
import copy
import logging

import pytest

from foredraft import LLM, ForedraftError, Sampling, zoo
from foredraft.chat import PLAIN_TEMPLATE, encode_chat, has_chat_template, list_conversations
from foredraft.models.loading import load_tokenizer
from tests.support import tiny_models

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<bot>' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(zoo.find_target_folder(zoo.DEFAULT_TARGET)))


def test_a_conversation_is_rendered_by_the_template(tokenizer):
    ids = encode_chat(tokenizer, MESSAGES, chat_template=TEMPLATE)
    assert tokenizer.decode(ids) == "<system>Be brief.\n<user>Say hello.\n<bot>"
    open_end = encode_chat(tokenizer, MESSAGES, chat_template=TEMPLATE, continue_final_message=True)
    assert tokenizer.decode(open_end) == "<system>Be brief.\n<user>Say hello."
    plain = encode_chat(tokenizer, MESSAGES, chat_template=PLAIN_TEMPLATE)
    assert tokenizer.decode(plain).endswith("user: Say hello.\n\nassistant:")


def test_template_options_reach_the_template(tokenizer):
    ids = encode_chat(tokenizer, MESSAGES, chat_template="{{ mood }}", template_options={"mood": "calm"})
    assert tokenizer.decode(ids) == "calm"


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        (MESSAGES, None, "no chat template"),
        ("hello", TEMPLATE, "must be a list"),
        ([], TEMPLATE, "must be a list"),
        ([{"role": "user"}], TEMPLATE, "message 0"),
        (["hello"], TEMPLATE, "message 0"),
        ([{"role": "user", "content": [{"type": "image", "url": "x.png"}]}], TEMPLATE, "part 'image'.*no images"),
        (MESSAGES, "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (MESSAGES, "{% for %}", "refuses"),
    ],
)
def test_what_cannot_be_rendered_is_one_line(tokenizer, messages, template, words):
    with pytest.raises(ForedraftError, match=words) as raised:
        encode_chat(tokenizer, messages, chat_template=template)
    assert "\n" not in str(raised.value)


def test_a_model_without_a_tokenizer_says_so():
    with pytest.raises(ForedraftError, match="needs a tokenizer"):
        encode_chat(None, MESSAGES)


def test_an_encoder_reads_a_closed_conversation(tokenizer):
    open_end = encode_chat(tokenizer, MESSAGES, chat_template=TEMPLATE)
    closed = encode_chat(tokenizer, MESSAGES, chat_template=TEMPLATE, is_source=True)
    assert closed == [*open_end, tokenizer.eos_token_id]


def test_one_conversation_or_several():
    assert list_conversations(MESSAGES) == [MESSAGES]
    assert list_conversations([MESSAGES, MESSAGES[1:]]) == [MESSAGES, MESSAGES[1:]]


def test_llm_chat_answers_what_generate_answers_to_the_rendered_prompt(tokenizer):
    llm = LLM()
    sampling = Sampling(max_tokens=8, temperature=0)
    assert not llm.has_chat_template
    assert not has_chat_template(tokenizer)
    answers = llm.chat([MESSAGES, MESSAGES[1:]], sampling, chat_template=TEMPLATE)
    prompts = [encode_chat(tokenizer, m, chat_template=TEMPLATE) for m in (MESSAGES, MESSAGES[1:])]
    assert [a.text for a in answers] == [c.text for c in llm.generate(prompts, sampling)]
    with pytest.raises(ForedraftError, match="no chat template"):
        llm.chat(MESSAGES)


def test_a_shorter_context_ends_the_text_there_and_a_longer_one_is_refused():
    llm = LLM(drafter=None, max_model_len=32)
    [completion] = llm.generate([list(range(5, 25))], Sampling(max_tokens=100, temperature=0, ignore_eos=True))
    assert len(completion.token_ids) == 12
    assert llm.context_length == 32
    with pytest.raises(ForedraftError, match="max_model_len must lie in"):
        LLM(drafter=None, max_model_len=1 << 20)


HINT = "the model has a chat template"


@pytest.fixture
def instruct(caplog) -> LLM:
    caplog.set_level(logging.WARNING, logger="foredraft.llm")
    tokenizer = copy.deepcopy(tiny_models.tokenizer())  # the original is shared by all tests
    tokenizer.chat_template = TEMPLATE
    return LLM(tiny_models.llama(len(tokenizer), seed=5), None, tokenizer=tokenizer)


def test_text_for_an_instruct_model_logs_one_hint(instruct, caplog):
    sampling = Sampling(max_tokens=1)
    instruct.generate(["the end", [5, 6]], sampling)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("foredraft.llm", "WARNING")
    assert HINT in record.message
    assert "LLM.chat" in record.message
    instruct.generate("again", sampling)
    list(instruct.stream("again", sampling))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("how", ["stream", "astream"])
def test_streams_log_the_hint_too(instruct, caplog, how):
    async def read() -> None:
        async for _ in instruct.astream("the end", Sampling(max_tokens=1)):
            pass

    if how == "stream":
        list(instruct.stream("the end", Sampling(max_tokens=1)))
    else:
        asyncio.run(read())
    assert [HINT in record.message for record in caplog.records] == [True]


def test_chats_token_ids_and_prepared_requests_log_no_hint(instruct, caplog):
    sampling = Sampling(max_tokens=1)
    instruct.chat(MESSAGES, sampling)
    instruct.generate([5, 6], sampling)
    instruct.prepare("the end", sampling)  # as the server does
    assert caplog.records == []


def test_text_for_a_model_without_a_template_logs_no_hint(caplog):
    caplog.set_level(logging.WARNING, logger="foredraft.llm")
    tokenizer = tiny_models.tokenizer()
    LLM(tiny_models.llama(len(tokenizer), seed=5), None, tokenizer=tokenizer).generate("a", Sampling(max_tokens=1))
    assert caplog.records == []
