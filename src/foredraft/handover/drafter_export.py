"""Export of a drafter to the format that another engine loads."""

from pathlib import Path

from foredraft.checkpoints.target import read_target
from foredraft.drafters import checkpoint_folders
from foredraft.drafters.method import Method
from foredraft.errors import ForedraftError


def export_drafter(
    method: Method, fmt: str, model: str, target: str, out: Path | None, is_forced: bool
) -> tuple[str, tuple[str, ...]]:
    """Write a drafter in the format of another engine.

    Args:
        method: its method.
        fmt: format of `foredraft export`.
        model: folder or hub id of the drafter.
        target: folder or hub id of its target.
        out: folder to write to.
        is_forced: whether files in it may be overwritten.

    Returns:
        The folder, and notes on it for the user.

    Raises:
        ForedraftError: without a folder to write to, or if the engine cannot load the drafter.
    """
    if out is None:
        raise ForedraftError(f"{model} is converted for that engine; give --out FOLDER for the converted files")
    found = read_target(target)
    checkpoint = checkpoint_folders.read(model, found.info, method)
    folder = out / "drafter"
    exported = checkpoint_folders.export(checkpoint, fmt, folder, found, is_forced, method)
    return str(folder.resolve()), exported.notes
