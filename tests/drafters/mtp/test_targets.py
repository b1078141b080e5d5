"""MTP layers in the names of their families: read, compared with transformers' own MTP model, and drafted with."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.mtp.checkpoint import read_from_target
from foredraft.drafters.mtp.network import MtpNetwork, load_network
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import attend_causal
from foredraft.models.hf import HFModel
from tests.support.families import EXPERTS, TINY
from tests.support.hybrids import DELTA, MOE

LAYERS = 2
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: hf.DeepseekV3Config(**{**TINY, **ROUTED, **LATENT, "num_hidden_layers": LAYERS}),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**{**TINY, **ROUTED, "head_dim": 8, "num_hidden_layers": LAYERS}),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**{**TINY, **DELTA, "num_hidden_layers": LAYERS}),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**{**TINY, **DELTA, **MOE, "num_hidden_layers": LAYERS}),
    "qwen2": lambda: hf.Qwen2Config(**{**TINY, "num_hidden_layers": LAYERS}),  # MiMo-7B has Qwen-2 layers
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **{**TINY, **EXPERTS, "num_hidden_layers": LAYERS}, moe_num_experts=4, moe_k=2, moe_intermediate_size=16,
        moe_layer_start_index=0,
    ),
    "mellum": lambda: hf.MellumConfig(**{**TINY, **MOE, "num_hidden_layers": LAYERS}),
    "exaone_moe": lambda: hf.ExaoneMoeConfig(
        **{**TINY, **EXPERTS, "num_hidden_layers": LAYERS}, num_experts=4, moe_intermediate_size=16,
        num_shared_experts=1, n_group=1, topk_group=1, layer_types=["full_attention"] * LAYERS,
    ),
}  # fmt: skip
# Names on disk by family: of the two norms, the projection and the output norm, and the prefix of the layer.
DEEPSEEK_NAMES = tuple(
    f"model.layers.{LAYERS}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)
QWEN_NAMES = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
PUBLISHED = {
    "deepseek_v3": (DEEPSEEK_NAMES, f"model.layers.{LAYERS}."),
    "glm4_moe": (DEEPSEEK_NAMES, f"model.layers.{LAYERS}."),
    "qwen3_5": (QWEN_NAMES, "mtp.layers.0."),
    "qwen3_next": (QWEN_NAMES, "mtp.layers.0."),
    "mellum": (QWEN_NAMES, "mtp.layers.0."),
    "exaone_moe": (QWEN_NAMES, "mtp.layers.0."),
    "qwen2": (
        tuple(
            f"model.mtp_layers.0.{part}.weight"
            for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ),
        "model.mtp_layers.0.",
    ),
    "ernie4_5_moe": (
        ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.weight"),
        "model.mtp_block.0.",
    ),
}
PARTS = ("embedding_norm.weight", "state_norm.weight", "projection.weight", "output_norm.weight")
FIRST_IS_STATE, ZEROES_FIRST = {"qwen2"}, {"qwen2", "deepseek_v3", "glm4_moe", "ernie4_5_moe"}


@cache
def make_target(family: str) -> HFModel:
    torch.manual_seed(0)
    return HFModel.wrap_model(hf.AutoModelForCausalLM.from_config(CONFIGS[family]()).double(), family)


@cache
def make_tensors(family: str) -> dict[str, torch.Tensor]:
    """Make random weights by internal name."""
    target = make_target(family)
    shape = MtpShape(target.hidden_size, target.vocab_size, has_output_norm=family != "ernie4_5_moe")
    network = MtpNetwork(shape, target)
    torch.manual_seed(1)
    return {name: 0.3 * torch.randn(value.shape, dtype=torch.float64) for name, value in network.state_dict().items()}


def spell(family: str) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the family, every expert apart."""
    names, prefix = PUBLISHED[family]
    stored = {}
    for name, tensor in make_tensors(family).items():
        if name in PARTS:
            stored[names[PARTS.index(name)]] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(pair.chunk(2) for pair in tensor):
                base = prefix + name.removeprefix("layer.").removesuffix("gate_up_proj")
                stored |= {f"{base}{i}.gate_proj.weight": gate, f"{base}{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            base = prefix + name.removeprefix("layer.").removesuffix("down_proj")
            stored |= {f"{base}{i}.down_proj.weight": down for i, down in enumerate(tensor)}
        else:
            stored[prefix + name.removeprefix("layer.")] = tensor
    if "deepseek" in family:  # published copies of the target's weights
        stored |= {f"{prefix}{copy}": torch.ones(2) for copy in ("embed_tokens.weight", "shared_head.head.weight")}
    return {name: tensor.contiguous().clone() for name, tensor in stored.items()}


def write_target(folder, family: str):
    """Write a target with its MTP layer in a further shard."""
    make_target(family).model.save_pretrained(folder)
    file = folder / "model.safetensors"
    held = load_file(file)
    save_file(spell(family), folder / "mtp.safetensors")
    names = dict.fromkeys(held, file.name) | dict.fromkeys(spell(family), "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def read_layer(folder, family: str) -> Checkpoint:
    save_file(spell(family), folder / "model.safetensors")
    return read_from_target(replace(describe_target(make_target(family)), name=str(folder)))


def make_inputs(network) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TINY["vocab_size"], (1, 7), generator=generator)
    features = torch.randn(1, 7, network.shape.hidden, generator=generator, dtype=torch.float64)
    return tokens, features, torch.arange(7)[None]


@pytest.mark.parametrize("family", CONFIGS)
def test_published_names_are_read(tmp_path, family):
    checkpoint = read_layer(tmp_path, family)
    expected = make_tensors(family)
    assert checkpoint.tensors.keys() == expected.keys()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in expected.items())
    shape = checkpoint.shape
    assert (shape.puts_state_first, shape.zeroes_first) == (family in FIRST_IS_STATE, family in ZEROES_FIRST)


