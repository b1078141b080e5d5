"""Folders in the layouts that drafters are published in, with random weights and none of our own writing code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.checkpoints.schema import TargetInfo

H, V, VD, LAYERS = 32, 40, 24, 12
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 48
TARGET = TargetInfo("the-target", hidden=H, vocab_size=V, num_layers=LAYERS)
IDS = "eagle_aux_hidden_state_layer_ids"

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
    "rope_theta": 500.0, "vocab_size": V, "max_position_embeddings": 128, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def random_matrix(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator) / size[-1] ** 0.5


def random_near_one(generator: torch.Generator, width: int) -> Tensor:
    return 1 + 0.3 * torch.randn(width, generator=generator)


def save(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> Path:
    """`file` may be a pickle, or "sharded" for two shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file == "sharded":
        _save_sharded(folder, tensors)
    elif file.endswith(".safetensors"):
        save_file(dict(tensors), folder / file, {"format": "pt"})
    else:
        torch.save(dict(tensors), folder / file)
    return folder


def _save_sharded(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    mapping = {name: file for file, held in halves.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    file = folder / "config.json"
    held = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in held.items() if name not in drop}))
    return folder


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), more: Mapping[str, Tensor] | None = None) -> Path:
    """Change what lies in the one safetensors file of a folder."""
    [file] = folder.glob("*.safetensors")
    held = load_file(file) | dict(more or {})
    save_file({name: value for name, value in held.items() if name not in drop}, file)
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Everything a folder holds, by the names on disk."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    for kind in ("*.pt", "*.bin"):
        for file in folder.glob(kind):
            found |= torch.load(file, weights_only=True)
    return found


def medusa(
    folder: Path,
    *,
    heads: int = 3,
    layers: int = 1,
    file: str = "medusa_lm_head.pt",
    version2: bool = False,
    **config: Any,
) -> Path:
    """FasterDecoding's upload, the wrong head count in its config included; all layers of a head are one module."""
    g = torch.Generator().manual_seed(heads + 10 * layers)
    tensors = {}
    for head in range(heads):
        weight, bias = random_matrix(g, H, H), random_matrix(g, H)
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = weight.clone()
            tensors[f"{head}.{layer}.linear.bias"] = bias.clone()
        if not version2:
            tensors[f"{head}.{layers}.weight"] = random_matrix(g, V, H)
    said = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    return save(folder, said | ({"version": "2"} if version2 else {}) | config, tensors, file)


def vllm_medusa(folder: Path, *, heads: int = 3, layers: int = 1, shared: bool = False, bias: bool = True) -> Path:
    g = torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"medusa_heads.blocks.{head}.layers.{layer}.weight"] = random_matrix(g, H, H)
            if bias:
                tensors[f"medusa_heads.blocks.{head}.layers.{layer}.bias"] = random_matrix(g, H)
        if not shared:
            tensors[f"medusa_heads.lm_heads.{head}.weight"] = random_matrix(g, V, H)
    if shared:
        tensors["medusa_heads.lm_head.weight"] = random_matrix(g, V, H)
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V, "num_heads": heads,
        "num_hidden_layers": layers, "medusa_fc_bias": bias, "original_lm_head": shared,
    }  # fmt: skip
    return save(folder, config, tensors)


def medusa2(folder: Path, *, heads: int = 3) -> Path:
    """Write a whole model with heads inside."""
    g = torch.Generator().manual_seed(4)
    tensors = {
        "model.embed_tokens.weight": random_matrix(g, V, H),
        "lm_head.weight": random_matrix(g, V, H),
        "model.norm.weight": random_matrix(g, H),
    }
    tensors["model.layers.0.self_attn.q_proj.weight"] = random_matrix(g, H, H)
    for head in range(heads):
        tensors[f"medusa_head.{head}.0.linear.weight"] = random_matrix(g, H, H)
        tensors[f"medusa_head.{head}.0.linear.bias"] = random_matrix(g, H)
        tensors[f"medusa_head.{head}.1.weight"] = random_matrix(g, V, H)
    return save(folder, LLAMA | {"medusa_num_heads": heads, "medusa_num_layers": 1}, tensors, "sharded")


