"""Which quantised checkpoints transformers decodes, and which it would run with wrong weights.

transformers warns of a kind that it does not have, leaves the scales out and computes with the rounded numbers as if
they were the weights. What it warns of is refused here.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from foredraft.errors import ForedraftError
from foredraft.models.folder import StoredTensors

# tensors beside a rounded weight, without which it is another weight; not k_scale and v_scale, which are of a KV cache
SCALE_TENSORS = re.compile(
    r"(^|[._])(weight_scale(_inv|_2)?|weight_global_scale|weight_packed|weight_shape|weight_zero_point|scale_inv|"
    r"input_scale|input_global_scale|activation_scale|pre_quant_scale|qweight|qzeros|g_idx|SCB|absmax|quant_map|"
    r"quant_state[\w.]*|\w+_blocks|\w+_scales?_inv)$"
)
MODELOPT_FILE = "hf_quant_config.json"
BITSANDBYTES_TENSORS = re.compile(r"\.(absmax|quant_map|quant_state\..*|SCB)$")
REMEDY = (
    "use the unquantised checkpoint (LLM(quantization='int8') rounds it while loading), or one in a format that "
    "transformers decodes"
)


def check_quantization_kind(config: Mapping[str, Any], name: str) -> str | None:
    """The kind of quantisation that config.json names, None = none. Raises ForedraftError for one that is unknown."""
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    blocks = [place[key] for place in places for key in ("quantization_config", "compression_config") if place.get(key)]
    block = next(iter(blocks), None)
    if block is None:
        return None
    kind = block.get("quant_method") if isinstance(block, Mapping) else None
    if isinstance(block, Mapping) and kind is None and (block.get("load_in_4bit") or block.get("load_in_8bit")):
        return "bitsandbytes"  # as older releases wrote it
    if kind == "bitsandbytes" or kind in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return str(kind)
    known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
    raise ForedraftError(
        f"{name}: config.json says quant_method {kind!r}, which transformers does not decode (it has {known}), so its "
        f"weights would be wrong; {REMEDY}"
    )


def check_stored_dtypes(folder: Path, stored: StoredTensors, kind: str | None, name: str) -> None:
    """Raises ForedraftError where files or dtypes show a quantisation that config.json does not name."""
    if kind == "bitsandbytes":
        _check_bitsandbytes(stored, name)
    if kind is not None:
        return
    if (folder / MODELOPT_FILE).exists():
        raise ForedraftError(
            f"{name}: its {MODELOPT_FILE} says that ModelOpt quantised it, and config.json names no kind that "
            "transformers "
            f"decodes, so its weights would be wrong; {REMEDY}"
        )
    rounded = sorted(key for key, (dtype, _) in stored.items() if dtype.startswith("F8"))
    if rounded:
        raise ForedraftError(
            f"{name}: {rounded[0]} is stored as {stored[rounded[0]][0]} (float8), and config.json has no "
            f"quantization_config, so its weights would be wrong; fetch config.json again, or {REMEDY}"
        )
    check_unused_tensors(stored, name)


def _check_bitsandbytes(stored: StoredTensors, name: str) -> None:
    """Either every weight is still a float, and is rounded while loading, or the packed ones have their scales."""
    packed = sorted(key for key, (dtype, _) in stored.items() if dtype in ("U8", "I8") and key.endswith(".weight"))
    if packed and not any(map(BITSANDBYTES_TENSORS.search, stored)):
        raise ForedraftError(
            f"{name}: config.json says bitsandbytes and {packed[0]} is packed, but no scales (absmax, SCB) are stored "
            "with it; fetch the folder again, or use the unquantised checkpoint"
        )


def check_unused_tensors(keys: Iterable[str], name: str) -> None:
    """Raises ForedraftError where tensors that a model has no place for are the scales of its weights."""
    left = sorted(key for key in keys if SCALE_TENSORS.search(key))
    if left:
        raise ForedraftError(
            f"{name}: the model has no place for {left[0]}, so that its quantised weights would be wrong; {REMEDY}"
        )
