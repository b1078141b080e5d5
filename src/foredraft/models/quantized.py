"""Checks that transformers decodes a quantised checkpoint correctly.

For an unknown kind of quantisation transformers only warns. It ignores the scales and uses the rounded numbers as
weights. These functions refuse such checkpoints.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from foredraft.errors import ForedraftError
from foredraft.models.folder import StoredTensors

# Names of tensors that are needed to decode a rounded weight. Scales of a KV cache (k_scale, v_scale) may be unused.
SCALE_TENSORS = re.compile(
    r"(^|[._])(weight_scale(_inv|_2)?|weight_global_scale|weight_packed|weight_shape|weight_zero_point|scale_inv|"
    r"input_scale|input_global_scale|activation_scale|pre_quant_scale|qweight|qzeros|g_idx|SCB|absmax|quant_map|"
    r"quant_state[\w.]*|\w+_blocks|\w+_scales?_inv)$"
)
MODELOPT_FILE = "hf_quant_config.json"  # quantisation settings that ModelOpt writes beside config.json
BITSANDBYTES_TENSORS = re.compile(r"\.(absmax|quant_map|quant_state\..*|SCB)$")
REMEDY = (
    "use the unquantised checkpoint (LLM(quantization='int8') rounds it while loading), or one in a format that "
    "transformers decodes"
)


def check_quantization_kind(config: Mapping[str, Any], name: str) -> str | None:
    """Read the kind of quantisation from config.json.

    Args:
        config: contents of config.json.
        name: name of the model in errors.

    Returns:
        A kind that transformers decodes, or None without quantisation.

    Raises:
        ForedraftError: transformers does not decode this kind.
    """
    block = find_quantization_block(config)
    if block is None:
        return None
    kind = block.get("quant_method") if isinstance(block, Mapping) else None
    if isinstance(block, Mapping) and kind is None and (block.get("load_in_4bit") or block.get("load_in_8bit")):
        return "bitsandbytes"  # the format of older releases
    if kind == "bitsandbytes" or kind in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return str(kind)
    supported = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
    raise ForedraftError(
        f"{name}: config.json says quant_method {kind!r}, which transformers does not decode (it has {supported}), "
        f"so its weights would be wrong; {REMEDY}"
    )


def find_quantization_block(config: Mapping[str, Any]) -> Any:
    """Find the settings of the quantisation in config.json; None without quantisation."""
    text = config.get("text_config")
    configs = [config, text] if isinstance(text, Mapping) else [config]
    blocks = [each[key] for each in configs for key in ("quantization_config", "compression_config") if each.get(key)]
    return next(iter(blocks), None)


def check_decoder_package(kind: str | None, name: str) -> None:
    """Check that a package is installed that transformers needs to read or round weights.

    Args:
        kind: kind of quantisation from config.json; None = none.
        name: name of the model in errors.

    Raises:
        ForedraftError: the package of bitsandbytes is missing.
    """
    if kind == "bitsandbytes" and find_spec("bitsandbytes") is None:
        raise ForedraftError(
            f"{name} is for bitsandbytes, and only that package decodes or rounds its weights; use the unquantised "
            "checkpoint (quantization='int8' or 'int4' rounds it while loading, on the CPU), or install bitsandbytes"
        )


def check_stored_dtypes(folder: Path, stored: StoredTensors, kind: str | None, name: str) -> None:
    """Check that config.json declares the quantisation that files and dtypes show.

    Args:
        folder: model folder.
        stored: tensors of the folder.
        kind: kind of quantisation from config.json; None = none.
        name: name of the model in errors.

    Raises:
        ForedraftError: the weights are quantised in a way that config.json does not declare.
    """
    if kind == "bitsandbytes":
        _check_bitsandbytes(stored, name)
    if kind is not None:
        return
    if (folder / MODELOPT_FILE).exists():
        raise ForedraftError(
            f"{name}: its {MODELOPT_FILE} says that ModelOpt quantised it, and config.json names no kind that "
            f"transformers decodes, so its weights would be wrong; {REMEDY}"
        )
    rounded = sorted(key for key, (dtype, _) in stored.items() if dtype.startswith("F8"))
    if rounded:
        raise ForedraftError(
            f"{name}: {rounded[0]} is stored as {stored[rounded[0]][0]} (float8), and config.json has no "
            f"quantization_config, so its weights would be wrong; fetch config.json again, or {REMEDY}"
        )
    check_unused_tensors(stored, name)


def _check_bitsandbytes(stored: StoredTensors, name: str) -> None:
    """Refuse packed weights without scales. Weights that are stored as floats are rounded while loading."""
    packed = sorted(key for key, (dtype, _) in stored.items() if dtype in ("U8", "I8") and key.endswith(".weight"))
    if packed and not any(map(BITSANDBYTES_TENSORS.search, stored)):
        raise ForedraftError(
            f"{name}: config.json says bitsandbytes and {packed[0]} is packed, but no scales (absmax, SCB) are stored "
            "with it; fetch the folder again, or use the unquantised checkpoint"
        )


def check_unused_tensors(keys: Iterable[str], name: str) -> None:
    """Check that no unused tensor is a scale of a quantised weight.

    Args:
        keys: names of tensors that the model does not use.
        name: name of the model in errors.

    Raises:
        ForedraftError: a scale is unused.
    """
    scales = sorted(key for key in keys if SCALE_TENSORS.search(key))
    if scales:
        raise ForedraftError(
            f"{name}: the model has no place for {scales[0]}, so its quantised weights would be wrong; {REMEDY}"
        )
