"""Reference from a drafter to its target that is valid from any working directory and detects another model.

A hub id is recorded as it is. For a local target a trained drafter records the folder's name, the relative path from
the drafter's folder, and a digest. Absolute paths are never recorded: they mean nothing on another machine. An exported
drafter records name and digest only.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from foredraft import zoo
from foredraft.errors import ForedraftError

TARGET_NAME_KEY, TARGET_RECORD_KEY = "base_model_name_or_path", "foredraft_target"
DIGEST_SAMPLE_BYTES = 1 << 20  # bytes at each end of a weight file that are hashed


def describe_target(target: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the entries of a drafter's config.json that name its target.

    Args:
        target: Folder or hub id of the target.
        folder: The drafter's folder, for a relative path to the target; None = no relative path.
    """
    path = Path(target).expanduser()
    if not path.is_dir():
        return {TARGET_NAME_KEY: target}
    path = path.resolve()
    builtin = zoo.identify_target(path)
    if builtin is not None:
        return {TARGET_NAME_KEY: builtin}
    record: dict[str, Any] = {"name": path.name, "digest": digest(path)}
    if folder is not None:
        drafter_folder = folder.resolve()
        # If the folders share only the root, the relative path is absolute in effect.
        if os.path.commonpath([drafter_folder, path]) != path.anchor:
            record["path"] = Path(os.path.relpath(path, drafter_folder)).as_posix()
    return {TARGET_NAME_KEY: path.name, TARGET_RECORD_KEY: record}


def find_target(config: dict[str, Any], folder: Path) -> str | None:
    """Return the target that the config.json of a drafter in `folder` names, None if it names none.

    Raises:
        ForedraftError: if another model is at the recorded path.
    """
    record = config.get(TARGET_RECORD_KEY)
    if isinstance(record, dict) and isinstance(record.get("path"), str):
        path = Path(os.path.normpath(folder.resolve() / record["path"]))
        if (path / "config.json").is_file():
            if record.get("digest") not in (None, digest(path)):
                raise ForedraftError(
                    f"{folder} was trained for another model than the one in {path} (the digests differ); "
                    "give its target with --model"
                )
            return str(path)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = config.get(TARGET_NAME_KEY) or verifier.get("name_or_path")
    return name if isinstance(name, str) else None


def digest(folder: Path) -> str:
    """Hash a model's folder: config.json, and the size and both ends of every safetensors file."""
    state = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if not file.is_file():
            continue
        size = file.stat().st_size
        state.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            state.update(opened.read(DIGEST_SAMPLE_BYTES))
            opened.seek(max(0, size - DIGEST_SAMPLE_BYTES))
            state.update(opened.read(DIGEST_SAMPLE_BYTES))
    return state.hexdigest()[:16]
