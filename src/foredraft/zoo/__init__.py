"""The models that ship inside the package."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

_FOLDER = Path(__file__).parent
FIRST = "builtin"  # the target of LLM() alone
_TARGETS = {FIRST: "target", "builtin-seq2seq": "seq2seq"}
# what a target drafts with when nothing is asked for, the best first
_PREFERRED = {FIRST: ("draft_model",), "builtin-seq2seq": ("aggressive", "draft_model", "ngram")}
# what a method uses beside a built-in target when it is given nothing
_OF_SEQ2SEQ = {"draft_model": "seq2seq_draft"}
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


def path(name: str) -> Path:
    """The folder of a built-in model. Raises ForedraftError if the package came without it."""
    folder = _FOLDER / name
    if not (folder / "config.json").exists():
        raise ForedraftError(
            f"the built-in model {name!r} is not in this installation; run `foredraft zoo train --install`"
        )
    return folder


def names() -> list[str]:
    """Every built-in model of this installation."""
    return sorted(entry.parent.name for entry in _FOLDER.glob("*/config.json"))


def target_name(model: Any) -> str | None:
    """Which built-in target is meant by what was given as a model; None for any other model."""
    name = FIRST if model is None else model
    return name if isinstance(name, str) and name in _TARGETS else None


def target(name: str) -> Path:
    """The folder of a built-in target by its name. Raises ForedraftError if the package came without it."""
    return path(_TARGETS[name])


def name_of(folder: Path) -> str | None:
    """Which built-in target lies in a folder; None for any other folder."""
    return next((name for name, entry in _TARGETS.items() if (_FOLDER / entry).resolve() == folder), None)


def drafter_of(name: str, known: Container[str]) -> str | None:
    """The method a built-in target drafts with when nothing is asked for, among those that are known and have what they
    need here."""
    for method in _PREFERRED[name]:
        needs_model = method in (_DRAFTERS if name == FIRST else _OF_SEQ2SEQ)
        if method in known and (not needs_model or builtin_drafter(method, name) is not None):
            return method
    return None


def builtin_drafter(method: str, target: str = FIRST) -> str | None:
    """The built-in model a method drafts with beside a built-in target."""
    name = (_DRAFTERS if target == FIRST else _OF_SEQ2SEQ).get(method)
    return str(path(name)) if name is not None and (_FOLDER / name / "config.json").exists() else None
