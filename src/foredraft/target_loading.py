"""Loading of the target of an `LLM`, with its tokenizer: a folder, a hub id, a built-in model or a loaded one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft import zoo
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.quantize import check_quantization
from foredraft.models.hf import HFModel
from foredraft.models.loading import load_model, load_tokenizer, parse_device, read_vocab_size
from foredraft.models.wrap import explain_unsupported_model, wrap_model


@dataclass(frozen=True)
class LoadedTarget:
    """Target and what belongs to it."""

    model: HFModel
    tokenizer: Any | None
    builtin: str | None  # name of the target if it is built-in
    fused: bool  # run recognised draft models as native code


def load_target(
    model: str | Path | Any | None,
    *,
    dtype: str | torch.dtype,
    quantization: str | None,
    device: str | torch.device,
    tokenizer: Any,
    max_model_len: int | None,
    fused: bool | None,
) -> LoadedTarget:
    """Load a target; arguments as of `LLM`.

    Raises:
        ForedraftError: one line that says what to do.
    """
    check_quantization(quantization)
    builtin = zoo.resolve_target(model)
    name = model if builtin is None else str(zoo.find_target_folder(builtin))
    if isinstance(name, (str, Path)):
        name = str(name)
        loaded = load_model(name, dtype, parse_device(device))
        tokenizer = load_tokenizer(name, read_vocab_size(loaded)) if isinstance(tokenizer, str) else tokenizer
    else:
        loaded, name = name, getattr(name, "name_or_path", "") or type(name).__name__
        tokenizer = None if isinstance(tokenizer, str) else tokenizer
    if loaded.dtype in (torch.float16,) and loaded.device.type == "cpu":
        raise ForedraftError("float16 is slow and inexact on CPU; use dtype='bfloat16' or 'float32'")
    is_ours = isinstance(model, (str, Path)) or model is None
    # If the kernels are missing, load_library warns, and torch runs everything.
    reason = explain_unsupported_model(loaded) if fused and load_library() is not None else None
    if reason is not None:
        raise ForedraftError(f"{name} cannot run as native code ({reason}); leave fused out")
    is_fused = is_ours or quantization is not None if fused is None else fused
    target = wrap_model(loaded, name, is_fused, is_ours, quantization).with_context(max_model_len)
    return LoadedTarget(target, tokenizer, builtin, fused is not False)
