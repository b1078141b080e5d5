"""A drafter in training as a folder that can be drafted with."""

import shutil
from pathlib import Path
from typing import Any

from foredraft.checkpoints.layouts import Layout
from foredraft.checkpoints.write import save
from foredraft.drafters.training import Trainee

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def publish(trainee: Trainee, method: str, folder: Path) -> None:
    """In the layout its checkpoints have on the hub. A trainee that writes its own files has `save`."""
    own: Any = getattr(trainee, "save", None)
    if own is not None:
        own(folder)
        return
    tensors, config = trainee.published()
    save(folder, Layout(method, tensors, config))


def copy_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Beside a whole model, so that it can be loaded alone and compared."""
    if tokenizer is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)


def move_aside(folder: Path) -> None:
    """Make room for a folder that is written anew."""
    shutil.rmtree(folder, ignore_errors=True)
