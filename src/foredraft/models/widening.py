"""Widening of quantised checkpoints on the CPU: rounded weights are decoded to a floating type while loading."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import QUANTIZED_KINDS, QuantizedWeight
from foredraft.models.folder import list_weight_files, read_config
from foredraft.models.mxfp4 import decode_mxfp4
from foredraft.models.quantized import find_quantization_block
from foredraft.models.rounded_grids import (
    AWQ_BITS,
    PACKED_BITS,
    RoundedGrid,
    unpack_awq,
    unpack_compressed,
    unpack_gptq,
)

log = logging.getLogger(__name__)
MXFP4 = "mxfp4"
WIDENED_KINDS = ("gptq", "awq", "compressed-tensors", MXFP4)
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
SCALE_PARTS = {"gptq": "scales", "awq": "scales", "compressed-tensors": "weight_scale", MXFP4: "scales"}
PART_NAMES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx",
        "input_scale", "input_zero_point",
    ),
    MXFP4: ("blocks", "scales"),
}  # fmt: skip
# Scales of a KV cache that the engine rounds. The cache here keeps the floating type.
CACHE_SCALES = ("k_scale", "v_scale", "q_scale")


@dataclass(frozen=True)
class DecodedModel:
    """Model in memory: what `from_pretrained` of a transformers model class takes without a path."""

    config: Any
    weights: dict[str, Tensor]
    dtype: torch.dtype
    kind: str  # of quantisation
    count: int  # rounded matrices
    size: int  # bytes of the files
    grids: dict[str, QuantizedWeight] = field(default_factory=dict)  # by path of a module; of the wanted kernel alone

    def make_options(self) -> dict[str, Any]:
        """Make the options of `from_pretrained`."""
        named = {"config": self.config, "state_dict": self.weights, "dtype": self.dtype}
        return {"pretrained_model_name_or_path": None, **named}

    def warn(self, name: str, quantization: str | None, num_kept: int) -> None:
        """Warn what became of rounded matrices, in one line.

        Args:
            name: name of the model.
            quantization: "int8" or "int4"; None = none, so that the matrices are widened.
            num_kept: matrices whose values the kernel of `quantization` has exactly.
        """
        if not self.count:
            return
        if quantization is not None:
            log.warning(
                "%s: %d of %d matrices of %s keep their values with quantization=%r; others are rounded a second time, "
                "or widened if they belong to no linear layer; activations are rounded too",
                name, num_kept, self.count, self.kind, quantization,
            )  # fmt: skip
            return
        after = sum(tensor.nbytes for tensor in self.weights.values())
        log.warning(
            "%s: %d matrices of %s are widened to %s: %.1f MB of weights instead of %.1f MB are read in each forward "
            "pass; quantization='int8' or 'int4' makes them small again, and rounds activations too",
            name, self.count, self.kind, str(self.dtype).removeprefix("torch."), after / 1e6, self.size / 1e6,
        )  # fmt: skip


def decode_folder(
    path: Path, dtype: torch.dtype | str, name: str, processes: int = 1, quantization: str | None = None
) -> DecodedModel | None:
    """Decode a folder of one of WIDENED_KINDS for the CPU.

    Args:
        path: model folder, or a hub id, which is left to transformers.
        dtype: floating type of the result; "auto" = float32 if config.json says so, else bfloat16.
        name: name of the model in errors.
        processes: processes that share the model. Default 1.
        quantization: "int8" or "int4", whose grids are kept. Default None = none.

    Returns:
        The model; None for models of other kinds.

    Raises:
        ForedraftError: the layout is not decoded, a part of a matrix is missing, or there are several processes.
    """
    block = find_quantization_block(read_config(path, name)) if path.is_dir() else None
    if block is None or block.get("quant_method") not in WIDENED_KINDS:
        return None
    if processes > 1:
        raise ForedraftError(
            f"{name} is quantised, and such weights are decoded on the CPU for one process only; use "
            "tensor_parallel_size=1, or the unquantised checkpoint"
        )
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    text = config.get_text_config()
    for part in {id(each): each for each in (config, text)}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    if not isinstance(dtype, torch.dtype):  # float16 of published checkpoints is slow and inexact on the CPU
        dtype = torch.float32 if text.dtype is torch.float32 else torch.bfloat16
    # encoder-decoders are packed in other ways
    kernel = None if quantization is None or config.is_encoder_decoder else QUANTIZED_KINDS[quantization]
    weights, grids, count = _read_weights(path, block, dtype, name, kernel)
    size = sum((path / file).stat().st_size for file in list_weight_files(path, name))
    return DecodedModel(config, weights, dtype, block["quant_method"], count, size, grids)


def read_generation_config(model: Any, path: Path) -> None:
    """Give a model the generation_config.json of its folder, which transformers skips for weights in memory."""
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(path))


def _read_weights(
    folder: Path, settings: Mapping[str, Any], dtype: torch.dtype, name: str, kernel: int | None
) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight], int]:
    """Read the tensors of a folder one at a time, with every rounded matrix decoded.

    Products of codes and scales are computed in float32 and rounded to `dtype`. `kernel` is INT8 or INT4.

    Returns:
        Weights by name, those that are exact in the grid of the kernel by path, and the number of rounded matrices.
    """
    kind, bits, widened = settings["quant_method"], _read_bits(settings, name), 0
    found: dict[str, Tensor] = {}
    grids: dict[str, QuantizedWeight] = {}
    with ExitStack() as stack:
        opened = _open_tensors(folder, name, stack)
        for path, names in sorted(_group_parts(opened, "_" if kind == MXFP4 else ".").items()):
            parts = [part for part in PART_NAMES[kind] if part in names] if SCALE_PARTS[kind] in names else []
            if parts:
                stored = {part: opened[names[part]].get_tensor(names[part]) for part in parts}
                title, widened = f"{name}: the weights of {path}", widened + 1
                if kind == MXFP4:
                    found[path] = _decode_experts(stored, dtype, title)
                else:
                    grid = _unpack(stored, settings, bits, title)
                    found[f"{path}.weight"] = grid.decode().to(dtype)
                    fitting = None if kernel is None else grid.fit_kernel(kernel)
                    grids |= {} if fitting is None else {path: fitting}
            for part in names.keys() - {*parts, *CACHE_SCALES}:
                tensor = opened[names[part]].get_tensor(names[part])
                found[names[part]] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    if not widened:
        raise ForedraftError(f"{name}: config.json says {kind}, and no tensor is a {SCALE_PARTS[kind]}; fetch it again")
    return found, grids, widened


def _open_tensors(folder: Path, name: str, stack: ExitStack) -> dict[str, Any]:
    """Open the weight files. Returns the file of each tensor; tensors are read one at a time later."""
    opened = {}
    for file in list_weight_files(folder, name):
        handle = stack.enter_context(safe_open(folder / file, "pt"))
        opened.update(dict.fromkeys(handle.keys(), handle))
    return opened


def _group_parts(keys: Iterable[str], separator: str) -> dict[str, dict[str, str]]:
    """Group the names of tensors by what stands before the last separator, a module or matrix: path -> part -> name."""
    groups: dict[str, dict[str, str]] = {}
    for key in keys:
        path, _, part = key.rpartition(separator)
        groups.setdefault(path, {})[part] = key
    return groups


def _unpack(parts: Mapping[str, Tensor], settings: Mapping[str, Any], bits: int, title: str) -> RoundedGrid:
    """Unpack the matrix of a module. `title` names it in errors."""
    kind = settings["quant_method"]
    try:
        if kind == "gptq":
            return unpack_gptq(parts, bits, 0 if settings.get("checkpoint_format") == "gptq_v2" else 1)
        return unpack_awq(parts) if kind == "awq" else unpack_compressed(parts, bits, _read_block(settings))
    except (KeyError, RuntimeError, IndexError, ForedraftError) as error:
        raise ForedraftError(f"{title} could not be decoded as {kind} ({error}); fetch the folder again") from error


def _decode_experts(parts: Mapping[str, Tensor], dtype: torch.dtype, title: str) -> Tensor:
    """Decode the matrices of experts in MXFP4. `title` names them in errors."""
    try:
        return decode_mxfp4(parts["blocks"], parts["scales"], dtype)
    except (KeyError, ForedraftError) as error:
        raise ForedraftError(f"{title} could not be decoded as MXFP4 ({error}); fetch the folder again") from error


def _read_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Read the shape of the blocks of compressed-tensors that share a scale; None for other groups."""
    weights = [group["weights"] for group in settings["config_groups"].values()]
    blocks = {tuple(each["block_structure"]) for each in weights if each.get("block_structure")}
    if len(blocks) > 1:
        raise ForedraftError(f"blocks of several shapes, {blocks}")
    return next(iter(blocks), None)


