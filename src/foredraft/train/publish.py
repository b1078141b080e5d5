"""A drafter in training as a folder that can be drafted with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foredraft.checkpoints.layouts import Layout
from foredraft.checkpoints.write import save
from foredraft.drafters.training import Trainee


def publish(
    trainee: Trainee, method: str, folder: Path, dtype: torch.dtype, about: Mapping[str, Any] | None = None
) -> None:
    """In the layout its checkpoints have on the hub, in the target's type, which it will draft in. `about`: what its
    config says beside, of its target.

    A trainee that writes its own files has `save`.
    """
    own: Any = getattr(trainee, "save", None)
    if own is not None:
        own(folder)
        return
    tensors, config = trainee.published()
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    save(folder, Layout(method, tensors, config | dict(about or {})))