def mlp_speculator(
    folder: Path,
    *,
    n: int = 3,
    inner: int = 24,
    tied: bool = False,
    repeated: bool = False,
    scaled: bool = False,
    **config: Any,
) -> Path:
    """IBM's upload; tied steps are stored once or, `repeated`, for every step."""
    g = torch.Generator().manual_seed(5)
    made: dict[str, Tensor] = {}
    for i in range(n):
        j, k = (0, min(i, 1)) if tied else (i, i)  # index of the step that has this step's tensors
        one = {
            "emb.{}.weight": random_matrix(g, V, inner), "ln.{}.weight": random_near_one(g, inner),
            "ln.{}.bias": random_matrix(g, inner), "head.{}.weight": random_matrix(g, V, inner),
        }  # fmt: skip
        for name, value in one.items():
            made[f"speculator.{name.format(i)}"] = value if i == j else made[f"speculator.{name.format(j)}"].clone()
        value = random_matrix(g, inner, inner if i else H)
        made[f"speculator.proj.{i}.weight"] = value if i == k else made[f"speculator.proj.{k}.weight"].clone()
    if tied and not repeated:
        made = {name: value for name, value in made.items() if ".0." in name or ".proj.1." in name}
    said = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": V,
        "emb_dim": H, "inner_dim": 0 if inner == H else inner, "n_predict": n, "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2, 2, 2][:n], "tie_weights": tied, "scale_input": scaled,
    }  # fmt: skip
    return save(folder, said | config, made)


def lstm_speculator(
    folder: Path, *, n: int = 3, inner: int = 24, repeated: bool = True, scaled: bool = True, **config: Any
) -> Path:
    """Arctic's upload, whose gates share an embedding and whose steps share the output matrix; both are repeated."""
    g = torch.Generator().manual_seed(6)
    made: dict[str, Tensor] = {"forget_emb.0.weight": random_matrix(g, V, inner)}
    for gate in ("forget", "input", "cell", "output"):
        made[f"{gate}_proj.0.weight"] = random_matrix(g, inner, H)
        made[f"{gate}_proj.1.weight"] = random_matrix(g, inner, inner)
    for norm in ("cell_ln", "state_ln"):
        made |= {f"{norm}.0.weight": random_near_one(g, inner), f"{norm}.0.bias": random_matrix(g, inner)}
    made["head.0.weight"] = random_matrix(g, V, inner)
    if repeated:
        made |= {f"{gate}_emb.0.weight": made["forget_emb.0.weight"].clone() for gate in ("input", "cell", "output")}
        made |= {f"head.{i}.weight": made["head.0.weight"].clone() for i in range(1, n)}
    said = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": V,
        "input_hidden_dim": H, "inner_dim": str(inner), "proj_dim": str(inner), "emb_dim": str(inner), "n_predict": n,
        "n_candidates": n, "top_k_tokens_per_head": [1] * n, "tie_weights": True, "tie_lstm_embs": True,
        "scale_input": scaled, "method": "sum_lstm",
    }  # fmt: skip
    return save(folder, said | config, made)


def blockwise(folder: Path, *, heads: int = 3, inner: int = 20, **config: Any) -> Path:
    g = torch.Generator().manual_seed(11)
    tensors = {
        "blockwise.hidden.weight": random_matrix(g, inner, H), "blockwise.hidden.bias": random_matrix(g, inner),
        "blockwise.output.weight": random_matrix(g, heads * H, inner),
        "blockwise.output.bias": random_matrix(g, heads * H),
    }  # fmt: skip
    said = {"model_type": "blockwise", "blockwise_num_heads": heads, "hidden_size": H, "vocab_size": V}
    return save(folder, said | config, tensors)


