"""Modules of transformers with native recurrences: the logits of the model's own pass, along chunks and trees."""

import copy
from functools import cache
from typing import Any

import pytest
import torch

from foredraft.models.hf import HFModel
from foredraft.models.recurrent import native_mixer
from foredraft.models.recurrent.mixer_families import MIXERS, find_mixer_family
from foredraft.models.recurrent.state_pass import StatePass
from foredraft.tree import TokenTree
from tests.support.families import EXACT, PagedModel, compute_reference, list_path, tokens
from tests.support.hybrids import HYBRIDS, NATIVE_MIXERS, make_model
from tests.support.library_setups import NATIVE

pytestmark = NATIVE
MAX_ERROR = 5e-5  # of logits, float32


@cache
def make_pair(family: str) -> tuple[Any, HFModel]:
    """Make a model in float32 for transformers, and its copy with native recurrences."""
    model = make_model(family, EXACT).float()
    return model, HFModel.wrap_model(copy.deepcopy(model), family, is_fused=True)


def count_natives(lm: HFModel) -> int:
    return len(lm.module_pass.natives) if isinstance(lm.module_pass, StatePass) else 0


@pytest.mark.parametrize("family", NATIVE_MIXERS)
def test_chunks_and_trees(family: str) -> None:
    model, lm = make_pair(family)
    assert lm.fused is None
    assert count_natives(lm) == len({key.layer for key in lm.pool.states.shapes})
    paged, prompt = PagedModel(lm), tokens(23, seed=1)
    paged.read({0: prompt[:9]}, rows=[], is_settled=True)
    ours = paged.read({0: prompt[9:]}, is_settled=True)
    assert (ours - compute_reference(model, prompt)[9:]).abs().max() <= MAX_ERROR
    nodes, parents = [5, 9, 9, 12, 30, 7], [-1, 0, 0, 1, 2, 2]
    logits = paged.verify(TokenTree.from_lists([nodes], [parents]))
    for node in range(len(nodes)):
        path = [nodes[n] for n in list_path(parents, node)]
        assert (logits[node] - compute_reference(model, prompt + path)[-1]).abs().max() <= MAX_ERROR


def test_every_class_with_native_code_is_here() -> None:
    classes = {type(m).__name__ for family in NATIVE_MIXERS for m in make_model(family).modules()}
    assert set(MIXERS) <= classes
    others = {family for family in HYBRIDS if family not in NATIVE_MIXERS}
    assert not any(find_mixer_family(m) for family in others for m in make_model(family).modules())


def test_other_dtypes_and_no_fused_keep_the_modules() -> None:
    model = make_model("lfm2_moe")
    assert count_natives(HFModel.wrap_model(copy.deepcopy(model), "float64", is_fused=True)) == 0
    assert count_natives(HFModel.wrap_model(copy.deepcopy(model).float(), "slow", is_fused=False)) == 0


def test_without_the_library_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mixers = [(module, module.layer_idx) for module in make_model("lfm2").modules() if find_mixer_family(module)]
    assert len(native_mixer.build_native_mixers(mixers, torch.float32)) == 1
    monkeypatch.setattr(native_mixer, "load_library", lambda: None)
    assert native_mixer.build_native_mixers(mixers, torch.float32) == {}


def test_options_without_native_code_keep_the_modules() -> None:
    [layer, *_] = [m for m in make_model("qwen3_next").modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet"]
    assert find_mixer_family(layer) is not None
    layer.activation = "gelu"
    assert find_mixer_family(layer) is None
