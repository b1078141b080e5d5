"""Recognition of a drafter's method from its tensor names first and from config.json second."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from foredraft.checkpoints.formats import CheckpointFormats, LayoutOrder, StoredLayout
from foredraft.checkpoints.speculators import MODEL_TYPE_KEY
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.errors import ForedraftError

# Signs of drafters that are recognised but not supported: keys of config.json, tensor names.
UNSUPPORTED_KEYS = {"dspark_config": "DSpark"}
UNSUPPORTED_TENSORS = {
    r"(model\.)?mtp_layers\.": "MTP",
    r"(model\.layers\.\d+\.)?eh_proj\.": "MTP",
    r"(fusion_fc|embedding_layernorm|pre_lm_head_layernorm|transformer\.self_attn)\b": "retired EAGLE/HASS",
}
# Tensor names of a whole model; no supported drafter has one.
WHOLE_MODEL_NAME = re.compile(
    r"^((model|transformer|gpt_neox|backbone)\.|language_model\.|wte\.|h\.\d|shared\.weight|(en|de)coder\.block\.)"
)


def is_whole_model(names: Collection[str]) -> bool:
    """Check whether tensor names are those of a whole language model."""
    return any(map(WHOLE_MODEL_NAME.match, names))


def read_architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures that config.json names."""
    architectures = config.get("architectures")
    return [str(name) for name in architectures] if isinstance(architectures, list) else []


def recognise_layout(
    files: TensorFiles, config: Mapping[str, Any], formats: CheckpointFormats
) -> tuple[str, StoredLayout]:
    """Return the method and the layout of a folder.

    Args:
        files: Tensors of the folder.
        config: Content of config.json.
        formats: Formats of all methods.

    Raises:
        ForedraftError: if no layout matches, or the drafter is known and not supported.
    """
    names = list(files.stored_tensors)
    for order in LayoutOrder:
        unsupported = _find_unsupported(order, names, config)
        if unsupported is not None:
            raise _make_unsupported_error(files, unsupported, formats)
        for method, layout in sorted(_list_layouts(order, formats), key=lambda entry: entry[0]):
            if layout.matches(names, config):
                return method, layout
    shown = ", ".join(sorted(names)[:3])
    raise files.refuse(f"its tensors ({shown}, ...) are those of no drafter that is supported")


def _list_layouts(order: LayoutOrder, formats: CheckpointFormats) -> list[tuple[str, StoredLayout]]:
    return [(method, entry) for method, one in formats.items() for entry in one.layouts if entry.order == order]


def _find_unsupported(order: LayoutOrder, names: list[str], config: Mapping[str, Any]) -> str | None:
    """Return what to refuse before the signs of an order are checked, None if there is nothing."""
    if order == LayoutOrder.UNIQUE_NAMES and config.get(MODEL_TYPE_KEY) is not None:
        return f"speculators' {config[MODEL_TYPE_KEY]}"
    return _recognise_unsupported(names, config) if order == LayoutOrder.WHOLE_MODEL else None


def _recognise_unsupported(names: list[str], config: Mapping[str, Any]) -> str | None:
    """Return the name of a method that is recognised but not supported, None if there is none.

    A whole model may have such tensors beside its own.
    """
    has_layers = any(re.match(r"(model\.)?(embed_tokens|layers\.0)\.", name) for name in names)
    if not is_whole_model(names) or not has_layers:
        for pattern, method in UNSUPPORTED_TENSORS.items():
            if any(re.match(pattern, name) for name in names):
                return method
    return next((method for key, method in UNSUPPORTED_KEYS.items() if key in config), None)


def _make_unsupported_error(files: TensorFiles, kind: str, formats: CheckpointFormats) -> ForedraftError:
    *first, last = sorted(formats)
    return files.refuse(f"it holds a {kind} drafter, which is not supported; {', '.join(first)} and {last} are")
