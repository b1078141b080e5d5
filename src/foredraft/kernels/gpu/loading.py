"""Choice of the GPU kernels for a device. This file imports triton only inside a function."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import KERNELS_VARIABLE
from foredraft.kernels.gpu.checks import explain_unsupported_tensors

log = logging.getLogger(__name__)
MIN_CAPABILITY = (8, 0)  # of the GPU: bfloat16 products and asynchronous copies


@dataclass(frozen=True)
class GPUKernels:
    """Triton kernels of a KV pool. A pool without them runs on torch's operators."""

    attend: Callable[..., Tensor]  # kernels.gpu.attention.attend
    store: Callable[..., None]  # kernels.gpu.store.store
    move: Callable[..., None]  # kernels.gpu.move.move
    make_pointer_table: Callable[..., Any]  # kernels.gpu.move.PointerTable.make
    max_moves: int
    walk_trees: Callable[..., Tensor]  # kernels.gpu.verify.walk_trees

    def can_attend(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Return whether the kernel takes queries [T, Hq, D] with keys and values [S, Hkv, D]; a refusal is logged."""
        reason = explain_unsupported_tensors(query, keys, values)
        if reason is not None:
            warn_about_fallback(reason)
        return reason is None


@dataclass(frozen=True)
class ExactKernels:
    """Triton kernels of an exact model: rows have the same bits in every pass."""

    multiply: Callable[..., Tensor]  # kernels.gpu.product.multiply
    normalize: Callable[..., tuple[Tensor, Tensor]]  # kernels.gpu.norm.normalize
    normalize_layer: Callable[..., Tensor]  # kernels.gpu.layer_norm.normalize_layer


@cache
def load_kernels() -> GPUKernels:
    """Import the kernels.

    Raises:
        ForedraftError: triton is not installed.
    """
    _check_triton()
    from foredraft.kernels.gpu import attention, move, store, verify

    return GPUKernels(
        attention.attend, store.store, move.move, move.PointerTable.make, move.MAX_MOVES, verify.walk_trees
    )


@cache
def load_exact_kernels() -> ExactKernels:
    """Import the kernels of exact models.

    Raises:
        ForedraftError: triton is not installed.
    """
    _check_triton()
    from foredraft.kernels.gpu import layer_norm, norm, product

    return ExactKernels(product.multiply, norm.normalize, layer_norm.normalize_layer)


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ForedraftError("the GPU kernels need triton, which torch for CUDA brings along; run: pip install triton")


def explain_missing_kernels(device: torch.device) -> str | None:
    """Return why a CUDA device runs attention on torch's operators; None if it runs the kernels."""
    if os.environ.get(KERNELS_VARIABLE) == "torch":
        return f"{KERNELS_VARIABLE}=torch"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        major, minor = capability
        return f"compute capability {major}.{minor} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def select_kernels(device: torch.device) -> GPUKernels | None:
    """Return the kernels for the KV pools of a device; None if it runs on torch's operators.

    Args:
        device: device of a model. A device other than CUDA has no GPU kernels.
    """
    if device.type != "cuda":
        return None
    reason = explain_missing_kernels(device)
    if reason is None:
        return load_kernels()
    warn_about_fallback(reason)
    return None


@cache
def warn_about_fallback(reason: str) -> None:
    """Log once per reason that attention runs on torch's operators."""
    log.warning("attention on this GPU runs on torch's operators, which copy the KV of every request: %s", reason)
