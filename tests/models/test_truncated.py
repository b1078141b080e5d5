"""A model's first layers with its own norm and head: equal states at that boundary and equal keys and values, with
the model unchanged. In native code, the bits of a model that has no more layers.
"""

import copy
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.hidden_states import find_decoder_layers
from foredraft.models.truncated import Truncated, count_weights
from foredraft.models.truncated_modules import Adapter, find_final_norm, truncate_model
from foredraft.tree import TokenTree
from tests.models.test_families import random_tree
from tests.support.families import FAMILIES, TINY, PagedModel, compute_reference, make_family, tokens
from tests.support.library_setups import NATIVE

IDS = tokens(30)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EACH_TYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
FUSED = {
    "llama": lambda: hf.LlamaConfig(**TINY | {"num_hidden_layers": 4, "head_dim": 16, "initializer_range": 0.15}),
    "granite": lambda: hf.GraniteConfig(
        **TINY | {"num_hidden_layers": 4, "head_dim": 16, "initializer_range": 0.15}, residual_multiplier=0.4,
        embedding_multiplier=2.5, attention_multiplier=0.2, logits_scaling=3.0, hidden_act="gelu_pytorch_tanh",
    ),
}  # fmt: skip


def adapter(hidden: int, rank: int = 20, dtype: torch.dtype = torch.float32) -> Adapter:
    torch.manual_seed(5)
    found = Adapter(hidden, rank, 1e-6)
    for parameter in found.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return found.to(dtype).eval()


def copy_kv(lm: HFModel) -> dict[int, tuple[Tensor, Tensor]]:
    return {layer: (keys.clone(), values.clone()) for layer, (keys, values) in lm.pool.layers.items()}


def cut(lm: HFModel, layers: int, behind: Adapter | None = None) -> PagedModel:
    paged = PagedModel(lm)
    paged.lm = Truncated(lm, layers, behind)  # type: ignore[assignment]
    return paged


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_can_be_left_after_any_layer(family: str) -> None:
    _, lm = make_family(family)
    width, norm, config = lm.hidden_size, find_final_norm(lm.model), lm.model.config.to_dict()
    whole, states = PagedModel(lm).read({0: IDS}, hidden_layers=(*range(1, lm.num_layers + 1), AFTER_FINAL_NORM))
    by_layer, kept = states.clone().split(width, -1), copy_kv(lm)
    assert norm is not None
    assert torch.equal(norm(by_layer[-2]), by_layer[-1]), "another norm than the last"
    learnt = adapter(width)
    for layers in range(1, lm.num_layers):
        state = by_layer[layers - 1]
        assert torch.equal(cut(lm, layers).read({0: IDS}), lm.compute_logits(norm(state)))
        assert sorted(lm.pool.layers) == list(range(layers)), "other layers wrote too"
        for layer, pair in copy_kv(lm).items():
            assert all(map(torch.equal, pair, kept[layer]))
        assert torch.equal(cut(lm, layers, learnt).read({0: IDS}), lm.compute_logits(norm(learnt(state))))
    assert torch.equal(PagedModel(lm).read({0: IDS}), whole)
    assert len(find_decoder_layers(lm.model)) == lm.num_layers
    assert lm.model.config.to_dict() == config
    assert not any(layer._forward_hooks for layer in find_decoder_layers(lm.model))


@cache
def original(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FUSED[family](), attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 1.0, 0.3)
    return model.to(dtype)


def make_fused(model: Any) -> HFModel:
    lm = HFModel.wrap_model(copy.deepcopy(model), "native", is_fused=True)
    assert lm.fused is not None
    return lm


