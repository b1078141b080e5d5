"""The models that ship inside the package."""

from pathlib import Path

from foredraft.errors import ForedraftError

_FOLDER = Path(__file__).parent
# what a method uses beside the built-in target when it is given nothing
_DRAFTERS = {
    "draft_model": "draft",
    "ngram_lm": "ngram",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "blockwise": "blockwise",
    "hydra": "hydra",
    "eagle": "eagle",
    "eagle3": "eagle3",
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


def builtin_drafter(method: str) -> str | None:
    """The built-in model a method drafts with beside the built-in target."""
    name = _DRAFTERS.get(method)
    return str(path(name)) if name is not None and (_FOLDER / name / "config.json").exists() else None
