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
    identity,
    medusa,
    mlp_speculator,
    speculators,
)
from foredraft.checkpoints.base import Checkpoint, TargetFacts
from foredraft.checkpoints.naming import find_target
from foredraft.checkpoints.regular import read_json
from foredraft.checkpoints.tensors import TensorFiles, open_tensors
from foredraft.errors import ForedraftError
from foredraft.models import ngram

Reader = Callable[[TensorFiles, dict[str, Any], TargetFacts], Checkpoint]
READERS: dict[str, Reader] = {
    medusa.METHOD: medusa.read,
    mlp_speculator.METHOD: mlp_speculator.read,
    eagle.METHOD: eagle.read,
    eagle3.METHOD: eagle3.read,
    chimera.METHOD: chimera.read,
    blockwise.METHOD: blockwise.read,
    hydra.METHOD: hydra.read,
    early_exit.METHOD: early_exit.read,
}
MODULES = (medusa, mlp_speculator, eagle, eagle3, chimera, blockwise, hydra, early_exit)
TITLES = {module.METHOD: module.TITLE for module in MODULES}
WHOLE_MODEL = "draft_model"
TITLES[WHOLE_MODEL] = "a whole language model"
SPECULATORS = "speculators"
TABLE = "ngram_lm"
TITLES[TABLE] = "an n-gram table"

# Drafters that are known and not read: what config or a tensor's name shows them by.
FOREIGN_KEYS = {
    "dflash_config": "DFlash", "dspark_config": "DSpark",
    "markov_rank": "DSpark", "pard_token": "P-EAGLE or PARD", "ptd_token_id": "P-EAGLE",
}  # fmt: skip
FOREIGN_ARCHITECTURES = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE"}
FOREIGN_TENSORS = {
    r"markov_(w1|w2|head)\b": "DSpark",
    r"mask_hidden$": "P-EAGLE",
    r"hidden_norm\.weight$": "DFlash",
    r"(mtp|mtp_layers|model\.mtp_layers)\.": "MTP",
    r"(model\.layers\.\d+\.)?eh_proj\.": "MTP",
    r"(fusion_fc|embedding_layernorm|pre_lm_head_layernorm|transformer\.self_attn)\b": "retired EAGLE/HASS",
}
# What an upload of a whole model looks like; a drafter of ours has no such tensor.
WHOLE = re.compile(
    r"^((model|transformer|gpt_neox|backbone)\.|language_model\.|wte\.|h\.\d|shared\.weight|(en|de)coder\.block\.)"
)


def recognise(folder: str | Path) -> tuple[str, str]:
    """(method, layout) of what lies in a folder or under a hub id. Raises ForedraftError where it is nothing known."""
    files, config = _opened(str(folder))
    return _recognised(files, config)


def named_target(folder: str | Path) -> str | None:
    """The target that a drafter's config names, if it names one; the one it was trained together with, before any
    other. Raises ForedraftError."""
    config = _opened(str(folder))[1]
    place = hub.find(str(folder))
    own = identity.beside(config, place)
    return find_target(config, place) if own is None else str(own)


def read(folder: str | Path, target: TargetFacts, method: str | None = None) -> Checkpoint:
    """A drafter for `target`, checked whole; `method` is what the caller believes it to be. Raises ForedraftError."""
    files, config = _opened(str(folder))
    found, layout = _recognised(files, config)
    if found not in READERS or method not in (None, found):
        wanted = "a drafter's head" if method in (None, found) else method
        raise ForedraftError(f"{folder} holds {TITLES[found]}, not {wanted}; use --spec-method {found}")
    reader = speculators.read if layout == SPECULATORS else READERS[found]
    return reader(files, config, target)


def _opened(folder: str) -> tuple[TensorFiles, dict[str, Any]]:
    place = hub.find(folder)
    config = read_json(place / "config.json", folder)
    return open_tensors(place, folder), config


def _recognised(files: TensorFiles, config: dict[str, Any]) -> tuple[str, str]:
    names = list(files.stored)
    if config.get("format") == ngram.FORMAT:
        return TABLE, "n-gram table"
    kind = config.get(speculators.KEY)
    if kind is not None:
        if kind not in speculators.METHODS:
            raise _unsupported(files, f"speculators' {kind}")
        return speculators.METHODS[kind], SPECULATORS
    if any(map(medusa.is_mine, names)):
        return medusa.METHOD, "medusa"
    if hydra.is_mine(names, config):
        return hydra.METHOD, "hydra"
    is_whole = any(map(WHOLE.match, names))
    foreign = _foreign(names, config, is_whole)
    if foreign:
        raise _unsupported(files, foreign)
    if is_whole:
        return WHOLE_MODEL, "causal LM"
    method = _by_names(names)
    if method is None and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in _architectures(config)):
        return WHOLE_MODEL, "causal LM"
    if method is None:
        shown = ", ".join(sorted(names)[:3])
        raise files.refuse(f"its tensors ({shown}, ...) are those of no drafter that is known here")
    return method, method


def _by_names(names: Iterable[str]) -> str | None:
    held = set(names)
    if any(map(chimera.is_mine, held)):
        return chimera.METHOD
    if any(map(early_exit.is_mine, held)):
        return early_exit.METHOD
    if any(map(mlp_speculator.is_mine, held)):
        return mlp_speculator.METHOD
    if any(map(blockwise.is_mine, held)):
        return blockwise.METHOD
    marks = {"d2t", "t2d", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "input_norm.weight"}
    if held & marks or any(name.startswith(("midlayer.", "fc_norm.", "aux_norm_")) for name in held):
        return eagle3.METHOD
    return eagle.METHOD if "fc.weight" in held else None


def _foreign(names: list[str], config: dict[str, Any], is_whole: bool) -> str | None:
    """The name of a method that is recognised and not read. A whole model may carry such layers beside its own."""
    if not is_whole or not any(re.match(r"(model\.)?(embed_tokens|layers\.0)\.", name) for name in names):
        for pattern, method in FOREIGN_TENSORS.items():
            if any(re.match(pattern, name) for name in names):
                return method
    for architecture in _architectures(config):
        for mark, method in FOREIGN_ARCHITECTURES.items():
            if mark in str(architecture).lower():
                return method
    return next((method for key, method in FOREIGN_KEYS.items() if key in config), None)


def _architectures(config: dict[str, Any]) -> list[Any]:
    given = config.get("architectures")
    return given if isinstance(given, list) else []


def _unsupported(files: TensorFiles, kind: str) -> ForedraftError:
    return files.refuse(
        f"it holds a {kind} drafter, which is not supported; {', '.join(READERS)} and {WHOLE_MODEL} are"
    )
