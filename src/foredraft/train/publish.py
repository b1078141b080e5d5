"""A drafter in training as a folder that can be drafted with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.checkpoints.disk import convert_write_errors, replace_files
from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.target_reference import describe_target
from foredraft.checkpoints.write import save
from foredraft.drafters.losses import Trainee

DISK_FULL_HINT = "make room, and the same command goes on from the last checkpoint"


def publish(
    trainee: Trainee, method: str, folder: Path, dtype: torch.dtype, target: str | None, extra_config: Mapping[str, Any]
) -> None:
    """Write the layout that its checkpoints have on the hub, in the target's type, which it will draft in.

    `target` is named in its config; None = `about` names it. `about`: further entries of the config.

    A trainee that writes its own files has `save`.
    """
    own: Any = getattr(trainee, "save", None)
    if own is not None:
        with convert_write_errors(folder, DISK_FULL_HINT):
            replace_files(folder, own)
        return
    tensors, config = trainee.to_checkpoint()
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    named = {} if target is None else describe_target(target, folder)
    save(folder, CheckpointLayout(method, tensors, config | named | dict(extra_config)), hint=DISK_FULL_HINT)
