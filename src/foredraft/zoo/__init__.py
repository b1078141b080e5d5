"""Built-in models: names, folders and default drafting methods.

The other files are their corpus. `foredraft.zoo_training` trains them. Importing this package imports no torch.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

_FOLDER = Path(__file__).parent
DEFAULT_TARGET = "builtin"  # target of `LLM()` without arguments
# name of a built-in target -> folder
_TARGETS = {DEFAULT_TARGET: "target", "builtin-seq2seq": "seq2seq"}
# built-in target -> default drafting methods, the best first
_PREFERRED_METHODS = {DEFAULT_TARGET: ("draft_model",), "builtin-seq2seq": ("aggressive", "draft_model", "ngram")}
# drafting method -> folder of its built-in drafter, for each of the two targets
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
    """Return the folder of a built-in model. Raises ForedraftError if this installation does not have it."""
    folder = _FOLDER / name
    if not (folder / "config.json").exists():
        raise ForedraftError(
            f"the built-in model {name!r} is not in this installation; run `foredraft zoo train --install`"
        )
    return folder


def list_models() -> list[str]:
    """Return the names of the built-in models of this installation, sorted."""
    return sorted(entry.parent.name for entry in _FOLDER.glob("*/config.json"))


def resolve_target(model: Any) -> str | None:
    """Return the name of the built-in target that `model` names; None for any other model.

    Args:
        model: argument of `LLM`; None = the default target.
    """
    name = DEFAULT_TARGET if model is None else model
    return name if isinstance(name, str) and name in _TARGETS else None


def find_target_folder(name: str) -> Path:
    """Return the folder of a built-in target. Raises ForedraftError if this installation does not have it."""
    return find_folder(_TARGETS[name])


def identify_target(folder: Path) -> str | None:
    """Return the name of the built-in target in a folder; None for any other folder."""
    return next((name for name, entry in _TARGETS.items() if (_FOLDER / entry).resolve() == folder), None)


def choose_method(name: str, available: Container[str]) -> str | None:
    """Return the default drafting method of a built-in target; None if no preferred method can be used.

    Args:
        name: name of the target.
        available: names of the registered methods. A method that needs a model is used only if that is installed.
    """
    for method in _PREFERRED_METHODS[name]:
        needs_model = method in (_DRAFTERS if name == DEFAULT_TARGET else _SEQ2SEQ_DRAFTER_FOLDERS)
        if method in available and (not needs_model or find_drafter(method, name) is not None):
            return method
    return None


def find_drafter(method: str, target: str = DEFAULT_TARGET) -> str | None:
    """Return the folder of the built-in drafter of a method for a built-in target; None if there is none."""
    name = (_DRAFTERS if target == DEFAULT_TARGET else _SEQ2SEQ_DRAFTER_FOLDERS).get(method)
    return str(find_folder(name)) if name is not None and (_FOLDER / name / "config.json").exists() else None
