"""Built-in models: names and folders.

The other files are their corpus. `foredraft.zoo_training` trains them. Importing this package imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

_FOLDER = Path(__file__).parent
DEFAULT_TARGET = "builtin"  # target of `LLM()` without arguments
SEQ2SEQ_TARGET = "builtin-seq2seq"
# name of a built-in target -> folder
_TARGETS = {DEFAULT_TARGET: "target", SEQ2SEQ_TARGET: "seq2seq"}


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


def list_targets() -> list[str]:
    """Return the names of the built-in targets, the default first."""
    return list(_TARGETS)


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


def find_drafter(folders: Mapping[str, str], target: str = DEFAULT_TARGET) -> str | None:
    """Return the folder of a method's built-in drafter for a built-in target; None if there is none.

    Args:
        folders: names of the method's folders, by built-in target.
        target: name of the target.
    """
    return find_installed(folders[target]) if target in folders else None


def find_installed(name: str) -> str | None:
    """Return the folder of a built-in model; None if this installation does not have it."""
    folder = _FOLDER / name
    return str(folder) if (folder / "config.json").exists() else None
