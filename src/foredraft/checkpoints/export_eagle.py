"""EAGLE-1/2 for engines. They need two files: vLLM has no bias of fc, and SGLang leaves a missing one at random."""

import torch

from foredraft.checkpoints.layouts import CheckpointLayout, make_layout
from foredraft.checkpoints.schema import Checkpoint, EagleShape
from foredraft.checkpoints.target import ExportTarget
from foredraft.errors import ForedraftError

FC_BIAS = "fc.bias"
# Both engines take `bias` for biases of attention.
NO_BIAS_CONFIG = {"bias": False}


def export_eagle_vllm(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Without fc.bias, which may be left out only where it is zero."""
    shape, made = _make_eagle_layout(checkpoint)
    if shape.block.has_out_bias:
        raise ForedraftError(f"{checkpoint.folder} has a bias in o_proj, which vLLM loads no EAGLE head with")
    if FC_BIAS in made.tensors and bool(made.tensors.pop(FC_BIAS).any()):
        raise ForedraftError(
            f"{checkpoint.folder} has an fc.bias, and vLLM loads no EAGLE head with one; use --format sglang, or train "
            "one without"
        )
    config = made.config | NO_BIAS_CONFIG | {"attention_bias": False, "qkv_bias": shape.block.has_qkv_bias}
    return CheckpointLayout(made.method, made.tensors, config), []


def export_eagle_sglang(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """With fc.bias, zeros if there is none."""
    shape, made = _make_eagle_layout(checkpoint)
    if shape.block.has_qkv_bias or shape.block.has_out_bias:
        raise ForedraftError(
            f"{checkpoint.folder} has biases in its attention, which SGLang loads no EAGLE head with; use --format vllm"
        )
    dtype = made.tensors["fc.weight"].dtype
    tensors = {FC_BIAS: torch.zeros(shape.block.hidden, dtype=dtype)} | made.tensors
    config = made.config | NO_BIAS_CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}
    notes = ["SGLang reads the target's embeddings instead of its embed_tokens"] if shape.has_embedding else []
    return CheckpointLayout(made.method, tensors, config), notes


def _make_eagle_layout(checkpoint: Checkpoint) -> tuple[EagleShape, CheckpointLayout]:
    assert isinstance(checkpoint.shape, EagleShape), "routed by method"
    return checkpoint.shape, make_layout(checkpoint.shape, checkpoint.tensors)
