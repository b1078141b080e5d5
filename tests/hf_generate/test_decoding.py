"""generate(custom_generate=foredraft.speculate(...)) against generate() itself."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
    set_seed,
)

import foredraft
from foredraft import ForedraftError, zoo
from foredraft.drafter_factory import find_default_method
from foredraft.models.loading import load_tokenizer

PROMPT = 12


def zoo_tokenizer():
    return load_tokenizer(str(zoo.find_target_folder(zoo.DEFAULT_TARGET)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=96, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


class Tilt(LogitsProcessor):
    """A caller's processor: it favours the token after the last one."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids[:, -1:] + 1) % scores.shape[-1]
        return scores.scatter_add(1, favoured, torch.full_like(favoured, 2, dtype=scores.dtype))


@pytest.fixture(scope="module")
def batch():
    """Three prompts with a period, so that prompt lookup finds something; the second is padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(1, 96, (3, PROMPT // 2)).repeat(1, 2)
    mask = torch.ones_like(ids)
    ids[1, :4] = 0
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 20},
        {"min_length": 30},
        {"bad_words_ids": [[5], [3, 4]]},
        {"sequence_bias": {(7,): 3.0, (9,): -2.0}},
        {"sequence_bias": {(7, 9): 3.0}},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [3, 5, 8]},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row + 1, 40 + 10 * row))},
        {"logits_processor": LogitsProcessorList([Tilt()])},
    ],
    ids="+".join,
)
def test_greedy_equals_plain_generate(model, batch, options):
    expected = model.generate(**batch, max_new_tokens=40, do_sample=False, **copy.deepcopy(options))
    ours = model.generate(
        **batch, max_new_tokens=40, do_sample=False, **options, custom_generate=foredraft.speculate("ngram")
    )
    assert ours.tolist() == expected.tolist()


def test_options_change_the_output(model, batch):
    """Anti-vacuity: the equality above would also hold for options that no code reads."""
    loop = foredraft.speculate("ngram")
    base = model.generate(**batch, max_new_tokens=30, do_sample=False, custom_generate=loop)
    biased = model.generate(
        **batch, max_new_tokens=30, do_sample=False, sequence_bias={(7,): 30.0}, custom_generate=loop
    )
    assert base.tolist() != biased.tolist()


def test_torch_seed_governs_sampling(model, batch):
    loop = foredraft.speculate("ngram")

    def sample(seed):
        set_seed(seed)
        return model.generate(
            **batch, max_new_tokens=12, do_sample=True, top_p=0.9, num_return_sequences=2, custom_generate=loop
        ).tolist()

    first = sample(1)
    assert len(first) == 6
    assert first == sample(1)
    assert first != sample(2)
    assert first[0] != first[1], "two samples of one prompt must differ"


def test_the_model_keeps_its_own_attention(model, batch):
    """A model left with our attention fails at its next plain forward pass."""
    before = model.config._attn_implementation
    model.generate(**batch, max_new_tokens=4, do_sample=False, custom_generate=foredraft.speculate("ngram"))
    assert model.config._attn_implementation == before
    model(batch["input_ids"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beam"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
        ({"do_sample": True, "epsilon_cutoff": 0.01}, "EpsilonLogitsWarper"),
        ({"stop_strings": ["x"], "tokenizer": object()}, None),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(model, batch, options, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as raised:  # noqa: PT011 (the last case is transformers' own refusal)
            model.generate(**batch, max_new_tokens=4, custom_generate=foredraft.speculate("ngram"), **options)
    if words is not None:
        assert isinstance(raised.value, ForedraftError)
        assert words in str(raised.value)


def test_a_dict_is_returned_when_asked_for(model, batch):
    out = model.generate(
        **batch, max_new_tokens=4, do_sample=False, return_dict_in_generate=True,
        custom_generate=foredraft.speculate("ngram"),
    )  # fmt: skip
    assert out.sequences.shape == (3, PROMPT + 4)


class Collector(TextStreamer):
    def __init__(self):
        self.tokens, self.is_ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.is_ended = True


@pytest.mark.parametrize("place", ["speculate", "generate", "foredraft.generate"])
def test_a_streamer_gets_the_prompt_and_every_token(model, batch, place):
    """Fault: a streamer given to generate() received the prompt, no token and no end; its reader waited for ever."""
    streamer, ids = Collector(), batch["input_ids"][:1]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    if place == "speculate":
        out = model.generate(ids, **given, custom_generate=foredraft.speculate("ngram", streamer=streamer))
    elif place == "generate":
        out = model.generate(ids, **given, streamer=streamer, custom_generate=foredraft.speculate("ngram"))
    else:
        out = foredraft.generate(model, ids, **given, streamer=streamer)
    assert streamer.is_ended
    assert streamer.tokens == out[0].tolist()


def test_two_streamers_are_refused(model, batch):
    loop = foredraft.speculate("ngram", streamer=Collector())
    with pytest.raises(ForedraftError, match="give one"):
        model.generate(batch["input_ids"][:1], max_new_tokens=2, streamer=Collector(), custom_generate=loop)


def test_a_text_iterator_streamer_in_a_thread_ends(tmp_path):
    """The usual recipe of a chat interface."""
    tokenizer = zoo_tokenizer()
    target = LlamaForCausalLM.from_pretrained(zoo.find_target_folder(zoo.DEFAULT_TARGET), dtype=torch.float32)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    inputs = tokenizer("def f(", return_tensors="pt")
    work = {"max_new_tokens": 8, "do_sample": False, "streamer": streamer, "custom_generate": foredraft.speculate()}
    thread = threading.Thread(target=target.generate, args=(inputs.input_ids,), kwargs=work)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert text


def test_an_assistant_model_drafts(model, batch):
    """Fault: assistant_model was dropped without a word."""
    ids = batch["input_ids"][:1]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **given)
    loop = foredraft.speculate()
    assistant = copy.deepcopy(model)
    out = model.generate(ids, **given, assistant_model=assistant, custom_generate=loop)
    assert out.tolist() == expected.tolist()
    [engine] = loop._llms[model].values()
    assert engine.drafter_name == "draft_model"
    with pytest.raises(ForedraftError, match="leave one out"):
        model.generate(ids, **given, assistant_model=assistant, custom_generate=foredraft.speculate("ngram"))


def test_the_default_method_drafts_without_an_assistant(model, batch):
    loop = foredraft.speculate()
    model.generate(**batch, max_new_tokens=2, do_sample=False, custom_generate=loop)
    [engine] = loop._llms[model].values()
    assert engine.drafter_name == find_default_method(None)


def test_stop_strings_end_the_text():
    """Fault: generate() dropped the tokenizer, so that stop_strings could not be used at all."""
    tokenizer = zoo_tokenizer()
    target = LlamaForCausalLM.from_pretrained(zoo.find_target_folder(zoo.DEFAULT_TARGET), dtype=torch.float32)
    inputs = tokenizer("class Queue:\n", return_tensors="pt")
    given = {"max_new_tokens": 40, "do_sample": False, "stop_strings": ["self"], "tokenizer": tokenizer}
    expected = target.generate(inputs.input_ids, **given)
    out = foredraft.generate(target, inputs.input_ids, **given)
    assert out.tolist() == expected.tolist()
    with pytest.raises(ForedraftError, match="tokenizer"):
        foredraft.generate(target, inputs.input_ids, max_new_tokens=4, stop_strings="self")


def test_scores_and_logits_are_those_of_plain_generate(model, batch):
    options = {
        "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True,
        "output_logits": True, "repetition_penalty": 1.2,
    }  # fmt: skip
    expected = model.generate(**batch, **options)
    out = model.generate(**batch, **options, custom_generate=foredraft.speculate("ngram"))
    assert len(out.scores) == len(expected.scores) == 6
    for ours, theirs in [
        *zip(out.scores, expected.scores, strict=True),
        *zip(out.logits, expected.logits, strict=True),
    ]:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_max_time_ends_the_call(model, batch):
    """A time limit that has passed already leaves at most one step; the rest of the row is never generated."""
    ids = batch["input_ids"][:1]
    loop = foredraft.speculate("ngram")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, max_time=1e-9, custom_generate=loop
    )
    assert PROMPT < out.shape[1] < PROMPT + 100


def test_a_processor_that_keeps_state_is_refused(model, batch):
    """It would count drafted tokens that were never accepted."""

    class Counting(LogitsProcessor):
        def __init__(self):
            self.calls = []

        def __call__(self, input_ids, scores):
            self.calls.append(1)
            return scores

    with pytest.raises(ForedraftError, match="Counting keeps state"):
        model.generate(
            **batch, max_new_tokens=4, logits_processor=LogitsProcessorList([Counting()]),
            custom_generate=foredraft.speculate("ngram"),
        )  # fmt: skip


@pytest.mark.parametrize("inputs", ["text", ["text"], [[1, 2]], {"input_ids": torch.ones(1, 2)}])
def test_text_in_place_of_token_ids_is_refused(model, inputs):
    """Fault: a bare AttributeError of transformers."""
    with pytest.raises(ForedraftError, match=r"token ids as a tensor, got \w+; pass \*\*tokenizer"):
        foredraft.generate(model, inputs)


def test_a_model_that_is_not_loaded_is_refused():
    with pytest.raises(ForedraftError, match=r"loaded transformers model, got str; foredraft\.LLM"):
        foredraft.generate("org/model", "text")


@pytest.mark.parametrize("is_one_loop", [True, False])
def test_threads_that_share_a_model_get_the_texts_of_one(model, batch, is_one_loop):
    """Fault: one thread restored the model's attention while the other decoded."""
    prompts = [batch["input_ids"][i : i + 1] for i in (0, 2)]
    given = {"max_new_tokens": 40, "do_sample": False}
    expected = [model.generate(ids, attention_mask=torch.ones_like(ids), **given).tolist() for ids in prompts]
    loops = [foredraft.speculate("ngram")] * 2 if is_one_loop else [foredraft.speculate("ngram") for _ in range(2)]
    before = model.config._attn_implementation

    def work(i):
        ids = prompts[i % 2]
        given_here = {**given, "attention_mask": torch.ones_like(ids)}
        if i < 2:
            return model.generate(ids, **given_here, custom_generate=loops[i]).tolist()
        return loops[i % 2].generate(model, ids, **given_here).tolist()

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(work, [0, 1, 2, 3] * 3))
    assert texts == expected * 6
    assert model.config._attn_implementation == before
