"""Weights of fitted test heads, kept between the processes and runs of the test suite.

A file belongs to one state of all sources, so a changed program fits again.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".pytest_cache" / "fits"


@cache
def digest_sources() -> str:
    """Hash the package, the helpers of the tests, and the version of torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "support").rglob("*.py")]):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def fit_once(key: str, inputs: Mapping[str, Tensor], fit: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Fit weights, or read those of an earlier fit.

    Args:
        key: what is fitted, and how.
        inputs: tensors that the fit depends on.
        fit: returns the weights by name.
    """
    digest = hashlib.sha256((digest_sources() + key).encode())
    for name, tensor in inputs.items():
        digest.update(name.encode() + str(tensor.dtype).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    file = FOLDER / f"{digest.hexdigest()}.safetensors"
    if not file.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in fit().items()}, partial)
        partial.rename(file)  # two processes may fit the same; their weights are equal
    return load_file(file)
