"""Which target a drafter was trained for, as its config records it: a few numbers of the target's embeddings, and the
target's folder where the two were trained together (Medusa-2)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NORMS_KEY = "foredraft_target_norms"
FOLDER_KEY = "foredraft_target_folder"  # inside the drafter's own
NUM_ROWS = 16  # of the embeddings, spread evenly
TOLERANCE = 0.02  # of a norm: the same weights in another type stay inside, other weights do not


def compute_norms(embedding: Tensor) -> list[float]:
    """The lengths of some rows of [V, H] embeddings, to four digits."""
    rows = torch.linspace(0, len(embedding) - 1, NUM_ROWS, device=embedding.device).long()
    return [float(f"{float(norm):.4g}") for norm in embedding[rows].double().norm(dim=-1)]


def is_other_target(config: dict[str, Any], embedding: Tensor) -> bool:
    """Whether a drafter's config records another target than the one with these embeddings; one that records none, or
    nothing that can be compared, does not."""
    recorded = config.get(NORMS_KEY)
    if not isinstance(recorded, list) or not all(isinstance(norm, int | float) for norm in recorded):
        return False
    if len(recorded) != NUM_ROWS:
        return False
    return any(
        abs(a - b) > TOLERANCE * max(abs(a), abs(b)) for a, b in zip(recorded, compute_norms(embedding), strict=True)
    )


def find_bundled_target(config: dict[str, Any], folder: Path) -> Path | None:
    """The target that was trained together with a drafter, where it still lies in the drafter's folder."""
    name = config.get(FOLDER_KEY)
    is_inside = isinstance(name, str) and Path(name).name == name and (folder / name).is_dir()
    return folder / str(name) if is_inside else None