def hydra(
    folder: Path, *, heads: int = 3, layers: int = 1, file: str = "hydra_lm_head.pt", own_head: bool = True,
    rank: int | None = None, embedding: bool = True, prefix: bool = False, **config: Any,
) -> Path:  # fmt: skip
    """The authors' upload, the target's embeddings that they forgot to leave out included; all later layers of a head
    are one module. `prefix` = Hydra++. Without `own_head`, or with a rank, one of our shorter forms."""
    g = torch.Generator().manual_seed(12)
    tensors = {"input_embed_fn.weight": random_matrix(g, V, H)} if embedding else {}
    for head in range(heads):
        width = rank or (head + 2) * H
        for name in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.0.{name}.weight"] = random_matrix(g, H, width)
            tensors[f"hydra_mlp.{head}.0.{name}.bias"] = random_matrix(g, H)
        weight, bias = random_matrix(g, H, H), random_matrix(g, H)
        for layer in range(1, layers):
            tensors[f"hydra_mlp.{head}.{layer}.linear.weight"] = weight.clone()
            tensors[f"hydra_mlp.{head}.{layer}.linear.bias"] = bias.clone()
        if rank is not None:
            tensors[f"hydra_reduce.{head}.weight"] = random_matrix(g, rank, (head + 2) * H)
        if own_head:
            tensors[f"hydra_lm_head.{head}.weight"] = random_matrix(g, V, H)
            tensors[f"hydra_lm_head.{head}.bias"] = random_matrix(g, V)
    if prefix:
        tensors = {_insert_dropout(name): value for name, value in tensors.items()} | _make_prefix_layer(g)
    said = {
        "hydra_num_heads": heads, "hydra_num_layers": layers, "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": True,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "hidden_state_offset": 0,
    } | ({} if own_head else {"foredraft_lm_head": "target", "vocab_size": V})  # fmt: skip
    return save(folder, said | config, tensors, file)


def _insert_dropout(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "hydra_mlp":
        parts[2] = str(2 * int(parts[2]) + 1)
    elif parts[0] == "hydra_lm_head":
        parts.insert(2, "1")
    return ".".join(parts)


def _make_prefix_layer(g: torch.Generator) -> dict[str, Tensor]:
    """Make a layer with the proportions of the target in test_checkpoints_forward.py."""
    made = {"prefix_embeding_layer.embed_tokens.weight": random_matrix(g, V, H)}
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    layer = {f"self_attn.{name}": random_matrix(g, rows, H) for name, rows in sizes.items()}
    layer |= {"self_attn.o_proj": random_matrix(g, H, HEADS * HEAD_DIM), "mlp.down_proj": random_matrix(g, H, 8)}
    layer |= {f"mlp.{name}_proj": random_matrix(g, 8, H) for name in ("gate", "up")}
    layer |= {f"{name}_layernorm": random_near_one(g, H) for name in ("input", "post_attention")}
    made |= {f"prefix_embeding_layer.layers.0.{name}.weight": value for name, value in layer.items()}
    return made | {
        "prefix_embeding_layer.norm.weight": random_near_one(g, H),
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2),
    }


