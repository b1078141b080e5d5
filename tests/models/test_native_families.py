"""Families whose layers differ from Llama's, as native code: the results of transformers, with no worse rounding, and
the same bits however a sequence is cut and along a tree.

What they share with Llama is tested in test_native_decoder.py. Norms and biases are random, as there.
"""

import copy
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from foredraft.drafters.common.target_access import get_packed_lm_head, scale_output_matrix
from foredraft.kernels.cpu.library import INSTRUCTION_SETS
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.native.decoder import explain_unsupported
from foredraft.models.native.family import FAMILIES, LLAMA
from foredraft.tree import TokenTree
from tests.models.test_families import _boundaries, random_tree
from tests.models.test_native_decoder import as_right
from tests.support.families import ALTERNATING, EXACT, SLIDING, TINY, PagedModel, compute_reference, list_path, tokens
from tests.support.library_setups import NATIVE, THREAD_SETUPS, use_library

pytestmark = NATIVE

WIDE = TINY | {"hidden_size": 64, "initializer_range": 0.15}  # heads of width 16
EAGER = {"experts_implementation": "eager"}  # takes float64
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 20, "mamba_n_groups": 2, "mamba_chunk_size": 8}
SHARED = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 41}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "smollm3": lambda: hf.SmolLM3Config(**WIDE, no_rope_layers=[1, 0, 1]),
    "smollm3, some sliding": lambda: hf.SmolLM3Config(
        **WIDE, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=SLIDING, layer_types=ALTERNATING
    ),
    "phi3": lambda: hf.Phi3Config(**WIDE, sliding_window=SLIDING),
    "phi3, part of a head rotated, odd sizes": lambda: hf.Phi3Config(
        **WIDE | {"intermediate_size": 41}, rope_parameters=HALF
    ),
    "olmo2": lambda: hf.Olmo2Config(**WIDE),
    "olmo2, many heads, odd sizes": lambda: hf.Olmo2Config(
        **WIDE | {"num_key_value_heads": 4, "intermediate_size": 41}, attention_bias=True
    ),
    "olmo3": lambda: hf.Olmo3Config(
        **WIDE, sliding_window=SLIDING, layer_types=ALTERNATING,
        rope_parameters={"sliding_attention": HALF | {"rope_theta": 1e3}, "full_attention": YARN},
    ),
    "olmo3, sliding alone": lambda: hf.Olmo3Config(
        **WIDE, sliding_window=SLIDING, layer_types=["sliding_attention"] * 3
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **WIDE, head_dim=32, query_pre_attn_scalar=20, sliding_window=SLIDING, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2, narrow attention, no caps": lambda: hf.Gemma2Config(
        **WIDE | {"num_attention_heads": 1, "num_key_value_heads": 1}, head_dim=16, attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **WIDE, head_dim=32, query_pre_attn_scalar=20, sliding_window=SLIDING, layer_types=ALTERNATING,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        rope_parameters={"sliding_attention": HALF | {"rope_theta": 1e3}, "full_attention": LINEAR},
    ),
    "glm4": lambda: hf.Glm4Config(**WIDE, head_dim=32, attention_bias=True),
    "glm4, all rotated": lambda: hf.Glm4Config(
        **WIDE | {"intermediate_size": 41}, head_dim=16, attention_bias=False,
        rope_parameters=HALF | {"partial_rotary_factor": 1.0},
    ),
    "ernie4_5": lambda: hf.Ernie4_5Config(**WIDE, head_dim=16),
    "ernie4_5, biases": lambda: hf.Ernie4_5Config(**WIDE, head_dim=48, use_bias=True),
    "cohere2": lambda: hf.Cohere2Config(**WIDE, sliding_window=SLIDING, layer_types=ALTERNATING, logit_scale=0.25),
    "cohere2, tied, biases": lambda: hf.Cohere2Config(
        **WIDE | {"tie_word_embeddings": True, "intermediate_size": 41}, sliding_window=SLIDING,
        layer_types=ALTERNATING[::-1], attention_bias=True,
    ),
    "mixtral": lambda: hf.MixtralConfig(**WIDE, **EAGER, num_local_experts=5, num_experts_per_tok=2),
    "mixtral, one expert per token, sliding, odd sizes": lambda: hf.MixtralConfig(
        **WIDE | {"intermediate_size": 41}, **EAGER, num_local_experts=3, num_experts_per_tok=1, sliding_window=SLIDING
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **WIDE, **EAGER, head_dim=32, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "qwen3_moe, one layer with an MLP, not normalised": lambda: hf.Qwen3MoeConfig(
        **WIDE, **EAGER, head_dim=16, moe_intermediate_size=9, num_experts=6, num_experts_per_tok=2,
        norm_topk_prob=False, mlp_only_layers=[1],
    ),
    "olmoe": lambda: hf.OlmoeConfig(**WIDE, **EAGER, num_experts=6, num_experts_per_tok=3),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **WIDE, **EAGER, num_local_experts=6, num_experts_per_tok=2, residual_multiplier=0.7, embedding_multiplier=3.0,
        logits_scaling=2.0, attention_multiplier=0.2,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **WIDE, **EAGER, head_dim=32, sliding_window=SLIDING, layer_types=ALTERNATING, num_local_experts=6,
        num_experts_per_tok=3, rope_parameters=YARN | {"truncate": False}, swiglu_limit=1.5,
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(
        **WIDE, head_dim=32, layer_types=HYBRID, linear_key_head_dim=16, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, rope_parameters=HALF,
    ),
    "qwen3_5, odd heads": lambda: hf.Qwen3_5TextConfig(
        **WIDE, head_dim=16, layer_types=HYBRID[::-1], linear_key_head_dim=11, linear_value_head_dim=37,
        linear_num_key_heads=3, linear_num_value_heads=3, linear_conv_kernel_dim=2,
    ),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **WIDE, **EAGER, **SHARED, head_dim=16, layer_types=HYBRID, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=4,
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **WIDE, **EAGER, **SHARED, head_dim=16, layer_types=HYBRID, linear_key_head_dim=16, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=6, num_experts=4, num_experts_per_tok=4, mlp_only_layers=[1],
    ),
    "granitemoehybrid, experts": lambda: hf.GraniteMoeHybridConfig(
        **WIDE, **EAGER, **MAMBA, layer_types=HYBRID, num_local_experts=6, num_experts_per_tok=2,
        shared_intermediate_size=24, residual_multiplier=0.7,
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **WIDE, **MAMBA, layer_types=HYBRID, num_local_experts=0, shared_intermediate_size=41,
        residual_multiplier=0.7, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.2,
    ),
    "granitemoehybrid, rotary, one group": lambda: hf.GraniteMoeHybridConfig(
        **WIDE, **MAMBA | {"mamba_n_groups": 1, "mamba_n_heads": 2, "mamba_d_head": 64}, layer_types=HYBRID[::-1],
        num_local_experts=0, shared_intermediate_size=48, position_embedding_type="rope", mamba_conv_bias=False,
        mamba_proj_bias=True,
    ),
    "lfm2": lambda: hf.Lfm2Config(**WIDE, layer_types=["conv", "full_attention", "conv"]),
    "lfm2, biases": lambda: hf.Lfm2Config(
        **WIDE, layer_types=["full_attention", "conv", "conv"], conv_bias=True, conv_L_cache=4
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CONFIGS)
EACH_TYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
IDS = tokens(40)


