"""Grown models: the same function, the requested size, no layer that could be skipped, and a name with their source."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from foredraft import LLM, ForedraftError, Sampling
from foredraft.bench.grow import ORIGIN_FIELD, grow_model, parse_size, read_origin, save
from foredraft.bench.grow_llama import LlamaShape
from foredraft.bench.grow_shape import choose_shape
from foredraft.models.loading import load_model
from tests.support import tiny_models

SMALL = LlamaShape(hidden=384, intermediate=1024, heads=6, kv_heads=2, layers=12, head_dim=64, embedding_rows=4096)
PROMPT = [5, 9, 3, 44, 12]


def small(tied: bool = False, kv_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=128, initializer_range=0.3, rms_norm_eps=0.01,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():  # norms of ones would hide a scale that is applied twice, or to the wrong norm
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def larger(shape: LlamaShape, ratio: int, layers: int) -> LlamaShape:
    return replace(
        shape, hidden=ratio * shape.hidden, intermediate=128 * ratio, heads=ratio * shape.heads,
        kv_heads=ratio * shape.kv_heads, layers=layers,
    )  # fmt: skip


def grow(model: LlamaForCausalLM, ratio: int = 4, layers: int = 5) -> LlamaForCausalLM:
    return grow_model(model, larger(LlamaShape.from_model(model), ratio, layers), "a test model")


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(40)[None] % 61).logits


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 2), (False, 1), (True, 4)])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_the_logits_stay(tied, kv_heads, ratio):
    model = small(tied, kv_heads)
    torch.testing.assert_close(logits(grow(model, ratio)), logits(model), rtol=0, atol=1e-11)


def test_in_float32_too():
    model = small().float()
    torch.testing.assert_close(logits(grow(model)), logits(model), rtol=0, atol=1e-4)


def test_the_greedy_text_stays():
    model = small()
    texts = [
        LLM(m, None).generate([PROMPT], Sampling(max_tokens=40, temperature=0))[0].token_ids
        for m in (model, grow(model))
    ]
    assert texts[0] == texts[1]


def test_the_count_is_that_of_the_shape():
    for tied in (True, False):
        model = grow(small(tied))
        assert sum(p.numel() for p in model.parameters()) == LlamaShape.from_model(model).parameters


def test_what_reads_the_hidden_state_has_no_zero():
    for name, weight in grow(small()).named_parameters():
        is_writer = name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight"))
        assert bool((weight == 0).any()) is is_writer, name


def test_random_weights_are_no_larger_than_usual():
    """A quantised row takes its scale from its largest weight: a larger one would cost the original its precision."""
    model = small()
    old, new = model.model.layers[0].mlp.up_proj.weight, grow(model).model.layers[0].mlp.up_proj.weight
    assert new[: len(old), old.shape[1] :].abs().max() <= old.std()


@pytest.mark.parametrize("size", ["22M", "40M", "150M", "430M", "1B", "3B"])
def test_the_size_asked_for_is_met(size):
    wanted = parse_size(size)
    shape = choose_shape(SMALL, wanted)
    assert abs(shape.parameters / wanted - 1) < 0.02
    assert shape.layers >= SMALL.layers
    assert shape.intermediate >= SMALL.intermediate
    assert shape.heads // shape.kv_heads == SMALL.heads // SMALL.kv_heads


def test_a_size_is_reached_in_width_before_depth():
    shape = choose_shape(SMALL, 430_000_000)
    assert (shape.hidden, shape.heads, shape.kv_heads) == (1536, 24, 8)
    assert shape.layers < 24


def test_less_than_the_model_has_is_refused():
    with pytest.raises(ForedraftError, match=r"20\.5M parameters cannot be grown to 10\.0M"):
        choose_shape(SMALL, 10_000_000)


@pytest.mark.parametrize(("text", "size"), [("430M", 430_000_000), ("1.5b", 1_500_000_000), (" 7000 ", 7000)])
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "430MB", "-1M", "0", "1e9", "many"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ForedraftError, match="is no number of parameters"):
        parse_size(text)


def test_other_architectures_are_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ForedraftError, match=r"only Llama models without biases and T5 models can be grown.*'gpt2'"):
        grow_model(model, SMALL, "a test model")


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_a_llama_with_biases_is_refused(name):
    model = small()
    setattr(model.config, name, True)
    with pytest.raises(ForedraftError, match="a Llama model with biases cannot be grown"):
        grow_model(model, SMALL, "a test model")


def test_a_saved_model_names_its_origin_and_loads(tmp_path):
    model, out = grow(small(tied=True).to(torch.bfloat16)), tmp_path / "out"
    save(model, tiny_models.tokenizer(), out, "a test model")
    again = load_model(str(out), "auto", torch.device("cpu"))
    assert again.dtype == torch.bfloat16
    assert read_origin(again.config) == "a test model"
    assert torch.equal(logits(again), logits(model))
    assert "a test model" in (out / "README.md").read_text()
    assert ORIGIN_FIELD in (out / "README.md").read_text()
    assert (out / "tokenizer.json").exists()
    with pytest.raises(ForedraftError, match="not an empty folder"):
        save(model, None, out, "a test model")


def test_an_ordinary_model_was_grown_from_nothing():
    assert read_origin(small().config) is None