def make_layer(
    g: torch.Generator,
    width: int,
    norms: tuple[str, ...],
    hidden: int = H,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> dict[str, Tensor]:
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    made = {f"self_attn.{name}.weight": random_matrix(g, rows, width) for name, rows in sizes.items()}
    if qkv_bias:
        made |= {f"self_attn.{name}.bias": torch.randn(rows, generator=g) for name, rows in sizes.items()}
    if qk_norm:
        made |= {f"self_attn.{name}.weight": random_near_one(g, HEAD_DIM) for name in ("q_norm", "k_norm")}
    made["self_attn.o_proj.weight"] = random_matrix(g, hidden, HEADS * HEAD_DIM)
    made |= {f"mlp.{name}.weight": random_matrix(g, INNER, hidden) for name in ("gate_proj", "up_proj")}
    made["mlp.down_proj.weight"] = random_matrix(g, hidden, INNER)
    return made | {f"{name}.weight": random_near_one(g, hidden) for name in norms}


def eagle(
    folder: Path, *, fc_bias: bool = True, qkv_bias: bool = False, embedding: bool = True, layers: int = 1,
    file: str = "pytorch_model.bin", dtype: torch.dtype = torch.float32, **config: Any,
) -> Path:  # fmt: skip
    """EAGLE-1/2 as its authors publish it."""
    g = torch.Generator().manual_seed(6)
    tensors = {"fc.weight": random_matrix(g, H, 2 * H)}
    if fc_bias:
        tensors["fc.bias"] = torch.randn(H, generator=g)
    if embedding:
        tensors["embed_tokens.weight"] = random_matrix(g, V, H)
    for i in range(layers):
        norms = ("input_layernorm", "post_attention_layernorm")[i == 0 :]
        tensors |= {f"layers.{i}.{name}": value for name, value in make_layer(g, H, norms, qkv_bias=qkv_bias).items()}
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    return save(folder, LLAMA | {"num_hidden_layers": layers, "bias": fc_bias} | config, tensors, file)


def dflash(
    folder: Path, *, ids: tuple[int, ...] = (1, 4, 9), layers: int = 2, size: int = 4, mask: int = 39,
    copies: bool = False, nested: Mapping[str, Any] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """DFlash as z-lab publishes it; with copies of the target's matrices as DeepSpec does."""
    g = torch.Generator().manual_seed(16)
    tensors = {"fc.weight": random_matrix(g, H, len(ids) * H)}
    tensors |= {name: random_near_one(g, H) for name in ("hidden_norm.weight", "norm.weight")}
    for i in range(layers):
        made = make_layer(g, H, ("input_layernorm", "post_attention_layernorm"), qk_norm=True)
        tensors |= {f"layers.{i}.{name}": value for name, value in made.items()}
    if copies:
        tensors |= {name: random_matrix(g, V, H) for name in ("embed_tokens.weight", "lm_head.weight")}
    settings = {"mask_token_id": mask, "target_layer_ids": list(ids)} | dict(nested or {})
    declared = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": layers, "block_size": size,
        "num_target_layers": LAYERS, "head_dim": HEAD_DIM, "dflash_config": settings,
    }  # fmt: skip
    return save(folder, LLAMA | declared | config, tensors)


def dspark(folder: Path, *, kind: str = "vanilla", rank: int = 6, **config: Any) -> Path:
    """DSpark as DeepSpec publishes it: all settings beside each other, and copies of the target's matrices."""
    dflash(folder, copies=True)
    g = torch.Generator().manual_seed(17)
    heads = {
        "markov_head.markov_w1.weight": torch.randn(V, rank, generator=g),
        "markov_head.markov_w2.weight": torch.randn(V, rank, generator=g),
        "confidence_head.proj.weight": random_matrix(g, 1, H + rank),
        "confidence_head.proj.bias": torch.randn(1, generator=g),
    }
    if kind == "gated":
        heads |= {f"markov_head.gate_proj.{n}": t for n, t in _make_linear(g, rank, H + rank).items()}
    if kind == "rnn":
        heads |= {f"markov_head.joint_proj.{n}": t for n, t in _make_linear(g, 3 * rank, H + 2 * rank).items()}
    edit_tensors(folder, more=heads)
    nested = json.loads((folder / "config.json").read_text())["dflash_config"]
    return edit_config(
        folder, ("dflash_config",), architectures=["Qwen3DSparkModel"], num_anchors=512, markov_rank=rank,
        markov_head_type=kind, enable_confidence_head=True, confidence_head_with_markov=True, **nested, **config,
    )  # fmt: skip


def _make_linear(g: torch.Generator, rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight": random_matrix(g, rows, columns), "bias": torch.randn(rows, generator=g)}


def dflash_speculators(folder: Path, *, vocabulary: int = V, **options: Any) -> Path:
    """DFlash as `speculators` writes it: the boundaries of the states in config.json, and the layer's config inside."""
    dflash(folder, copies=True)
    inner = json.loads((folder / "config.json").read_text())
    head = ("block_size", "num_target_layers", "dflash_config")
    nested = inner["dflash_config"]
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "the-target"}},
        "draft_vocab_size": vocabulary, "target_hidden_size": None, "block_size": inner["block_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"], "sliding_window_non_causal": False, "projector_type": "dflash",
        "transformer_layer_config": {name: value for name, value in inner.items() if name not in head},
    } | options  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def peagle(folder: Path, mask: int = 39, *, key: str = "ptd_token_id", **options: Any) -> Path:
    """P-EAGLE as its authors publish it: an EAGLE-3 head with a learnt state for masks."""
    eagle3(folder, **options)
    g = torch.Generator().manual_seed(18)
    return edit_config(edit_tensors(folder, more={"mask_hidden": torch.randn(1, 1, 3 * H, generator=g)}), **{key: mask})


def d2t(step: int = 1) -> Tensor:
    """[VD] offsets of ascending ids that skip some."""
    ids = torch.arange(V)[torch.randperm(V, generator=torch.Generator().manual_seed(step))[:VD].sort().values]
    return ids - torch.arange(VD)


