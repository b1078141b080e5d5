"""Models with recurrent layers give, along chunks and trees, the logits of transformers' own forward pass.

Where a family's modules cast to float32, the tests let them cast to float64, so that rounding cannot hide a fault.
"""

import copy
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.engine.calibrate import measure_pass_times
from foredraft.errors import ForedraftError
from foredraft.kv.allocator import PageAllocator
from foredraft.models.hf import HFModel
from foredraft.models.recurrent.mixers import PackedMixer
from foredraft.models.recurrent.state_cache import StateCache
from foredraft.tree import TokenTree
from tests.support.families import EXACT, VOCAB, PagedModel, compute_reference, tokens
from tests.support.hybrids import EXACT_HYBRIDS, HYBRIDS, generate_greedily, make_hybrid, make_model

MAX_ERROR, MAX_EXACT_ERROR = 1e-4, 1e-10


@pytest.fixture(autouse=True)
def keep_float64(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    family = getattr(request.node, "callspec", None) and request.node.callspec.params.get("family")
    if family in EXACT_HYBRIDS:
        monkeypatch.setattr(Tensor, "float", Tensor.double)


def check_close(family: str, ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= (MAX_EXACT_ERROR if family in EXACT_HYBRIDS else MAX_ERROR)


@pytest.mark.parametrize("family", HYBRIDS)
def test_chunks_and_trees(family: str) -> None:
    """A settled prompt of two requests, a tree for each, and what follows the accepted paths."""
    model, lm = make_hybrid(family)
    paged, prompts = PagedModel(lm), {0: tokens(23, seed=1), 1: tokens(6, seed=2)}
    cuts = {0: 9, 1: 1}
    paged.read({b: ids[: cuts[b]] for b, ids in prompts.items()}, rows=[], is_settled=True)
    ours = paged.read({b: ids[cuts[b] :] for b, ids in prompts.items()}, is_settled=True)
    references = [compute_reference(model, ids)[cuts[b] :] for b, ids in prompts.items()]
    check_close(family, ours, torch.cat(references))

    rng = Random(family)
    parents = [[-1, 0, 0, 1, 1, 2, 5, 5], [-1, 0, 1]]
    nodes = [[rng.randrange(3, VOCAB) for _ in tree] for tree in parents]
    tree = TokenTree.from_lists(nodes, parents)
    rows = []
    for b, prompt in prompts.items():
        for node in range(tree.sizes[b]):
            path = [tree.tokens[b][0], *tree.get_draft_path(b, node)]
            rows.append(compute_reference(model, prompt + path)[-1])
    check_close(family, paged.verify(tree), torch.stack(rows))

    paths = [[0, 2, 5, 7], [0]]
    assert paged.compact(paths) == 3
    kept = {b: prompts[b] + [nodes[b][node] for node in path] for b, path in enumerate(paths)}
    more = {b: tokens(5, seed=20 + b) for b in prompts}
    expected = [compute_reference(model, kept[b] + more[b])[-5:] for b in prompts]
    check_close(family, paged.read(more), torch.cat(expected))


@pytest.mark.parametrize("family", ["mamba2", "jamba", "qwen3_next", "lfm2"])
def test_one_token_at_a_time(family: str) -> None:
    model, lm = make_hybrid(family)
    ids, paged = tokens(9), PagedModel(lm)
    check_close(family, torch.cat([paged.read({0: [token]}) for token in ids]), compute_reference(model, ids))


def test_projections_are_shared_and_found() -> None:
    _, lm = make_hybrid("qwen3_next")
    [mixer] = [module for module in lm.model.modules() if isinstance(module, PackedMixer)]
    assert mixer.projections.inputs == ("in_proj_qkvz", "in_proj_ba")
    assert mixer.projections.output == "out_proj"
    calls = []
    projections = (mixer.in_proj_qkvz, mixer.out_proj)
    handles = [module.register_forward_hook(lambda *_: calls.append(1)) for module in projections]
    paged = PagedModel(lm)
    paged.read({0: tokens(6)}, is_settled=True)
    calls.clear()
    paged.verify(TokenTree.from_lists([[5, 6, 7, 8]], [[-1, 0, 1, 1]]))
    for handle in handles:
        handle.remove()
    assert len(calls) == 2  # one each, for four rows on three levels


def test_a_wrapped_model_still_generates_as_before() -> None:
    model, prompt = make_model("qwen3_next"), tokens(12)
    before = generate_greedily(model, prompt, 8)
    HFModel.wrap_model(model, "qwen3_next")
    model.set_attn_implementation("eager")
    assert generate_greedily(model, prompt, 8) == before


def test_a_family_with_recurrent_layers_may_have_attention_alone() -> None:
    """As Granite 4 Micro, whose type is that of the hybrid models."""
    config = HYBRIDS["granitemoehybrid"]()
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation=EXACT).eval().double()
    lm = HFModel.wrap_model(copy.deepcopy(model), "micro")
    assert lm.pool.states is None
    ids = tokens(9)
    check_close("granitemoehybrid", PagedModel(lm).read({0: ids}), compute_reference(model, ids))


def test_layers_that_ignore_the_state_before_a_chunk_are_found() -> None:
    continues = {family: make_hybrid(family)[1].pool.states.continues_chunks for family in ("mamba2", "jamba", "lfm2")}
    assert continues == {"mamba2": True, "jamba": False, "lfm2": True}


def test_a_layer_that_computes_something_else_from_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateCache, "update_recurrent_state", lambda self, states, *_, **__: states)
    with pytest.raises(ForedraftError, match="is not computed right from recurrent states"):
        HFModel.wrap_model(make_model("qwen3_next"), "broken")


def test_layers_with_a_replaced_forward_are_refused() -> None:
    model = make_model("lfm2")
    conv = model.model.layers[0].conv
    conv.forward = conv.forward  # as the hooks of accelerate
    with pytest.raises(ForedraftError, match="device_map does so"):
        HFModel.wrap_model(model, "hooked")


def test_passes_are_measured_after_a_state() -> None:
    lm = make_hybrid("lfm2")[1].with_new_kv()
    costs = measure_pass_times(lm, PageAllocator(80, 4), torch.device("cpu"), max_seconds=0.2)
    assert costs[0][0] == 1


def test_states_have_a_size_and_copies_have_their_own() -> None:
    _, lm = make_hybrid("qwen3_next")
    assert lm.pool.states is not None
    # a convolution of 64 channels over 4 tokens in float64, and 4 heads with 8 x 8 numbers in float32
    assert lm.pool.states.bytes_per_state == 64 * 4 * 8 + 4 * 8 * 8 * 4
    other = lm.with_new_kv()
    PagedModel(other).read({0: tokens(5)})
    assert other.pool.states is not lm.pool.states
    other.pool.states.check_null_state()
