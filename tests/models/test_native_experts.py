"""Mixtures of experts as native code: what test_native_families.py does not cover."""

import copy
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.kernels.cpu.library import INSTRUCTION_SETS
from foredraft.models.hf import HFModel
from foredraft.models.native.decoder import explain_unsupported
from foredraft.tree import TokenTree
from tests.models.test_families import random_tree
from tests.models.test_native_decoder import as_right
from tests.models.test_native_families import CONFIGS, EAGER, IDS, WIDE, make_exact, make_native, make_original
from tests.support.families import PagedModel, compute_reference, list_path
from tests.support.library_setups import NATIVE, THREAD_SETUPS, use_library

pytestmark = NATIVE

# Several chunks of panels per member in every product, and more experts than a row chooses.
MANY = {"hidden_size": 320, "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 176}
EXPERT_FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"]


def make_many() -> Any:
    torch.manual_seed(3)
    config = hf.Qwen3MoeConfig(**WIDE | MANY, **EAGER, head_dim=16)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def wrap(model: Any, **options: Any) -> HFModel:
    lm = HFModel.wrap_model(copy.deepcopy(model), "model", is_fused=True, **options)
    assert lm.fused is not None, explain_unsupported(lm.model)
    return lm


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_every_instruction_set(instruction_set: str, name: str) -> None:
    lm = make_native(name, torch.float32)
    with use_library(instruction_set):
        logits = PagedModel(lm).read({0: IDS})
    as_right(logits, *(compute_reference(make(name, torch.float32), IDS) for make in (make_original, make_exact)))


@pytest.mark.parametrize("setup", THREAD_SETUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_depend_neither_on_the_team_nor_on_other_rows(setup: Any, dtype: torch.dtype) -> None:
    lm = wrap(make_many().to(dtype))
    whole = PagedModel(lm).read({0: IDS})
    with use_library("", setup):
        assert torch.equal(PagedModel(lm).read({0: IDS}), whole)
        paged = PagedModel(lm)
        assert torch.equal(torch.cat([paged.read({0: [token]}) for token in IDS]), whole)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_quantised_experts(quantization: str, name: str) -> None:
    """The router keeps its weights. Nodes of a tree have the bits of their sequences."""
    lm = wrap(make_original(name, torch.bfloat16), quantization=quantization)
    logits, plain = PagedModel(lm).read({0: IDS}), compute_reference(make_exact(name, torch.bfloat16), IDS)
    is_close = F.cosine_similarity(logits.double(), plain.double()) > (0.98 if quantization == "int8" else 0.8)
    assert is_close.double().mean() > 0.5  # rounding gives some rows other experts
    prefix, (ids, parents) = IDS[:9], random_tree(Random(name), 6)
    paged = PagedModel(lm.with_new_kv())
    paged.read({0: prefix}, rows=[])
    nodes = paged.verify(TokenTree.from_lists([ids], [parents]))
    for node in range(len(ids)):
        path = list_path(parents, node)
        assert torch.equal(nodes[node], PagedModel(lm).read({0: prefix + [ids[n] for n in path]})[-1])


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_an_owned_model_frees_its_experts(name: str) -> None:
    lm = wrap(make_original(name, torch.bfloat16), is_owned=True)
    large = [weight for path, weight in lm.model.named_parameters() if path.endswith(("up_proj", "down_proj"))]
    assert large
    assert all(weight.numel() == 0 for weight in large)


@torch.inference_mode()
def test_equal_scores_choose_the_lower_index_and_no_number_chooses_too() -> None:
    """A router without weights gives every expert the same score."""
    model = copy.deepcopy(make_original("mixtral", torch.float32))
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    for router in routers:
        router.zero_()
    first_two = PagedModel(wrap(model)).read({0: IDS})
    for layer in model.model.layers:
        layer.mlp.experts.down_proj[2:] = torch.nan
    assert torch.equal(PagedModel(wrap(model)).read({0: IDS}), first_two)
    for router in routers:
        router.fill_(torch.nan)
    assert PagedModel(wrap(model)).read({0: IDS}).isnan().all()


def _clip() -> Any:
    return hf.OlmoeConfig(**WIDE, **EAGER, num_experts=4, num_experts_per_tok=2, clip_qkv=3.0)


class Twice(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner = experts

    def forward(self, *arguments: Tensor) -> Tensor:
        return 2 * self.inner(*arguments)


def test_what_the_native_code_does_not_compute_is_refused() -> None:
    assert explain_unsupported(hf.AutoModelForCausalLM.from_config(_clip())) == "the options clip_qkv"
    model = copy.deepcopy(make_original("mixtral", torch.float32))
    model.model.layers[1].mlp.experts = Twice(model.model.layers[1].mlp.experts)
    assert explain_unsupported(model) == "experts that were replaced"
    model = hf.AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"]())
    model.config.hidden_act = "relu"
    assert explain_unsupported(model) == "the activation relu"