def eagle3(
    folder: Path, *, first: str = "midlayer", states: int = 3, whole: bool = False, embedding: bool = False,
    head: bool = True, fc: bool = True, layers: int = 1, qkv_bias: bool = False, qk_norm: bool = False,
    norms: tuple[str, ...] = (),
    hidden: int = H, later: tuple[str, ...] = ("input_layernorm",), dtype: torch.dtype = torch.float32,
    file: str = "model.safetensors", base: Mapping[str, Any] = LLAMA, **config: Any,
) -> Path:  # fmt: skip
    """EAGLE-3 as its authors publish it. `whole` = every token is drafted; `norms` of input_norm, fc_norm, aux_norm."""
    g = torch.Generator().manual_seed(7)
    tensors = {"norm.weight": random_near_one(g, hidden)}
    if fc:
        tensors["fc.weight"] = random_matrix(g, hidden, states * H)
    if head:
        tensors["lm_head.weight"] = random_matrix(g, V if whole else VD, hidden)
    if embedding or hidden != H:
        tensors["embed_tokens.weight"] = random_matrix(g, V, hidden)
    if "input_norm" in norms:
        tensors["input_norm.weight"] = random_near_one(g, states * H)
    for i, name in enumerate(("low", "mid", "high")[:states]):
        if "fc_norm" in norms:
            tensors[f"fc_norm.{i}.weight"] = random_near_one(g, H)
        if "aux_norm" in norms:
            tensors[f"aux_norm_{name}.weight"] = random_near_one(g, H)
    for i in range(layers):
        kinds = ("hidden_norm", "input_layernorm") if i == 0 else later
        one = make_layer(
            g, hidden if i else 2 * hidden, (*kinds, "post_attention_layernorm"), hidden, qkv_bias, qk_norm
        )
        if len(later) > 1 and i:
            one["hidden_norm.weight"] = one["input_layernorm.weight"].clone()
        prefix = first if i == 0 else f"layers.{i}"
        tensors |= {f"{prefix}.{name}": value for name, value in one.items()}
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    if not whole:
        tensors["d2t"] = d2t()
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
        tensors["t2d"][d2t() + torch.arange(VD)] = True
    said = {
        "draft_vocab_size": V if whole else VD,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "head_dim": HEAD_DIM,
    }
    return save(folder, {**base, **said, **config}, tensors, file)


def specforge(folder: Path, ids: list[int] | None = None, **options: Any) -> Path:
    """`ids` name layers by their outputs."""
    nested = {} if ids is None else {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return eagle3(folder, architectures=["LlamaForCausalLMEagle3"], **nested, **options)


def modelopt(folder: Path, ids: list[int] | None = None, **options: Any) -> Path:
    """`ids` name layers by their outputs."""
    nested = {"use_aux_hidden_state": options.get("fc", True), "use_input_layernorm_in_first_layer": True}
    if ids is not None:
        nested[IDS] = ids
    options = {"first": "layers.0", "eagle_config": nested} | options
    return eagle3(folder, architectures=["LlamaForCausalLMEagle3"], **options)


def speculators(folder: Path, ids: list[int] | None = None, kind: str = "eagle3", **options: Any) -> Path:
    """`ids` are boundaries."""
    eagle3(folder, first="layers.0", **options)
    inner = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "the-target", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": inner.pop("draft_vocab_size"), "target_hidden_size": None, IDS: ids,
        "tie_word_embeddings": False, "transformer_layer_config": inner,
    }  # fmt: skip
    moved = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config |= {name: inner.pop(name) for name in moved if name in inner}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def chimera(folder: Path, *, taps: tuple[int, ...] = (1, -1), heads: int = 2, **config: Any) -> Path:
    """Write a head as `foredraft train chimera` does."""
    g = torch.Generator().manual_seed(8)
    tensors = {
        "trigram.weight": random_matrix(g, H, 3 * H),
        "join.weight": random_matrix(g, H, 2 * H),
        "norm.weight": random_near_one(g, H),
    }
    if len(taps) > 1:
        tensors["fc.weight"] = random_matrix(g, H, len(taps) * H)
    for i in range(heads):
        tensors |= {f"heads.{i}.weight": random_matrix(g, H, 2 * H), f"heads.{i}.bias": random_matrix(g, H)}
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors |= {f"layers.0.{name}": value for name, value in make_layer(g, H, norms).items()}
    said = {"architectures": ["ChimeraModel"], "model_type": "chimera", "target_layer_taps": list(taps)}
    return save(folder, LLAMA | said | config, tensors)
