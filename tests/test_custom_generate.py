"""generate(custom_generate=foredraft.speculate(...)) against generate() itself."""

import copy
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TextStreamer, set_seed

import foredraft
from foredraft import ForedraftError

PROMPT = 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=96, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


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
    ],
    ids=str,
)
def test_greedy_equals_plain_generate(model, batch, options):
    expected = model.generate(**batch, max_new_tokens=40, do_sample=False, **copy.deepcopy(options))
    ours = model.generate(
        **batch, max_new_tokens=40, do_sample=False, **options, custom_generate=foredraft.speculate("ngram")
    )
    assert ours.tolist() == expected.tolist()


def test_options_change_the_output(model, batch):
    """Anti-vacuity: the equality above would also hold for options that nobody reads."""
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
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ({"max_time": 3.0}, "MaxTime"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
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


def test_a_streamer_gets_the_prompt_and_every_token(model, batch):
    class Collector(TextStreamer):
        def __init__(self):
            self.tokens, self.is_ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.is_ended = True

    streamer, ids = Collector(), batch["input_ids"][:1]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False,
        custom_generate=foredraft.speculate("ngram", streamer=streamer),
    )  # fmt: skip
    assert streamer.is_ended
    assert streamer.tokens == out[0].tolist()
