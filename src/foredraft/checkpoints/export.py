"""Export of a drafter in the layout of another engine.

Anything that an engine would misread or silently drop is refused. Statements about engines were checked in the sources
of vLLM 0.32 and SGLang 0.5.23.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from foredraft.checkpoints.formats import CheckpointFormat
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.stitch import copy_target
from foredraft.checkpoints.target import ExportTarget
from foredraft.checkpoints.target_reference import describe_target
from foredraft.checkpoints.tensors import INDEX_FILES, WEIGHT_FILES
from foredraft.checkpoints.write import save
from foredraft.errors import ForedraftError

COMMAND_DRAFT_TOKENS = 3  # draft length in the commands shown, as in the examples of the engines' documentation


@dataclass(frozen=True)
class ExportResult:
    """Notes on an exported folder, and the command that serves it."""

    notes: tuple[str, ...]  # limits of the exported folder, for the user
    command: str | None  # shell command; None = no engine serves this format


def export_drafter(
    checkpoint: Checkpoint,
    checkpoint_format: CheckpointFormat,
    name: str,
    out: str | Path,
    target: ExportTarget,
    is_forced: bool = False,
) -> ExportResult:
    """Write a drafter into a folder in the format of another engine.

    Args:
        checkpoint: Drafter that was read.
        checkpoint_format: Format declaration of its method.
        name: Name of the format to write.
        out: Folder to write to.
        target: Target of the drafter.
        is_forced: Whether files in `out` may be overwritten.

    Raises:
        ForedraftError: if the format or its engine cannot represent the drafter, or the folder cannot be written.
    """
    title, exports = checkpoint_format.title, checkpoint_format.exports
    if not exports:
        raise ForedraftError(f"{checkpoint.folder} holds {title}{checkpoint_format.no_exports}")
    chosen = checkpoint_format.find_export(name)
    if chosen is None:
        reason = checkpoint_format.refused_exports.get(name, f"{name} is no format for it")
        names = " or ".join(entry.name for entry in exports)
        raise ForedraftError(f"{checkpoint.folder} holds {title}: {reason}; use --format {names}")
    layout, notes = chosen.make(checkpoint, target)
    _check_folder(Path(out), layout.file, is_forced)
    if chosen.copies_target:
        copy_target(target.info.name, Path(out), layout.tensors, layout.file)
    save(
        out,
        layout,
        None if chosen.copies_target else describe_target(target.info.name),
        "give --out a folder with more room; its previous files are still there",
    )
    make_command = chosen.make_command if chosen.is_served(checkpoint) else None
    return ExportResult(
        tuple(notes), None if make_command is None else make_command(target.info.name, str(out), checkpoint.method)
    )


def _check_folder(out: Path, file: str, is_forced: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ForedraftError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not is_forced:
        raise ForedraftError(f"{out} is not empty; give another folder, or --force to overwrite its files")
    other_files = [name for name in _list_weight_files(out) if name != file]
    if other_files:
        raise ForedraftError(
            f"{out} holds other weights ({other_files[0]}) that engines would load too; give another folder"
        )


def _list_weight_files(folder: Path) -> Iterable[str]:
    names = {*INDEX_FILES, *WEIGHT_FILES, *(file.name for file in folder.glob("*.safetensors"))}
    return sorted(name for name in names if (folder / name).exists())


def make_vllm_command(target: str, out: str, method: str) -> str:
    """Return the command with which vLLM serves a target with an exported drafter."""
    config = json.dumps({"method": method, "model": out, "num_speculative_tokens": COMMAND_DRAFT_TOKENS})
    return f"vllm serve {target} --speculative-config '{config}'"


def make_speculators_command(target: str, out: str, method: str) -> str:
    """Return the command with which vLLM serves a speculators folder, which names its target."""
    return f"vllm serve {out}"


def make_sglang_command(target: str, out: str, method: str) -> str:
    """Return the command with which SGLang serves a target with an exported drafter."""
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {out} --speculative-num-steps {COMMAND_DRAFT_TOKENS} "
        "--speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {COMMAND_DRAFT_TOKENS + 1}"
    )
