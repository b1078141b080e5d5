"""Grown encoder-decoder models: the same function, both stacks deeper, nothing to skip, and drafts of their own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from foredraft import LLM, ForedraftError, Sampling, zoo
from foredraft.bench import methods
from foredraft.bench.grow import (
    BUILT_IN_LABEL,
    BUILT_IN_SEQ2SEQ_LABEL,
    ORIGIN_FIELD,
    find_built_in_origin,
    grow_model,
    grow_to,
    parse_size,
    read_origin,
    read_shape,
    save,
)
from foredraft.bench.grow_pair import T5Shape
from foredraft.bench.grow_shape import choose_shape
from foredraft.drafters.registry import load_methods as registered
from foredraft.models.loading import load_model
from tests.support import tiny_models, tiny_seq2seq

SMALL = T5Shape(  # the built-in one
    hidden=192, intermediate=512, heads=3, head_dim=64, encoder_layers=4, decoder_layers=6, num_up_projections=1,
    buckets=32, embedding_rows=4096,
)  # fmt: skip
WRITERS = (".o.weight", ".wo.weight", "shared.weight")
SOURCES = tiny_seq2seq.sources("t5")


def small(feed: str = "relu", tied: bool = True, layers: int = 3) -> Any:
    """Random, two layers of encoder; not tied as T5 1.1 is not: by its weights and scale, not by its configuration."""
    model = tiny_seq2seq.make_model(
        "t5", layers=layers, feed_forward_proj=feed, tie_word_embeddings=tied, layer_norm_epsilon=0.01,
        ids={"eos_token_id": None},
    )  # fmt: skip
    with torch.no_grad():  # norms of ones would hide a scale that is applied twice, or to the wrong norm
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(0.35 * torch.randn_like(model.shared.weight))
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def grow(model: Any, ratio: int = 4, further: int = 2) -> Any:
    shape = replace(T5Shape.from_model(model).widen(ratio, further), intermediate=128 * ratio)
    return grow_model(model, shape, "a test model")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        asked = torch.arange(40)[None]
        return model(input_ids=asked * 7 % 61, decoder_input_ids=asked * 11 % 61).logits


def texts(model: Any, fused: bool) -> list[list[int]]:
    done = LLM(model, None, fused=fused).generate(SOURCES, Sampling(max_tokens=16, temperature=0))
    return [list(one.token_ids) for one in done]


@pytest.mark.parametrize(("feed", "tied"), [("relu", True), ("gated-gelu", False), ("gated-silu", True)])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_the_logits_stay(feed, tied, ratio):
    model = small(feed, tied)
    assert model.config.scale_decoder_outputs is tied
    torch.testing.assert_close(logits(grow(model, ratio)), logits(model), rtol=0, atol=1e-11)


def test_in_float32_too():
    model = small().float()
    torch.testing.assert_close(logits(grow(model)), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("feed", "tied"), [("relu", True), ("gated-gelu", False)])
@pytest.mark.parametrize("fused", [False, True])
def test_the_greedy_texts_stay_in_bfloat16(feed, tied, fused):
    model = small(feed, tied)
    with torch.no_grad():  # attention so sharp that one rounding decides it would be noise, and is refused
        for name, weight in model.named_parameters():
            if name.endswith(".q.weight"):
                weight.mul_(0.3)
    model = model.to(torch.bfloat16)
    expected = texts(model, fused)
    assert len({token for one in expected for token in one}) > 4
    assert texts(grow(model), fused) == expected


@pytest.mark.parametrize(("feed", "tied"), [("relu", True), ("gated-gelu", False), ("gated-silu", True)])
def test_the_count_is_that_of_the_shape(feed, tied):
    for model in (small(feed, tied), grow(small(feed, tied))):
        assert sum(p.numel() for p in model.parameters()) == T5Shape.from_model(model).parameters


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_both_stacks_become_deeper_in_proportion(layers):
    model = grow(small(layers=layers), further=max(2, layers))
    assert (len(model.encoder.block), len(model.decoder.block)) == (4, 2 * layers)


@pytest.mark.parametrize(("feed", "tied"), [("relu", True), ("gated-gelu", False)])
def test_what_reads_the_hidden_state_has_no_zero(feed, tied):
    for name, weight in grow(small(feed, tied)).named_parameters():
        assert bool((weight == 0).any()) is name.endswith(WRITERS), name


def test_random_weights_are_no_larger_than_usual():
    model = small()
    bigger = grow(model)
    for name in (
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "decoder.block.0.layer.1.EncDecAttention.q",
    ):
        old, new = model.get_parameter(f"{name}.weight"), bigger.get_parameter(f"{name}.weight")
        assert new[: len(old), old.shape[1] :].abs().max() <= old.std()


@pytest.mark.parametrize("size", ["8M", "20M", "60M", "120M", "220M", "770M", "3B"])
def test_the_size_asked_for_is_met(size):
    wanted = parse_size(size)
    shape = choose_shape(SMALL, wanted)
    assert abs(shape.parameters / wanted - 1) < 0.03
    assert shape.encoder_layers >= SMALL.encoder_layers
    assert shape.decoder_layers >= SMALL.decoder_layers
    assert shape.intermediate >= SMALL.intermediate
    assert shape.head_dim == SMALL.head_dim


def test_less_than_the_model_has_is_refused():
    with pytest.raises(ForedraftError, match=r"parameters cannot be grown to 1\.0M"):
        choose_shape(SMALL, 1_000_000)


def test_an_encoder_alone_is_refused():
    with pytest.raises(ForedraftError, match="a T5 without its decoder cannot be grown"):
        grow_model(T5EncoderModel(small().config), SMALL, "a test model")


def test_other_pairs_are_refused():
    model = small()
    model.config.model_type = "bart"
    with pytest.raises(ForedraftError, match=r"only Llama models without biases and T5 models can be grown.*'bart'"):
        grow_model(model, SMALL, "a test model")


@pytest.mark.parametrize(("feed", "tied"), [("relu", True), ("gated-gelu", False)])
def test_a_saved_model_names_its_origin_and_loads(tmp_path, feed, tied):
    model, out = grow(small(feed, tied).to(torch.bfloat16)), tmp_path / "out"
    save(model, tiny_models.tokenizer(), out, "a test model")
    again = load_model(str(out), "auto", torch.device("cpu"))
    assert again.dtype == torch.bfloat16
    assert read_origin(again.config) == "a test model"
    assert torch.equal(logits(again), logits(model))
    card = (out / "README.md").read_text()
    assert "a test model" in card
    assert "3 encoder layers and 5 decoder layers" in card


def test_the_built_in_pair_grows_and_keeps_its_text_and_its_draft(tmp_path):
    shape = grow_to("builtin-seq2seq", parse_size("8M"), tmp_path / "out")
    big = LLM(tmp_path / "out", None)
    config = big.target.model.config
    assert big.target.model.dtype == torch.bfloat16
    assert getattr(config, ORIGIN_FIELD).startswith(BUILT_IN_SEQ2SEQ_LABEL)
    assert read_shape(big.target.model) == shape
    assert big.num_parameters == shape.parameters

    known = sorted(registered())
    asked = methods.parse_all(["aggressive", "draft_model:4"], known)
    found = list(methods.attach_models(asked, config, None))
    assert found[1].spec["model"] == str(zoo.find_folder("seq2seq_draft"))
    assert next(methods.attach_models(asked[1:], config, "mine")).spec["model"] == "mine"

    sampling = Sampling(max_tokens=24, temperature=0)
    source = "Retrun the numbr of items in teh list."
    expected = LLM("builtin-seq2seq", None).generate(source, sampling)[0].text
    for llm in (big, *(big.with_drafter(dict(method.spec)) for method in found)):
        assert llm.generate(source, sampling)[0].text == expected


def test_the_origin_tells_which_built_in_target_it_was():
    assert (
        find_built_in_origin(T5Config(**{ORIGIN_FIELD: f"{BUILT_IN_SEQ2SEQ_LABEL} (5.0M parameters)"}))
        == "builtin-seq2seq"
    )
    assert (
        find_built_in_origin(T5Config(**{ORIGIN_FIELD: f"{BUILT_IN_LABEL} (20.5M parameters)"})) == zoo.DEFAULT_TARGET
    )
    assert find_built_in_origin(T5Config(**{ORIGIN_FIELD: "another model"})) is None
    assert find_built_in_origin(T5Config()) is None