@torch.no_grad()
@pytest.mark.parametrize("family", CONFIGS)
def test_the_network_is_that_of_transformers(tmp_path, family):
    target = make_target(family)
    checkpoint = read_layer(tmp_path, family)
    shape = replace(checkpoint.shape, zeroes_first=False)  # transformers does not
    network = load_network(replace(checkpoint, shape=shape), target).double()
    tokens, features, positions = make_inputs(network)
    states, recycled = network(tokens, features, positions, attend_causal)
    expected = run_transformers(target, make_tensors(family), tokens, features, positions, shape.puts_state_first)
    assert torch.allclose(states, expected, atol=1e-6)
    assert torch.equal(states, recycled)


def run_transformers(target, tensors, tokens, features, positions, puts_state_first):
    """Run `MtpModel` with the same weights."""
    config = target.model.config
    kept = dict(vars(config))
    config.num_mtp_layers, config.mtp_hidden_states_first = 1, puts_state_first
    kind = "full_attention"
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None) is not None:
            last = [entry for entry in getattr(config, name) if name != "layer_types" or entry == kind][-1]
            setattr(config, f"mtp_{name}", [last])
    try:
        model = MtpModel(target.model, 1).double().eval()
        model.config._attn_implementation = "eager"
        renamed = {
            re.sub(r"^layer\.", "mtp_block.", name)
            .replace("embedding_norm", "enorm")
            .replace("state_norm", "hnorm")
            .replace("projection.", "eh_proj.")
            .replace("output_norm", "post_norm"): tensor
            for name, tensor in tensors.items()
        }
        layer = model.layers[0]
        if "post_norm.weight" not in renamed:
            layer.use_post_norm, layer.post_norm = False, None
        layer.load_state_dict(renamed)
        return model.forward_layer(0, features, positions, None, input_ids=tokens)
    finally:
        vars(config).clear()
        vars(config).update(kept)


@torch.no_grad()
def test_the_first_embedding_is_zero(tmp_path):
    """The embedding beside position 0 does not matter, and that of position 1 does."""
    network = load_network(read_layer(tmp_path, "qwen2"), make_target("qwen2")).double()
    tokens, features, positions = make_inputs(network)
    states = network(tokens, features, positions, attend_causal)[0]
    for changed, is_equal in ((0, True), (1, False)):
        others = tokens.clone()
        others[0, changed] = (others[0, changed] + 1) % TINY["vocab_size"]
        assert torch.equal(network(others, features, positions, attend_causal)[0], states) == is_equal


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_target_drafts_with_its_own_layer(tmp_path, family):
    folder = str(write_target(tmp_path, family))
    greedy = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9, 5, 6, 7], [11]]
    drafted = LLM(folder, drafter={"method": "mtp", "num_speculative_tokens": 3}, dtype=torch.float32)
    results = drafted.generate(prompts, greedy)
    expected = drafted.with_drafter(None).generate(prompts, greedy)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert all(one.stats.num_drafted for one in results)


def test_a_target_without_a_layer(tmp_path):
    make_target("qwen2").model.save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match=r"holds no MTP layer.*foredraft train mtp"):
        LLM(str(tmp_path), drafter={"method": "mtp"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda held: held.pop("mtp.norm.weight"), "output_norm.weight is missing"),
        (lambda held: held.update({"mtp.layers.0.extra": torch.ones(2)}), "layer.extra has no place"),
        (lambda held: held.update({"mtp.fc.weight": torch.ones(32, 32)}), r"has to be \[32, 64\]"),
        (lambda held: held.update({"mtp.norm.weight": torch.ones(8)}), "was made for another target"),
        (lambda held: held.update({"mtp.fc.weight": torch.ones(32, 64, dtype=torch.int8)}), "quantised"),
    ],
)
def test_layers_that_do_not_fit_are_refused(tmp_path, edit, message):
    held = spell("qwen3_5")
    edit(held)
    save_file(held, tmp_path / "model.safetensors")
    target = make_target("qwen3_5")
    with pytest.raises(ForedraftError, match=message):
        load_network(read_from_target(replace(describe_target(target), name=str(tmp_path))), target)
