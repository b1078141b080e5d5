"""The models that ship inside the package."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

_FOLDER = Path(__file__).parent
DEFAULT_TARGET = "builtin"  # the target of LLM() alone
_TARGETS = {DEFAULT_TARGET: "target", "builtin-seq2seq": "seq2seq"}
# what a target drafts with when nothing is asked for, the best first
_PREFERRED_METHODS = {DEFAULT_TARGET: ("draft_model",), "builtin-seq2seq": ("aggressive", "draft_model", "ngram")}
# what a method uses beside a built-in target when it is given nothing
_SEQ2SEQ_DRAFTER_FOLDERS = {"draft_model": "seq2seq_draft"}
_DRAFTERS = {
    "draft_model": "draft",
    "ngram_lm": "ngram",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "blockwise": "blockwise",
    "hydra": "hydra",
    "early_exit": "early_exit",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "chimera": "chimera",
}


def find_folder(name: str) -> Path:
    """The folder of a built-in model. Raises ForedraftError if the package came without it."""
    folder = _FOLDER / name
    if not (folder / "config.json").exists():
        raise ForedraftError(
            f"the built-in model {name!r} is not in this installation; run `foredraft zoo train --install`"
        )
    return folder


def list_models() -> list[str]:
    """Every built-in model of this installation."""
    return sorted(entry.parent.name for entry in _FOLDER.glob("*/config.json"))


def resolve_target(model: Any) -> str | None:
    """Which built-in target is meant by what was given as a model; None for any other model."""
    name = DEFAULT_TARGET if model is None else model
    return name if isinstance(name, str) and name in _TARGETS else None


def find_target_folder(name: str) -> Path:
    """The folder of a built-in target by its name. Raises ForedraftError if the package came without it."""
    return find_folder(_TARGETS[name])


def identify_target(folder: Path) -> str | None:
    """Which built-in target lies in a folder; None for any other folder."""
    return next((name for name, entry in _TARGETS.items() if (_FOLDER / entry).resolve() == folder), None)


def choose_method(name: str, available: Container[str]) -> str | None:
    """The method a built-in target drafts with when nothing is asked for, among those that are known and have what they
    need here."""
    for method in _PREFERRED_METHODS[name]:
        needs_model = method in (_DRAFTERS if name == DEFAULT_TARGET else _SEQ2SEQ_DRAFTER_FOLDERS)
        if method in available and (not needs_model or find_drafter(method, name) is not None):
            return method
    return None


def find_drafter(method: str, target: str = DEFAULT_TARGET) -> str | None:
    """The built-in model a method drafts with beside a built-in target."""
    name = (_DRAFTERS if target == DEFAULT_TARGET else _SEQ2SEQ_DRAFTER_FOLDERS).get(method)
    return str(find_folder(name)) if name is not None and (_FOLDER / name / "config.json").exists() else None
