"""Reader of any published drafter from its folder.

The method is recognised from the tensor names first and from config.json second.
"""

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
    hydra,
    medusa,
    mlp_speculator,
    speculators,
    target_identity,
)
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.target_reference import find_target
from foredraft.checkpoints.tensors import TensorFiles, open_tensors
from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.files.file_checks import read_json
from foredraft.models import ngram

# From the tensors of a folder, the content of its config.json and the target.
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

# Signs of drafters that are recognised but not supported: keys of config.json, parts of an architecture, tensor names.
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
# Tensor names of a whole model; no supported drafter has one.
WHOLE_MODEL_NAME = re.compile(
    r"^((model|transformer|gpt_neox|backbone)\.|language_model\.|wte\.|h\.\d|shared\.weight|(en|de)coder\.block\.)"
)


def recognise(folder: str | Path) -> tuple[str, str]:
    """Return the method and the layout of the drafter in a folder or under a hub id.

    Raises:
        ForedraftError: if the drafter is not recognised or not supported.
    """
    files, config = _open(str(folder))
    return _recognise_files(files, config)


def find_named_target(folder: str | Path) -> str | None:
    """Return the target that a drafter's config.json names, None if it names none.

    A target that was trained together with the drafter takes precedence.

    Raises:
        ForedraftError: if the folder cannot be read, or another model is at the recorded path.
    """
    config = _open(str(folder))[1]
    path = hub.find_folder(str(folder))
    bundled = target_identity.find_bundled_target(config, path)
    return find_target(config, path) if bundled is None else str(bundled)


def read(folder: str | Path, target: TargetInfo, method: str | None = None) -> Checkpoint:
    """Read a drafter and check it against its target.

    Args:
        folder: Folder or hub id of the drafter.
        target: Target that the drafter must fit.
        method: Method that the caller expects; None = any.

    Raises:
        ForedraftError: if the drafter is of another method, unsupported, damaged or made for another target.
    """
    files, config = _open(str(folder))
    detected, layout = _recognise_files(files, config)
    if detected not in READERS or method not in (None, detected):
        expected = "a drafter's head" if method in (None, detected) else method
        raise ForedraftError(f"{folder} holds {TITLES[detected]}, not {expected}; use --spec-method {detected}")
    reader = speculators.read if layout == SPECULATORS else READERS[detected]
    return reader(files, config, target)


def _open(folder: str) -> tuple[TensorFiles, dict[str, Any]]:
    path = hub.find_folder(folder)
    config = read_json(path / "config.json", folder)
    return open_tensors(path, folder), config


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
    unsupported = _recognise_unsupported(names, config, is_whole)
    if unsupported:
        raise _make_unsupported_error(files, unsupported)
    if is_whole:
        return WHOLE_MODEL, "causal LM"
    method = _recognise_names(names)
    if method is None and any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in _read_architectures(config)
    ):
        return WHOLE_MODEL, "causal LM"
    if method is None:
        shown = ", ".join(sorted(names)[:3])
        raise files.refuse(f"its tensors ({shown}, ...) are those of no drafter that is supported")
    return method, method


def _recognise_names(names: Iterable[str]) -> str | None:
    stored_names = set(names)
    if any(map(chimera.is_marker_tensor, stored_names)):
        return chimera.METHOD
    if any(map(early_exit.is_tensor_name, stored_names)):
        return early_exit.METHOD
    if any(map(mlp_speculator.is_tensor_name, stored_names)):
        return mlp_speculator.METHOD
    if any(map(blockwise.is_tensor_name, stored_names)):
        return blockwise.METHOD
    markers = {"d2t", "t2d", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "input_norm.weight"}
    if stored_names & markers or any(name.startswith(("midlayer.", "fc_norm.", "aux_norm_")) for name in stored_names):
        return eagle3.METHOD
    return eagle.METHOD if "fc.weight" in stored_names else None


def _recognise_unsupported(names: list[str], config: dict[str, Any], is_whole: bool) -> str | None:
    """Return the name of a method that is recognised but not supported, None if there is none.

    A whole model may have such tensors beside its own.
    """
    if not is_whole or not any(re.match(r"(model\.)?(embed_tokens|layers\.0)\.", name) for name in names):
        for pattern, method in UNSUPPORTED_TENSORS.items():
            if any(re.match(pattern, name) for name in names):
                return method
    for architecture in _read_architectures(config):
        for part, method in UNSUPPORTED_ARCHITECTURES.items():
            if part in str(architecture).lower():
                return method
    return next((method for key, method in UNSUPPORTED_KEYS.items() if key in config), None)


def _read_architectures(config: dict[str, Any]) -> list[Any]:
    architectures = config.get("architectures")
    return architectures if isinstance(architectures, list) else []


def _make_unsupported_error(files: TensorFiles, kind: str) -> ForedraftError:
    return files.refuse(
        f"it holds a {kind} drafter, which is not supported; {', '.join(READERS)} and {WHOLE_MODEL} are"
    )
