"""A drafter in training as a folder that can be drafted with."""

from pathlib import Path
from typing import Any

from foredraft.checkpoints.layouts import Layout
from foredraft.checkpoints.write import save
from foredraft.drafters.training import Trainee


def publish(trainee: Trainee, method: str, folder: Path) -> None:
    """In the layout its checkpoints have on the hub. A trainee that writes its own files has `save`."""
    own: Any = getattr(trainee, "save", None)
    if own is not None:
        own(folder)
        return
    tensors, config = trainee.published()
    save(folder, Layout(method, tensors, config))
