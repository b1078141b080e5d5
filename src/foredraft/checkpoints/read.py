"""Reader of any published drafter from its folder, for the formats of all methods."""

from pathlib import Path
from typing import Any

from foredraft.checkpoints import target_identity
from foredraft.checkpoints.formats import CheckpointFormats
from foredraft.checkpoints.recognise import recognise_layout
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.target_reference import find_target
from foredraft.checkpoints.tensors import TensorFiles, open_tensors
from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.files.file_checks import read_json


def recognise_folder(folder: str | Path, formats: CheckpointFormats) -> tuple[str, str]:
    """Return the method and the name of the layout of the drafter in a folder or under a hub id.

    Raises:
        ForedraftError: if the drafter is not recognised or not supported.
    """
    files, config = _open(str(folder))
    method, layout = recognise_layout(files, config, formats)
    return method, layout.name


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


def read_folder(
    folder: str | Path, target: TargetInfo, formats: CheckpointFormats, method: str | None = None
) -> Checkpoint:
    """Read a drafter and check it against its target.

    Args:
        folder: Folder or hub id of the drafter.
        target: Target that the drafter must fit.
        formats: Formats of all methods.
        method: Method that the caller expects; None = any.

    Raises:
        ForedraftError: if the drafter is of another method, unsupported, damaged or made for another target.
    """
    files, config = _open(str(folder))
    detected, layout = recognise_layout(files, config, formats)
    if layout.read is None or method not in (None, detected):
        expected = "a drafter's head" if method in (None, detected) else method
        raise ForedraftError(f"{folder} holds {formats[detected].title}, not {expected}; use --spec-method {detected}")
    return layout.read(files, config, target)


def _open(folder: str) -> tuple[TensorFiles, dict[str, Any]]:
    path = hub.find_folder(folder)
    config = read_json(path / "config.json", folder)
    return open_tensors(path, folder), config
