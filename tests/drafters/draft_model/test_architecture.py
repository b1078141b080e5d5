"""Sizes of new draft models: those of the target by default, and what cannot be made smaller."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config

from foredraft.drafters.draft_model.architecture import DraftSize, read_size, shrink_config
from foredraft.errors import ForedraftError
from tests.support import tiny_models, tiny_seq2seq

TEXT_FAMILIES = tuple(family for family in tiny_seq2seq.FAMILIES if family != "whisper")


def make_config(family):
    return tiny_seq2seq.make_model(family, layers=6, width=64).config


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_draft_with_an_encoder_has_half_of_it_and_a_sixth_of_the_decoder(family):
    config = make_config(family)
    before = config.to_dict()
    small = shrink_config(config, DraftSize())
    assert read_size(config) == DraftSize(6, 64, 2)
    assert read_size(small) == DraftSize(1, 32, 1)
    assert config.to_dict() == before
    assert (small.model_type, small.vocab_size) == (config.model_type, config.vocab_size)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_smaller_model_of_a_family_is_one_that_runs(family):
    model = AutoModelForSeq2SeqLM.from_config(
        shrink_config(make_config(family), DraftSize(layers=2, hidden=48, encoder_layers=3))
    )
    decoder, encoder = model.get_decoder(), model.get_encoder()
    stacks = [stack.block if hasattr(stack, "block") else stack.layers for stack in (encoder, decoder)]
    assert [len(stack) for stack in stacks] == [3, 2]
    out = model(input_ids=torch.tensor([[5, 6]]), decoder_input_ids=torch.tensor([[1, 7, 8]]))
    assert out.logits.shape == (1, 3, tiny_seq2seq.VOCAB)
    projections = [module for name, module in model.named_modules() if name.endswith(("q_proj", ".q"))]
    assert projections[0].weight.shape == (48, 48)  # three heads of the target's width 16


def test_a_draft_without_an_encoder_has_its_targets_head_size():
    config = tiny_models.llama().config
    small = shrink_config(config, DraftSize(hidden=24))
    assert read_size(small) == DraftSize(1, 24)
    assert small.num_attention_heads == 3
    assert AutoModelForCausalLM.from_config(small).model.layers[0].self_attn.head_dim == 8


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (DraftSize(hidden=20), "hidden must be a multiple of the head size 16, got 20"),
        (DraftSize(layers=-1), "layers must be positive, got -1"),
        (DraftSize(encoder_layers=-2), "layers must be positive, got -2"),
    ],
)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_impossible_sizes_are_refused(family, size, message):
    with pytest.raises(ForedraftError, match=message):
        shrink_config(make_config(family), size)


def test_encoder_layers_without_an_encoder_are_refused():
    with pytest.raises(ForedraftError, match="type llama have no encoder; leave encoder_layers out"):
        shrink_config(tiny_models.llama().config, DraftSize(encoder_layers=2))


def test_an_architecture_with_other_names_is_refused():
    with pytest.raises(ForedraftError, match="give a whole configuration as draft_config"):
        shrink_config(GPT2Config(), DraftSize())
