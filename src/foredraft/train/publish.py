"""A drafter in training as a folder that can be drafted with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.checkpoints.disk import replace_files, writing
from foredraft.checkpoints.layouts import Layout
from foredraft.checkpoints.naming import describe
from foredraft.checkpoints.write import save
from foredraft.drafters.training import Trainee

FULL = "make room, and the same command goes on from the last checkpoint"


def publish(
    trainee: Trainee, method: str, folder: Path, dtype: torch.dtype, target: str | None, about: Mapping[str, Any]
) -> None:
    """Write the layout that its checkpoints have on the hub, in the target's type, which it will draft in.

    `target` is named in its config; None = `about` names it. `about`: further entries of the config.

    A trainee that writes its own files has `save`.
    """
    own: Any = getattr(trainee, "save", None)
    if own is not None:
        with writing(folder, FULL):
            replace_files(folder, own)
        return
    tensors, config = trainee.published()
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    named = {} if target is None else describe(target, folder)
    save(folder, Layout(method, tensors, config | named | dict(about)), then=FULL)
