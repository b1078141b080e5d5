"""Any published drafter from its folder. What it is follows from its tensors first and its config second."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from foredraft.checkpoints import (
    blockwise,
    chimera,
    eagle,
    eagle3,
    early_exit,
    hub,
    hydra,
    medusa,
    mlp_speculator,
    speculators,
    target_identity,
)
from foredraft.checkpoints.file_checks import read_json
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.target_reference import find_target
from foredraft.checkpoints.tensors import TensorFiles, open_tensors
from foredraft.errors import ForedraftError
from foredraft.models import ngram

CheckpointReader = Callable[[TensorFiles, dict[str, Any], TargetInfo], Checkpoint]
READERS: dict[str, CheckpointReader] = {
    medusa.METHOD: medusa.read,
    mlp_speculator.METHOD: mlp_speculator.read,
    eagle.METHOD: eagle.read,
    eagle3.METHOD: eagle3.read,
    chimera.METHOD: chimera.read,
    blockwise.METHOD: blockwise.read,
    hydra.METHOD: hydra.read,
    early_exit.METHOD: early_exit.read,
}
FORMAT_MODULES = (medusa, mlp_speculator, eagle, eagle3, chimera, blockwise, hydra, early_exit)
TITLES = {module.METHOD: module.TITLE for module in FORMAT_MODULES}
WHOLE_MODEL = "draft_model"
TITLES[WHOLE_MODEL] = "a whole language model"
SPECULATORS = "speculators"
NGRAM_TABLE = "ngram_lm"
TITLES[NGRAM_TABLE] = "an n-gram table"

# Drafters that are known and not read: what config or a tensor's name shows them by.
UNSUPPORTED_KEYS = {
    "dflash_config": "DFlash", "dspark_config": "DSpark",
    "markov_rank": "DSpark", "pard_token": "P-EAGLE or PARD", "ptd_token_id": "P-EAGLE",
}  # fmt: skip
UNSUPPORTED_ARCHITECTURES = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE"}
UNSUPPORTED_TENSORS = {
    r"markov_(w1|w2|head)\b": "DSpark",
    r"mask_hidden$": "P-EAGLE",
    r"hidden_norm\.weight$": "DFlash",
    r"(mtp|mtp_layers|model\.mtp_layers)\.": "MTP",
    r"(model\.layers\.\d+\.)?eh_proj\.": "MTP",
    r"(fusion_fc|embedding_layernorm|pre_lm_head_layernorm|transformer\.self_attn)\b": "retired EAGLE/HASS",
}
# What an upload of a whole model looks like; a drafter of ours has no such tensor.
WHOLE_MODEL_NAME = re.compile(
    r"^((model|transformer|gpt_neox|backbone)\.|language_model\.|wte\.|h\.\d|shared\.weight|(en|de)coder\.block\.)"
)


def recognise(folder: str | Path) -> tuple[str, str]:
    """(method, layout) of what lies in a folder or under a hub id. Raises ForedraftError where it is nothing known."""
    files, config = _open(str(folder))
    return _recognise_files(files, config)


def find_named_target(folder: str | Path) -> str | None:
    """The target that a drafter's config names, if it names one; the one it was trained together with, before any
    other. Raises ForedraftError."""
    config = _open(str(folder))[1]
    place = hub.find_folder(str(folder))
    own = target_identity.find_bundled_target(config, place)
    return find_target(config, place) if own is None else str(own)


def read(folder: str | Path, target: TargetInfo, method: str | None = None) -> Checkpoint:
    """A drafter for `target`, checked whole; `method` is what the caller believes it to be. Raises ForedraftError."""
    files, config = _open(str(folder))
    found, layout = _recognise_files(files, config)
    if found not in READERS or method not in (None, found):
        wanted = "a drafter's head" if method in (None, found) else method
        raise ForedraftError(f"{folder} holds {TITLES[found]}, not {wanted}; use --spec-method {found}")
    reader = speculators.read if layout == SPECULATORS else READERS[found]
    return reader(files, config, target)


def _open(folder: str) -> tuple[TensorFiles, dict[str, Any]]:
    place = hub.find_folder(folder)
    config = read_json(place / "config.json", folder)
    return open_tensors(place, folder), config


def _recognise_files(files: TensorFiles, config: dict[str, Any]) -> tuple[str, str]:
    names = list(files.stored_tensors)
    if config.get("format") == ngram.FORMAT:
        return NGRAM_TABLE, "n-gram table"
    kind = config.get(speculators.MODEL_TYPE_KEY)
    if kind is not None:
        if kind not in speculators.METHODS:
            raise _make_unsupported_error(files, f"speculators' {kind}")
        return speculators.METHODS[kind], SPECULATORS
    if any(map(medusa.is_tensor_name, names)):
        return medusa.METHOD, "medusa"
    if hydra.is_hydra(names, config):
        return hydra.METHOD, "hydra"
    is_whole = any(map(WHOLE_MODEL_NAME.match, names))
    foreign = _recognise_unsupported(names, config, is_whole)
    if foreign:
        raise _make_unsupported_error(files, foreign)
    if is_whole:
        return WHOLE_MODEL, "causal LM"
    method = _recognise_names(names)
    if method is None and any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in _read_architectures(config)
    ):
        return WHOLE_MODEL, "causal LM"
    if method is None:
        shown = ", ".join(sorted(names)[:3])
        raise files.refuse(f"its tensors ({shown}, ...) are those of no drafter that is known here")
    return method, method


def _recognise_names(names: Iterable[str]) -> str | None:
    held = set(names)
    if any(map(chimera.is_marker_tensor, held)):
        return chimera.METHOD
    if any(map(early_exit.is_tensor_name, held)):
        return early_exit.METHOD
    if any(map(mlp_speculator.is_tensor_name, held)):
        return mlp_speculator.METHOD
    if any(map(blockwise.is_tensor_name, held)):
        return blockwise.METHOD
    marks = {"d2t", "t2d", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "input_norm.weight"}
    if held & marks or any(name.startswith(("midlayer.", "fc_norm.", "aux_norm_")) for name in held):
        return eagle3.METHOD
    return eagle.METHOD if "fc.weight" in held else None


def _recognise_unsupported(names: list[str], config: dict[str, Any], is_whole: bool) -> str | None:
    """The name of a method that is recognised and not read. A whole model may carry such layers beside its own."""
    if not is_whole or not any(re.match(r"(model\.)?(embed_tokens|layers\.0)\.", name) for name in names):
        for pattern, method in UNSUPPORTED_TENSORS.items():
            if any(re.match(pattern, name) for name in names):
                return method
    for architecture in _read_architectures(config):
        for mark, method in UNSUPPORTED_ARCHITECTURES.items():
            if mark in str(architecture).lower():
                return method
    return next((method for key, method in UNSUPPORTED_KEYS.items() if key in config), None)


def _read_architectures(config: dict[str, Any]) -> list[Any]:
    given = config.get("architectures")
    return given if isinstance(given, list) else []


def _make_unsupported_error(files: TensorFiles, kind: str) -> ForedraftError:
    return files.refuse(
        f"it holds a {kind} drafter, which is not supported; {', '.join(READERS)} and {WHOLE_MODEL} are"
    )
