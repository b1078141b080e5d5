"""Export of EAGLE-1/2 heads for vLLM and SGLang.

Each engine needs its own file: vLLM has no bias in fc, and SGLang leaves a missing bias at random.
"""

import torch

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.eagle.checkpoint import EagleShape, make_layout
from foredraft.errors import ForedraftError

FC_BIAS = "fc.bias"
# Both engines read the key `bias` as the biases of attention.
NO_BIAS_CONFIG = {"bias": False}


def export_eagle_vllm(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export without fc.bias, which may be dropped only if it is zero."""
    shape, layout = _make_eagle_layout(checkpoint)
    if shape.block.has_out_bias:
        raise ForedraftError(f"{checkpoint.folder} has a bias in o_proj, and vLLM loads no EAGLE head with one")
    if FC_BIAS in layout.tensors and bool(layout.tensors.pop(FC_BIAS).any()):
        raise ForedraftError(
            f"{checkpoint.folder} has an fc.bias, and vLLM loads no EAGLE head with one; use --format sglang, or train "
            "one without"
        )
    config = layout.config | NO_BIAS_CONFIG | {"attention_bias": False, "qkv_bias": shape.block.has_qkv_bias}
    return CheckpointLayout(layout.method, layout.tensors, config), []


def export_eagle_sglang(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export with fc.bias, zeros if the head has none."""
    shape, layout = _make_eagle_layout(checkpoint)
    if shape.block.has_qkv_bias or shape.block.has_out_bias:
        raise ForedraftError(
            f"{checkpoint.folder} has biases in its attention, and SGLang loads no EAGLE head with them; "
            "use --format vllm"
        )
    dtype = layout.tensors["fc.weight"].dtype
    tensors = {FC_BIAS: torch.zeros(shape.block.hidden, dtype=dtype)} | layout.tensors
    config = layout.config | NO_BIAS_CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}
    notes = ["SGLang reads the target's embeddings instead of its embed_tokens"] if shape.has_embedding else []
    return CheckpointLayout(layout.method, tensors, config), notes


def _make_eagle_layout(checkpoint: Checkpoint) -> tuple[EagleShape, CheckpointLayout]:
    assert isinstance(checkpoint.shape, EagleShape), "routed by method"
    return checkpoint.shape, make_layout(checkpoint.shape, checkpoint.tensors)
