"""EAGLE-3 for engines: one layout that vLLM and SGLang read alike, and one for each where they do not."""

from typing import Any

from torch import Tensor

from foredraft.checkpoints.aux_layers import IDS
from foredraft.checkpoints.base import Checkpoint, Eagle3Shape
from foredraft.checkpoints.layers import layer_config
from foredraft.checkpoints.layouts import Layout, eagle3_config, layout
from foredraft.checkpoints.target import Target
from foredraft.errors import ForedraftError
from foredraft.models.window import NORMED

SPECULATIVE_TOKENS = 3
USUAL_STATES = 3  # of the target that fc reads, where nothing says another number


def portable(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[str]]:
    """Right in both engines, by what both read alike."""
    _check(checkpoint, target, "SGLang", "--format vllm or speculators", is_plain=True)
    return _made(checkpoint, target), _notes(checkpoint, is_shared=True)


def for_sglang(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[str]]:
    _check(checkpoint, target, "SGLang", "--format vllm", is_plain=True)
    return _made(checkpoint, target), _notes(checkpoint, is_shared=True)


def for_vllm(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[str]]:
    _check(checkpoint, target, "vLLM", None)
    made = _made(checkpoint, target)
    if _shape(checkpoint).block.has_qk_norm:
        made.config.update(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    return made, _notes(checkpoint)


def as_speculators(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[str]]:
    """vLLM serves target and drafter from such a folder alone: it names the target."""
    _check(checkpoint, target, "the speculators format", None, is_fed=True)
    shape, made = _shape(checkpoint), _made(checkpoint, target)
    kind = "qwen3" if shape.block.has_qk_norm else "llama"
    layer = layer_config(shape.block, shape.num_layers) | {"model_type": kind, "vocab_size": shape.vocab_size}
    if len(shape.taps) != USUAL_STATES:  # vLLM builds fc by this, and takes it from nowhere else in this format
        layer["num_aux_hidden_states"] = len(shape.taps)
    proposal = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": made.method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": made.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target.facts.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.has_fc_norm,
        "norm_output": shape.feeds_normed,
        "tie_word_embeddings": False,
        IDS: list(shape.taps),
    }
    return Layout(made.method, _first_layer_numbered(made.tensors), config), _notes(checkpoint)


def _first_layer_numbered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def named(name: str) -> str:
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    return {named(name): value for name, value in tensors.items()}


def _made(checkpoint: Checkpoint, target: Target) -> Layout:
    """The published layout; layers are named only where they are not what every engine takes anyway."""
    made = layout(checkpoint.shape, checkpoint.tensors)
    return Layout(made.method, made.tensors, eagle3_config(_shape(checkpoint), target.facts.num_layers))


def _shape(checkpoint: Checkpoint) -> Eagle3Shape:
    assert isinstance(checkpoint.shape, Eagle3Shape), "routed by method"
    return checkpoint.shape


def _check(
    checkpoint: Checkpoint,
    target: Target,
    reader: str,
    instead: str | None,
    is_plain: bool = False,
    is_fed: bool = False,
) -> None:
    """`is_plain`: the reader knows nothing but the authors' own forward; `is_fed`: always states through fc."""
    shape, block, n = _shape(checkpoint), _shape(checkpoint).block, target.facts.num_layers
    outer = [tap for tap in shape.taps if tap in (0, n)]
    everywhere = {
        f"the target's state at boundary {outer[0] if outer else ''}, which no two engines capture alike": bool(outer),
        "a bias in fc": shape.has_fc_bias,
        "biases in some matrices of its attention and not in others": block.has_qkv_bias != block.has_out_bias,
    }
    plain = {
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "norm_output": shape.feeds_normed,
        "biases in its attention": block.has_qkv_bias,
        "norms of queries and keys": block.has_qk_norm,
        "the target's lm_head": not shape.has_own_head,
    }
    everywhere |= {} if is_fed else {"sliding attention": bool(block.windows)}
    fed = {"the target's last state without fc": shape.taps == (NORMED,)}
    faults = everywhere | (plain if is_plain else {}) | (fed if is_plain or is_fed else {})
    for what, is_there in faults.items():
        if is_there:
            hint = (
                f"use {instead}" if instead and what not in everywhere else "train a drafter without it for that engine"
            )
            raise ForedraftError(f"{checkpoint.folder} uses {what}: {reader} would compute something else; {hint}")


def _notes(checkpoint: Checkpoint, is_shared: bool = False) -> list[str]:
    shape = _shape(checkpoint)
    read = "last state, after its final norm" if shape.taps == (NORMED,) else f"states at boundaries {list(shape.taps)}"
    notes = [f"it reads the target's {read}"]
    if is_shared and shape.has_embedding and shape.block.hidden == shape.target_hidden:
        notes.append("SGLang reads the target's embeddings instead of its embed_tokens")
    return notes
