"""Which target a drafter's folder names, so that it is found again from any working directory, and is the same one.

A hub id stands as it is. Of a local target a trained drafter records the folder's own name, the way there from the
drafter's folder, and a digest; never an absolute path, which says nothing elsewhere. What is exported goes to other
machines and gets the name and the digest alone.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from foredraft import zoo
from foredraft.errors import ForedraftError

TARGET_NAME_KEY, TARGET_RECORD_KEY = "base_model_name_or_path", "foredraft_target"
DIGEST_SAMPLE_BYTES = 1 << 20  # bytes at either end of a weight file that go into its digest


def describe_target(target: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the entries of a drafter's config.json that name its target.

    folder: the drafter's folder, for a relative path to the target; None = no relative path.
    """
    place = Path(target).expanduser()
    if not place.is_dir():
        return {TARGET_NAME_KEY: target}
    place = place.resolve()
    builtin = zoo.identify_target(place)
    if builtin is not None:
        return {TARGET_NAME_KEY: builtin}
    record: dict[str, Any] = {"name": place.name, "digest": digest(place)}
    if folder is not None:
        own = folder.resolve()
        if os.path.commonpath([own, place]) != place.anchor:  # else the way would be an absolute path in disguise
            record["path"] = Path(os.path.relpath(place, own)).as_posix()
    return {TARGET_NAME_KEY: place.name, TARGET_RECORD_KEY: record}


def find_target(config: dict[str, Any], folder: Path) -> str | None:
    """The target that the config.json of a drafter in `folder` names, None = none.

    Raises ForedraftError where another model lies at the place recorded.
    """
    record = config.get(TARGET_RECORD_KEY)
    if isinstance(record, dict) and isinstance(record.get("path"), str):
        place = Path(os.path.normpath(folder.resolve() / record["path"]))
        if (place / "config.json").is_file():
            if record.get("digest") not in (None, digest(place)):
                raise ForedraftError(
                    f"{folder} was trained for another model than the one in {place} (their digests differ); "
                    "give its target with --model"
                )
            return str(place)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    found = config.get(TARGET_NAME_KEY) or verifier.get("name_or_path")
    return found if isinstance(found, str) else None


def digest(folder: Path) -> str:
    """Hash a model's folder: config.json, and the size and both ends of every safetensors file."""
    found = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if not file.is_file():
            continue
        size = file.stat().st_size
        found.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            found.update(opened.read(DIGEST_SAMPLE_BYTES))
            opened.seek(max(0, size - DIGEST_SAMPLE_BYTES))
            found.update(opened.read(DIGEST_SAMPLE_BYTES))
    return found.hexdigest()[:16]
