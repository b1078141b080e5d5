"""Loading of the target of an `LLM`, with its tokenizer: a folder, a hub id, a built-in model or a loaded one."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foredraft import zoo
from foredraft.errors import ForedraftError
from foredraft.files.hub import find_revision
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.quantize import check_quantization
from foredraft.models.hf import HFModel
from foredraft.models.images.loading import check_image_options, wrap_with_images
from foredraft.models.kv_dtype import AUTO, apply_kv_dtype
from foredraft.models.loading import check_cpu_dtype, load_model, load_tokenizer, parse_device, read_vocab_size
from foredraft.models.lora import merge_lora
from foredraft.models.wrap import explain_unsupported_model, wrap_model
from foredraft.tensor_parallel.checks import check_loaded_model, check_options
from foredraft.tensor_parallel.loading import load_parallel_model

AUTO_TOKENIZER = "auto"  # the tokenizer in the folder of the model


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
    revision: str | None,
    fused: bool | None,
    tensor_parallel_size: int,
    lora: str | Path | None = None,
    sharer: HFModel | None = None,
    exact: bool = False,
    kv_dtype: str = "auto",
    max_images: int = 0,
) -> LoadedTarget:
    """Load a target; arguments as of `LLM`, whose `shares_weights_of` is `sharer`.

    Raises:
        ForedraftError: one line that says what to do.
    """
    if lora is not None or sharer is not None:
        _check_shared_load(model, tensor_parallel_size)
    if isinstance(model, HFModel):
        return _reuse_target(model, max_model_len, tokenizer, exact, kv_dtype)
    check_image_options(model, max_images, tensor_parallel_size)
    check_quantization(quantization)
    check_options(tensor_parallel_size, quantization, fused, exact, kv_dtype)
    _check_types(max_model_len, tokenizer, exact)
    builtin = zoo.resolve_target(model)
    name = model if builtin is None else str(zoo.find_target_folder(builtin))
    parallel = None
    own_tokenizer = None  # folder or hub id that the tokenizer "auto" comes from
    if isinstance(name, (str, Path)):
        name = str(name)
        folder = own_tokenizer = find_revision(name, revision)
        if tensor_parallel_size > 1:
            parallel = load_parallel_model(folder, name, dtype, device, tensor_parallel_size)
            loaded = parallel.model
        else:  # an adapter may be for the image encoder too, so it needs the whole model; it changes rounded weights
            is_text, rounding = lora is None and not max_images, None if lora else quantization
            loaded = load_model(folder, dtype, parse_device(device), 1, rounding, is_text)
        loaded = loaded if lora is None else merge_lora(loaded, lora, name)
    else:
        _check_loaded(tensor_parallel_size, revision)
        loaded, name = name, getattr(name, "name_or_path", "") or type(name).__name__
    if isinstance(tokenizer, (str, Path)):
        source = own_tokenizer if tokenizer == AUTO_TOKENIZER else str(tokenizer)
        tokenizer = None if source is None else _load_tokenizer(source, loaded, is_required=tokenizer != AUTO_TOKENIZER)
    if parallel is not None:
        return LoadedTarget(parallel.with_context(max_model_len), tokenizer, builtin, fused is not False)
    check_cpu_dtype(loaded)
    is_ours = isinstance(model, (str, Path)) or model is None
    _check_fused(loaded, name, fused)
    is_fused = is_ours or quantization is not None or exact or kv_dtype != AUTO if fused is None else fused
    wrap = partial(wrap_model, loaded, name, is_fused, is_ours, quantization, sharer, exact)
    target = wrap_with_images(loaded, wrap, str(own_tokenizer), max_images) if max_images else wrap()
    target = apply_kv_dtype(target, kv_dtype).with_context(max_model_len)
    return LoadedTarget(target, tokenizer, builtin, fused is not False)


def _reuse_target(
    model: HFModel, max_model_len: int | None, tokenizer: Any, exact: bool, kv_dtype: str
) -> LoadedTarget:
    """Return a target that the caller loaded. Raises ForedraftError if it is not `exact`, or for a `kv_dtype`."""
    if kv_dtype != AUTO:
        raise ForedraftError("a target that was loaded before keeps its keys and values; leave kv_dtype out")
    if exact and not model.is_exact:
        raise ForedraftError(f"{model.name} was loaded without exact=True; load it with it, or leave exact out")
    own_tokenizer = None if tokenizer == AUTO_TOKENIZER else tokenizer
    return LoadedTarget(model.with_context(max_model_len), own_tokenizer, None, False)


def _check_fused(model: Any, name: str, fused: bool | None) -> None:
    """Raise ForedraftError if native code is required and cannot run the model."""
    # If the kernels are missing, load_library warns, and torch runs everything.
    reason = explain_unsupported_model(model) if fused and load_library() is not None else None
    if reason is not None:
        raise ForedraftError(f"{name} cannot run as native code ({reason}); leave fused out")


def _check_types(max_model_len: Any, tokenizer: Any, exact: Any) -> None:
    """Raise ForedraftError for arguments of a wrong type."""
    if not isinstance(exact, bool):
        raise ForedraftError(f"exact is True or False, got {exact!r:.80}")
    if max_model_len is not None and (not isinstance(max_model_len, int) or isinstance(max_model_len, bool)):
        raise ForedraftError(f"max_model_len must be an integer or None, got {max_model_len!r:.80}")
    if not isinstance(tokenizer, (str, Path)) and not callable(tokenizer) and tokenizer is not None:
        raise ForedraftError(f"tokenizer takes a tokenizer, its folder or hub id, or None; got {tokenizer!r:.80}")


def _check_loaded(tensor_parallel_size: int, revision: str | None) -> None:
    """Raise ForedraftError if a loaded model is given with options of a folder or hub id."""
    check_loaded_model(tensor_parallel_size)
    if revision is not None:
        raise ForedraftError("a loaded model has no revision; leave revision out")


def _check_shared_load(model: Any, tensor_parallel_size: int) -> None:
    """Raise ForedraftError if a model cannot be loaded with an adapter or with weights of another model."""
    if model is not None and not isinstance(model, (str, Path)):
        raise ForedraftError(
            "lora and shares_weights_of are for a model that is loaded here; give its folder or hub id"
        )
    if tensor_parallel_size > 1:
        raise ForedraftError("lora and shares_weights_of run in one process; leave tensor_parallel_size out")


def _load_tokenizer(source: str, model: Any, is_required: bool) -> Any | None:
    """Load a tokenizer; None for a folder without one. Raises ForedraftError if one `is_required`."""
    tokenizer = load_tokenizer(source, read_vocab_size(model))
    if tokenizer is None and is_required:
        raise ForedraftError(f"{source} has no tokenizer; give the folder of a tokenizer, or leave tokenizer out")
    return tokenizer