def shorten(model: Any, layers: int) -> Any:
    """Build a model that has only the first layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    other = type(model)(config).to(model.dtype).eval()
    kept = {name: weight for name, weight in model.state_dict().items() if name in other.state_dict()}
    other.load_state_dict(kept)
    return other


@NATIVE
@EACH_TYPE
@pytest.mark.parametrize("family", FUSED)
def test_a_native_pass_cut_short_has_the_bits_of_a_model_of_so_many_layers(family: str, dtype: torch.dtype) -> None:
    """Logits, keys and values, along a text and along a tree; and the whole pass after it is what it was."""
    model = original(family, dtype)
    lm = make_fused(model)
    whole = PagedModel(lm).read({0: IDS})
    kept = copy_kv(lm)
    drawn = random_tree(Random(3), 12)
    tree = TokenTree.from_lists([drawn[0]], [drawn[1]])
    for layers in (1, 2, 3):
        short, ours = PagedModel(make_fused(shorten(model, layers))), cut(lm, layers)
        assert torch.equal(ours.read({0: IDS}), short.read({0: IDS}))
        for layer in range(layers):
            assert all(map(torch.equal, lm.pool.layers[layer], kept[layer]))
            assert all(map(torch.equal, lm.pool.layers[layer], short.lm.pool.layers[layer]))
        assert torch.equal(ours.verify(tree), short.verify(tree))
    assert torch.equal(PagedModel(lm).read({0: IDS}), whole)


@NATIVE
@EACH_TYPE
@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("rank", [20, 48])
@torch.no_grad()
def test_a_native_adapter_is_the_plain_one(family: str, dtype: torch.dtype, rank: int) -> None:
    """And a row's bits do not depend on which rows are read with it."""
    lm = make_fused(original(family, dtype))
    learnt = adapter(lm.hidden_size, rank, dtype)
    ours = cut(lm, 2, learnt).read({0: IDS})
    exact = HFModel.wrap_model(copy.deepcopy(original(family, dtype)).double(), "plain")
    theirs = cut(exact, 2, copy.deepcopy(learnt).double()).read({0: IDS})
    bare = cut(exact, 2).read({0: IDS})
    limit = (2e-5 if dtype == torch.float32 else 5e-2) * theirs.abs().max()
    assert (ours - theirs).abs().max() < limit
    assert (bare - theirs).abs().max() > 2 * limit, "the adapter changes nothing that could be seen"
    paged = cut(lm, 2, learnt)
    parts = torch.cat([paged.read({0: IDS[a:b]}) for a, b in ((0, 1), (1, 9), (9, 27), (27, 30))])
    assert torch.equal(parts, ours)


@NATIVE
def test_an_adapter_wider_than_the_native_pass_has_room_for_is_refused() -> None:
    lm = make_fused(original("llama", torch.float32))
    with pytest.raises(ForedraftError, match="rank 49 is wider than the 48"):
        Truncated(lm, 1, adapter(lm.hidden_size, 49))


@pytest.mark.parametrize("layers", [-1, 0, 3, 4])
def test_a_layer_that_leaves_nothing_or_everything_is_refused_with_the_range(layers: int) -> None:
    with pytest.raises(ForedraftError, match=r"exit_layer must lie in 1\.\.2 for llama, which has 3 layers; got"):
        Truncated(make_family("llama")[1], layers)


def test_a_model_wrapped_from_outside_is_refused() -> None:
    model = copy.deepcopy(make_family("llama")[0])
    model.model.forward = lambda *args, **options: None
    with pytest.raises(ForedraftError, match="load the model on one device"):
        truncate_model(model, 1)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_weights_are_counted_as_the_modules_hold_them(family: str) -> None:
    """Within what norms and positions weigh, also when the weights themselves were given up."""
    model, lm = make_family(family)
    counted = sum(p.numel() for p in find_decoder_layers(model)[0].parameters())
    layer, head = count_weights(lm)
    assert layer == pytest.approx(counted, rel=0.35 if family == "gpt2" else 0.01)
    assert head == lm.vocab_size * lm.hidden_size
    assert count_weights(replace(lm, model=lm.model)) == (layer, head)


def test_two_views_do_not_see_each_other() -> None:
    """An adapter runs behind the layer of its own view alone."""
    model, lm = make_family("llama")
    plain, adapted = cut(lm, 2), cut(lm, 2, adapter(lm.hidden_size))
    first = plain.read({0: IDS})
    assert not torch.equal(adapted.read({0: IDS}), first)
    assert torch.equal(cut(lm, 2).read({0: IDS}), first)
    assert (PagedModel(lm).read({0: IDS}) - compute_reference(model, IDS)).abs().max() < 2e-5
