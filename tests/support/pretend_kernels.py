"""Triton kernels on the pretended GPU: they run in triton's interpreter, on the numbers of the pretended tensors."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from foredraft.kernels.gpu.graphs import GRAPHS_VARIABLE
from foredraft.kernels.gpu.loading import ExactKernels, GPUKernels, load_exact_kernels, load_kernels
from foredraft.kernels.gpu.rows import DeviceRows
from tests.support.pretend_gpu import PretendTensor, pretend_gpu

LOADING = "foredraft.kernels.gpu.loading"
LOADS = ("foredraft.models.exact", "foredraft.models.fused_norms")  # modules that replace parts of a model


def run_on_numbers(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel take and return pretended tensors."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # the interpreter calls torch often
            result = run(*tree_map(_unwrap, args))
        return tree_map(_wrap, result)

    return call


def _unwrap(value: Any) -> Any:
    if isinstance(value, DeviceRows):
        return replace(value, **{each.name: _unwrap(getattr(value, each.name)) for each in fields(value)})
    return value.inner if isinstance(value, PretendTensor) else value


def _wrap(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, Tensor) else value


def make_kernels() -> GPUKernels:
    own = load_kernels()
    names = ("attend", "store", "move", "make_pointer_table")
    return replace(own, **{name: run_on_numbers(getattr(own, name)) for name in names})


def make_exact_kernels(**other: Callable[..., Any]) -> ExactKernels:
    """Make the kernels of exact models; `other` replaces some of them."""
    own = replace(load_exact_kernels(), **other)
    return ExactKernels(*(run_on_numbers(getattr(own, each.name)) for each in fields(own)))


@contextmanager
def pretend_kernels(**other: Callable[..., Any]) -> Iterator[None]:
    """Run code with a pretended GPU that has Triton kernels; `other` replaces some of those of exact models."""
    kernels, exact = make_kernels(), make_exact_kernels(**other)
    with (
        pretend_gpu(),
        mock.patch.dict(os.environ, {GRAPHS_VARIABLE: "0"}),  # there is nothing that could capture
        mock.patch(f"{LOADING}.explain_missing_kernels", return_value=None),
        mock.patch(f"{LOADING}.load_kernels", return_value=kernels),
        ExitStack() as stack,
    ):
        for module in LOADS:
            stack.enter_context(mock.patch(f"{module}.explain_missing_kernels", return_value=None))
            stack.enter_context(mock.patch(f"{module}.load_exact_kernels", return_value=exact))
        yield
