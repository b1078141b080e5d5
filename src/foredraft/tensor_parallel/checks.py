"""Refusals of tensor parallelism, before any process starts."""

import os
from typing import Any

import torch

from foredraft.errors import ForedraftError
from foredraft.models.kv_dtype import AUTO, check_kv_dtype
from foredraft.models.loading import parse_device
from foredraft.models.recurrent.examination import has_recurrent_layers

OPTION = "tensor_parallel_size"
# Last parts of the names of modules that make queries, keys or values.
_ATTENTION_INPUTS = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value"}
_SPLIT_BY_HEADS = "colwise"  # style of transformers under which a rank keeps its own heads only


def check_options(
    size: int, quantization: str | None, fused: bool | None, exact: bool = False, kv_dtype: str = AUTO
) -> None:
    """Check the options that several processes exclude.

    Args:
        size: number of processes.
        quantization: kind of rounded weights, or None.
        fused: True = native code is required.
        exact: whether the bits of a row must not depend on other rows. Default False.
        kv_dtype: dtype of keys and values. Default "auto".

    Raises:
        ForedraftError: `size` is no number of processes, or an option needs one process.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ForedraftError(f"{OPTION} must be a number of processes from 1 up, got {size!r:.80}")
    check_kv_dtype(kv_dtype, size)
    if size > 1 and quantization is not None:
        raise ForedraftError(f"quantization runs in one process; leave it or {OPTION} out")
    if size > 1 and fused:
        raise ForedraftError(f"native code runs in one process; leave fused or {OPTION} out")
    if size > 1 and exact:
        raise ForedraftError(
            "an exact target runs in one process, since sums over processes have no fixed order; leave exact or "
            f"{OPTION} out"
        )


def check_loaded_model(size: int) -> None:
    """Raise ForedraftError if a model that is loaded already is to be split."""
    if size > 1:
        raise ForedraftError(f"{OPTION} splits a model while it is loaded; give its folder or hub id")


def check_process_group() -> None:
    """Raise ForedraftError if this process is one of several already, or cannot join a process group."""
    if not torch.distributed.is_available():
        raise ForedraftError(f"{OPTION} needs torch.distributed, which this build of torch lacks; leave it out")
    if torch.distributed.is_initialized():
        raise ForedraftError(
            f"this process has a process group of torch.distributed already; close the other LLM with {OPTION}, or "
            "start this one in a process of its own"
        )
    if "LOCAL_RANK" in os.environ:
        raise ForedraftError(
            f"{OPTION} starts its processes itself; run the program without torchrun, or remove LOCAL_RANK from the "
            "environment"
        )


def choose_device(device: str | torch.device, size: int) -> torch.device:
    """Return the device of rank 0: the CPU or the first GPU.

    Args:
        device: device as the user gave it.
        size: number of processes.

    Raises:
        ForedraftError: the machine has fewer GPUs than processes, or the device names another one.
    """
    chosen = parse_device(device)
    if chosen.type == "cpu":
        if torch.cuda.is_available():  # transformers puts the parts of a model on the GPUs as soon as there is one
            raise ForedraftError(f"{OPTION} on the CPU of a machine with a GPU needs CUDA_VISIBLE_DEVICES='' set")
        return chosen
    if chosen.index:
        raise ForedraftError(
            f"{OPTION}={size} uses the GPUs 0 to {size - 1}; give device='cuda' and choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if count < size:
        raise ForedraftError(f"{OPTION}={size} needs {size} GPUs, and torch sees {count}; give at most {count}")
    return torch.device("cuda", 0)


def check_architecture(model: Any, name: str, size: int) -> None:
    """Check that a model can be split over `size` processes.

    Args:
        model: transformers model, on any device.
        name: name of the model in errors.
        size: number of processes.

    Raises:
        ForedraftError: the model has an encoder or no plan, or its heads cannot be shared out equally.
    """
    if model.config.is_encoder_decoder:
        raise ForedraftError(f"{name} is an encoder-decoder model, which runs in one process; leave {OPTION} out")
    if has_recurrent_layers(model):
        raise ForedraftError(f"{name} has recurrent layers, which run in one process; leave {OPTION} out")
    plan = model.tp_plan
    if not plan:
        raise ForedraftError(
            f"{name} ({type(model).__name__}) has no tensor-parallel plan in transformers; leave {OPTION} out"
        )
    if not any(key.rsplit(".", 1)[-1] in _ATTENTION_INPUTS and style == _SPLIT_BY_HEADS for key, style in plan.items()):
        return  # every rank has all heads
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    for kind, count in (("KV heads", kv_heads), ("attention heads", heads)):
        if count % size:
            divisors = [str(n) for n in range(2, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
            advice = " or ".join(["give " + ", ".join(divisors)] * bool(divisors) + ["leave it out"])
            raise ForedraftError(f"{name} has {count} {kind}, which {OPTION}={size} does not divide; {advice}")
