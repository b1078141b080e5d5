"""EAGLE-1/2 for engines. They need two files: vLLM has no bias of fc, and SGLang leaves a missing one at random."""

import torch

from foredraft.checkpoints.base import Checkpoint, EagleShape
from foredraft.checkpoints.layouts import Layout, layout
from foredraft.checkpoints.target import Target
from foredraft.errors import ForedraftError

BIAS = "fc.bias"
# Both engines take `bias` for biases of attention.
QUIET = {"bias": False}


def eagle_for_vllm(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[str]]:
    """Without fc.bias, which may be left out only where it is zero."""
    shape, made = _made(checkpoint)
    if shape.block.has_out_bias:
        raise ForedraftError(f"{checkpoint.folder} has a bias in o_proj, which vLLM loads no EAGLE head with")
    if BIAS in made.tensors and bool(made.tensors.pop(BIAS).any()):
        raise ForedraftError(
            f"{checkpoint.folder} has an fc.bias, and vLLM loads no EAGLE head with one; use --format sglang, or train "
            "one without"
        )
    config = made.config | QUIET | {"attention_bias": False, "qkv_bias": shape.block.has_qkv_bias}
    return Layout(made.method, made.tensors, config), []


def eagle_for_sglang(checkpoint: Checkpoint, target: Target) -> tuple[Layout, list[str]]:
    """With fc.bias, zeros if there is none."""
    shape, made = _made(checkpoint)
    if shape.block.has_qkv_bias or shape.block.has_out_bias:
        raise ForedraftError(
            f"{checkpoint.folder} has biases in its attention, which SGLang loads no EAGLE head with; use --format vllm"
        )
    dtype = made.tensors["fc.weight"].dtype
    tensors = {BIAS: torch.zeros(shape.block.hidden, dtype=dtype)} | made.tensors
    config = made.config | QUIET | {"architectures": ["LlamaForCausalLMEagle"]}
    notes = ["SGLang reads the target's embeddings instead of its embed_tokens"] if shape.has_embedding else []
    return Layout(made.method, tensors, config), notes


def _made(checkpoint: Checkpoint) -> tuple[EagleShape, Layout]:
    assert isinstance(checkpoint.shape, EagleShape), "routed by method"
    return checkpoint.shape, layout(checkpoint.shape, checkpoint.tensors)
