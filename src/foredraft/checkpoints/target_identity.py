"""Identity of the target that a drafter was trained for, as the drafter's config.json records it.

Recorded are the norms of a few rows of the target's embedding, and the target's folder if both were trained together
(Medusa-2).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NORMS_KEY = "foredraft_target_norms"
FOLDER_KEY = "foredraft_target_folder"  # name of the target's folder inside the drafter's
NUM_ROWS = 16  # rows of the embedding whose norm is recorded, spread evenly
TOLERANCE = 0.02  # relative difference of norms: the same weights in another dtype stay below it, others do not


def compute_norms(embedding: Tensor) -> list[float]:
    """Return the norms of NUM_ROWS rows of a [V, H] embedding, rounded to four digits."""
    rows = torch.linspace(0, len(embedding) - 1, NUM_ROWS, dtype=torch.float32, device=embedding.device).long()
    return [float(f"{float(norm):.4g}") for norm in embedding[rows].double().norm(dim=-1)]


def is_other_target(config: dict[str, Any], embedding: Tensor) -> bool:
    """Check whether a drafter's config.json records another target than the one with this [V, H] embedding.

    False if nothing comparable is recorded.
    """
    recorded = config.get(NORMS_KEY)
    if not isinstance(recorded, list) or not all(isinstance(norm, int | float) for norm in recorded):
        return False
    if len(recorded) != NUM_ROWS:
        return False
    return any(
        abs(a - b) > TOLERANCE * max(abs(a), abs(b)) for a, b in zip(recorded, compute_norms(embedding), strict=True)
    )


def find_bundled_target(config: dict[str, Any], folder: Path) -> Path | None:
    """Return the target that was trained together with a drafter, if it is still in the drafter's folder."""
    name = config.get(FOLDER_KEY)
    is_inside = isinstance(name, str) and Path(name).name == name and (folder / name).is_dir()
    return folder / str(name) if is_inside else None
