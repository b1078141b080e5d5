"""Publication of a drafter in training as a folder that can be used for drafting."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.target_reference import describe_target
from foredraft.checkpoints.write import save
from foredraft.drafters.trainee import Trainee
from foredraft.files.disk import convert_write_errors, replace_files

DISK_FULL_HINT = "make room, and the same command goes on from the last checkpoint"


def publish(
    trainee: Trainee, method: str, folder: Path, dtype: torch.dtype, target: str | None, extra_config: Mapping[str, Any]
) -> None:
    """Write a drafter in its published layout.

    Args:
        trainee: Drafter in training. If its spec has `save`, that writes its own files, and only `folder` is used.
        method: Method of the drafter.
        folder: Folder to write to.
        dtype: Dtype of the weights: the target's, which drafting uses.
        target: Target that config.json names; None = `extra_config` names it.
        extra_config: Further entries of config.json.

    Raises:
        ForedraftError: if the folder cannot be written.
    """
    save_files = trainee.spec.save
    if save_files is not None:
        with convert_write_errors(folder, DISK_FULL_HINT):
            replace_files(folder, save_files)
        return
    layout = trainee.to_checkpoint()
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in layout.tensors.items()}
    target_entries = {} if target is None else describe_target(target, folder)
    config = layout.config | target_entries | dict(extra_config)
    save(folder, CheckpointLayout(method, tensors, config), hint=DISK_FULL_HINT)
