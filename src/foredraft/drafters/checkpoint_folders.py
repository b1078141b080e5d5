"""Folders of drafters, read and written with the formats that the registered methods declare."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.checkpoints.export import ExportResult, export_drafter
from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder
from foredraft.checkpoints.read import read_folder, recognise_folder
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.target import ExportTarget
from foredraft.checkpoints.tensors import StoredTensor, TensorFiles
from foredraft.checkpoints.write import save
from foredraft.drafters.method import Method
from foredraft.drafters.registry import load_methods
from foredraft.errors import ForedraftError


def list_formats(extra: Method | None = None) -> dict[str, CheckpointFormat]:
    """Return the formats of the registered methods, and of a method that may not be registered, by method."""
    methods = load_methods() if extra is None else load_methods() | {extra.name: extra}
    return {name: method.checkpoint for name, method in methods.items() if method.checkpoint is not None}


def recognise(folder: str | Path, extra: Method | None = None) -> tuple[str, str]:
    """Return the method and the name of the layout of the drafter in a folder or under a hub id.

    Args:
        folder: Folder or hub id of the drafter.
        extra: Method that may not be registered; None = the registered ones alone.

    Raises:
        ForedraftError: if the drafter is not recognised or not supported.
    """
    return recognise_folder(folder, list_formats(extra))


def read(folder: str | Path, target: TargetInfo, method: str | Method | None = None) -> Checkpoint:
    """Read a drafter and check it against its target.

    Args:
        folder: Folder or hub id of the drafter.
        target: Target that the drafter must fit.
        method: Method that the caller expects, by name or as such; None = any that is registered.

    Raises:
        ForedraftError: if the drafter is of another method, unsupported, damaged or made for another target.
    """
    extra = method if isinstance(method, Method) else None
    return read_folder(folder, target, list_formats(extra), extra.name if extra else str(method) if method else None)


def recognise_loaded(model: Any) -> str | None:
    """Return the method of a loaded transformers model, if its configuration declares a head; None otherwise."""
    names, config = list(model.state_dict()), model.config.to_dict()
    for method, found in list_formats().items():
        if any(entry.order == LayoutOrder.DECLARED and entry.matches(names, config) for entry in found.layouts):
            return method
    return None


def read_loaded(model: Any, target: TargetInfo, method: Method) -> Checkpoint:
    """Read a head that is a loaded transformers model, and check it against its target. The weights are copied.

    Args:
        model: Loaded model.
        target: Target that the drafter must fit.
        method: Method that the caller expects.

    Raises:
        ForedraftError: if the model is no head of this method, or made for another target.
    """
    name, config = getattr(model, "name_or_path", "") or type(model).__name__, model.config.to_dict()
    stored = {key: StoredTensor(Path(name), tuple(x.shape), x.dtype, x.cpu()) for key, x in model.state_dict().items()}
    for entry in () if method.checkpoint is None else method.checkpoint.layouts:
        if entry.read is not None and entry.matches(list(stored), config):
            return entry.read(TensorFiles(name, stored), config, target)
    raise ForedraftError(f"the loaded {type(model).__name__} is no head of the method {method.name}")


def write(
    folder: str | Path,
    method: str,
    shape: Any,
    tensors: Mapping[str, Tensor],
    config_extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter in the layout in which its method publishes it.

    Args:
        folder: Folder to write to.
        method: Name of the method.
        shape: Shape of the drafter.
        tensors: Weights by internal name.
        config_extra: Further entries of config.json; they do not override the layout's.

    Raises:
        ForedraftError: if the method writes no heads, or the folder cannot be written.
        ValueError: if the tensors do not match the shape.
    """
    entry = list_formats().get(method)
    if entry is None or entry.make_layout is None or entry.shape is None:
        raise ForedraftError(f"the method {method} writes no heads")
    if not isinstance(shape, entry.shape):
        raise ForedraftError(f"{type(shape).__name__} is not the shape of {method} drafters")
    save(folder, entry.make_layout(shape, tensors), config_extra)


def export(
    checkpoint: Checkpoint,
    fmt: str,
    out: str | Path,
    target: ExportTarget,
    is_forced: bool = False,
    method: Method | None = None,
) -> ExportResult:
    """Write a drafter into a folder in the format of another engine.

    Args:
        checkpoint: Drafter that was read.
        fmt: Name of the format.
        out: Folder to write to.
        target: Target of the drafter.
        is_forced: Whether files in `out` may be overwritten.
        method: Method of the drafter if it may not be registered.

    Raises:
        ForedraftError: if the format or its engine cannot represent the drafter, or the folder cannot be written.
    """
    return export_drafter(checkpoint, list_formats(method)[checkpoint.method], fmt, out, target, is_forced)


def list_export_formats(extra: Method | None = None) -> list[str]:
    """Return the names of all formats that drafters can be exported to, sorted."""
    return sorted({entry.name for one in list_formats(extra).values() for entry in one.exports})
