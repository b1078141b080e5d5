"""Copy of a target's folder with the tensors of a drafter in a further file: published MTP layers are stored so."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from foredraft.checkpoints.tensors import open_tensors
from foredraft.files import hub
from foredraft.files.disk import convert_write_errors, replace_text

INDEX_FILE = "model.safetensors.index.json"
WRITTEN_FILES = ("config.json", INDEX_FILE)


def copy_target(target: str, out: Path, names: Iterable[str], file: str) -> None:
    """Copy a target's folder, and list the tensors of both in an index. Weights are linked where that is possible.

    Args:
        target: Folder or hub id of the target.
        out: Folder to write to, which gets no config.json.
        names: Stored names of the further tensors. They replace those of the target.
        file: File of the further tensors.

    Raises:
        ForedraftError: if the target holds no weights, or the folder cannot be written.
    """
    folder = hub.find_folder(target)
    held = {name: stored.file.name for name, stored in open_tensors(folder, target).stored_tensors.items()}
    with convert_write_errors(out, "give --out a folder with more room"):
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name not in (*WRITTEN_FILES, file):
                _link(path.resolve(), out / path.name)
        weight_map = held | dict.fromkeys(names, file)
        replace_text(out / INDEX_FILE, json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")


def _link(source: Path, copy: Path) -> None:
    copy.unlink(missing_ok=True)
    if source.suffix != ".safetensors":  # files that users edit
        shutil.copy(source, copy)
        return
    try:
        os.link(source, copy)
    except OSError:  # another file system
        shutil.copy(source, copy)