@cache
def make_original(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    for path, weight in model.named_parameters():
        if "norm" in path or path.endswith(("bias", "sinks")):
            nn.init.normal_(weight, weight.detach().mean().item(), 0.3)
    return model.to(dtype)


@cache
def make_exact(name: str, dtype: torch.dtype) -> Any:
    model = copy.deepcopy(make_original(name, dtype)).double()
    model.set_attn_implementation(EXACT)
    return model


@cache
def make_native(name: str, dtype: torch.dtype) -> HFModel:
    lm = HFModel.wrap_model(copy.deepcopy(make_original(name, dtype)), name, is_fused=True)
    assert lm.fused is not None, explain_unsupported(lm.model)
    return lm


def test_every_family_that_differs_from_llama_is_here() -> None:
    assert {config().model_type for config in CONFIGS.values()} == {
        name for name, family in FAMILIES.items() if family is not LLAMA
    }


REFUSED = {
    "attention to later tokens": lambda: hf.Gemma2Config(**WIDE, head_dim=16, use_bidirectional_attention=True),
    "rotary factors that change with the sequence length": lambda: hf.Gemma3TextConfig(
        **WIDE, head_dim=16,
        rope_parameters={"sliding_attention": LINEAR | {"rope_type": "dynamic"}, "full_attention": LINEAR},
    ),
    "the activation relu": lambda: hf.Gemma2Config(**WIDE, head_dim=16, hidden_activation="relu"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_native_code_does_not_compute_is_refused(reason: str) -> None:
    assert explain_unsupported(hf.AutoModelForCausalLM.from_config(REFUSED[reason]())) == reason


def test_replaced_embeddings_are_refused() -> None:
    """Gemma's own module of embeddings multiplies them, and another one may do anything."""
    model = copy.deepcopy(make_original("gemma2", torch.float32))
    model.model.embed_tokens = nn.Embedding(TINY["vocab_size"], WIDE["hidden_size"])
    assert explain_unsupported(model) == "embeddings that were replaced"


@EACH
@EACH_TYPE
def test_logits_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    logits = PagedModel(make_native(name, dtype)).read({0: IDS})
    references = [compute_reference(make(name, dtype), IDS) for make in (make_original, make_exact)]
    as_right(*cut_at_near_ties(logits, *references))


def cut_at_near_ties(*rows: Tensor) -> list[Tensor]:
    """Keep the rows before one to which the rounding of the reference gives other experts than the exact model's."""
    _, theirs, truth = rows
    is_off = (theirs - truth).norm(dim=1) > 0.06 * truth.norm(dim=1)
    num_kept = int(is_off.nonzero()[0]) if is_off.any() else len(truth)
    assert num_kept >= 4
    return [each[:num_kept] for each in rows]


@EACH
@EACH_TYPE
@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """At the boundaries of layers and after the final norm."""
    lm = make_native(name, dtype)
    boundaries = (lm.num_layers, 0, 1)
    logits, features = PagedModel(lm).read({0: IDS}, hidden_layers=(*boundaries, AFTER_FINAL_NORM))
    assert torch.equal(logits, PagedModel(lm).read({0: IDS}))
    between, normed = features.split([3 * lm.hidden_size, lm.hidden_size], -1)
    references = [_boundaries(make(name, dtype), IDS, boundaries) for make in (make_original, make_exact)]
    as_right(*cut_at_near_ties(between, *references))
    as_right(*cut_at_near_ties(normed, *(_last_hidden(make(name, dtype)) for make in (make_original, make_exact))))


def _last_hidden(model: Any) -> Tensor:
    return model.model(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state[0]


@EACH
@EACH_TYPE
def test_bits_do_not_depend_on_cuts_or_other_requests(name: str, dtype: torch.dtype) -> None:
    lm = make_native(name, dtype)
    whole, other = PagedModel(lm).read({0: IDS}), PagedModel(lm).read({0: IDS[7:12]})
    for cuts in (range(41), (0, 1, 8, 33, 40)):
        paged = PagedModel(lm)
        assert torch.equal(torch.cat([paged.read({0: IDS[a:b]}) for a, b in pairwise(cuts)]), whole)
    assert torch.equal(PagedModel(lm).read({0: IDS[7:12], 1: IDS}), torch.cat([other, whole]))


@EACH
@EACH_TYPE
@torch.inference_mode()
def test_rows_without_logits_change_no_bits(name: str, dtype: torch.dtype) -> None:
    """They end at the last layer, unless hidden states after it are read; their keys and values are complete."""
    lm = make_native(name, dtype)
    layers = (0, 1), (1, lm.num_layers), (0, AFTER_FINAL_NORM)
    whole, after = (PagedModel(lm).read({0: ids}) for ids in (IDS, [*IDS, *IDS[:4]]))
    features = [PagedModel(lm).read({0: IDS}, hidden_layers=boundaries)[1] for boundaries in layers]
    for rows in ([], [len(IDS) - 1], [3, 20, 31]):
        paged = PagedModel(lm)
        assert torch.equal(paged.read({0: IDS}, rows=rows), whole[rows])
        assert torch.equal(paged.read({0: IDS[:4]}), after[len(IDS) :])
        for boundaries, states in zip(layers, features, strict=True):
            logits, found = PagedModel(lm).read({0: IDS}, rows, boundaries)
            assert torch.equal(logits, whole[rows])
            assert torch.equal(found, states)


@EACH
@EACH_TYPE
def test_every_node_of_a_tree_has_the_bits_of_its_own_sequence(name: str, dtype: torch.dtype) -> None:
    lm = make_native(name, dtype)
    prefix, (ids, parents) = IDS[:9], random_tree(Random(name), 10)
    paged = PagedModel(lm.with_new_kv())
    paged.read({0: prefix}, rows=[])
    logits = paged.verify(TokenTree.from_lists([ids], [parents]))
    for node in range(len(ids)):
        path = list_path(parents, node)
        sequence = prefix + [ids[n] for n in path]
        assert torch.equal(logits[node], PagedModel(lm).read({0: sequence})[-1]), f"node {node}"


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    "name",
    [
        "olmo2, many heads, odd sizes", "gemma2", "cohere2", "qwen3_5", "qwen3_5, odd heads", "granitemoehybrid",
        "lfm2",
    ],
)  # fmt: skip
def test_every_instruction_set_and_team(instruction_set: str, name: str) -> None:
    """Norms over all heads, branches, caps and parallel layers have steps of their own between barriers."""
    lm = make_native(name, torch.float32)
    with use_library(instruction_set):
        logits = PagedModel(lm).read({0: IDS})
    as_right(logits, *(compute_reference(make(name, torch.float32), IDS) for make in (make_original, make_exact)))
    for team in THREAD_SETUPS[1:]:
        with use_library(instruction_set, team):
            assert torch.equal(PagedModel(lm).read({0: IDS}), logits)


@EACH
@torch.inference_mode()
def test_the_packed_head_is_shared_if_its_product_is_the_logits(name: str) -> None:
    """Heads of drafters have neither the scale nor the cap of Gemma's and Cohere's logits."""
    lm = make_native(name, torch.float32)
    logits, normed = PagedModel(lm).read({0: IDS}, hidden_layers=(AFTER_FINAL_NORM,))
    torch.testing.assert_close(lm.compute_logits(normed), logits, atol=1e-4, rtol=0)
    head, product = get_packed_lm_head(lm), normed @ lm.head_weight.T
    assert (head is not None) == torch.allclose(product, logits, atol=1e-4)
    if "cohere" in name:
        torch.testing.assert_close(normed @ scale_output_matrix(lm).T, logits, atol=1e-4, rtol=0)


@EACH
def test_an_owned_model_frees_its_packed_weights(name: str) -> None:
    model = copy.deepcopy(make_original(name, torch.bfloat16))
    lm = HFModel.wrap_model(model, name, is_fused=True, is_owned=True)
    family = FAMILIES[model.config.model_type]
    freed = [module.weight for block in model.model.layers for module in family.list_projections(block)]
    assert freed
    assert all(weight.numel() == 0 for weight in freed)
    assert torch.equal(PagedModel(lm).read({0: IDS}), PagedModel(make_native(name, torch.bfloat16)).read({0: IDS}))