def _read_bits(settings: Mapping[str, Any], name: str) -> int:
    """Read the bits of a weight, and refuse layouts that are not decoded."""
    kind, remedy = settings["quant_method"], "use the unquantised checkpoint with quantization='int8' or 'int4'"
    if kind == MXFP4:
        return 4
    if kind == "awq":
        version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", AWQ_BITS)
        if version != "gemm" or bits != AWQ_BITS:
            raise ForedraftError(f"{name}: AWQ of version {version!r} with {bits} bits is not decoded; {remedy}")
        return AWQ_BITS
    if kind == "gptq":
        is_marlin = settings.get("is_marlin_format", False)
        layout, bits = "marlin" if is_marlin else settings.get("checkpoint_format", "gptq"), settings.get("bits")
        if layout not in ("gptq", "gptq_v2") or bits not in PACKED_BITS:
            raise ForedraftError(f"{name}: GPTQ in format {layout!r} with {bits} bits is not decoded; {remedy}")
        return int(bits)
    layout = settings.get("format")
    if layout not in COMPRESSED_FORMATS:
        raise ForedraftError(
            f"{name}: compressed-tensors in format {layout!r} is not decoded (only {', '.join(COMPRESSED_FORMATS)}); "
            f"{remedy}"
        )
    for key in ("transform_config", "sparsity_config"):
        more = settings.get(key) or {}
        if more and more.get("format") != "dense":
            raise ForedraftError(f"{name}: compressed-tensors with a {key} is not decoded; {remedy}")
    groups = settings.get("config_groups") or {}
    found = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
    if len(found) != 1 or None in found or (layout == "pack-quantized" and not found <= set(PACKED_BITS)):
        raise ForedraftError(f"{name}: compressed-tensors with weights of {found} bits is not decoded; {remedy}")
    return int(str(found.pop()))
