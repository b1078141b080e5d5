"""Modules whose rows have the same bits in every pass on a GPU: linear layers and norms by kernels of our own.

They hold the parameters of the modules that they replace, under the same names. RMS norms take the place of torch's in
ordinary models too, since torch launches eight kernels for each.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foredraft.kernels.gpu.loading import ExactKernels
from foredraft.models.grid_linear import GridLinear

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")  # attributes that norms use for the number added to the variance
SCALES = (1.0, 1e-3)  # of the rows that a norm is tried on; with small ones the epsilon shows
MAX_DIFFERENT = 0.02  # share of numbers that another order of the sum may round otherwise
MAX_ERROR = 8  # units in the last place of float32


class ExactLinear(nn.Module):
    """Linear layer y = x W^T + b by the exact product."""

    def __init__(self, source: nn.Linear | Conv1D, kernels: ExactKernels) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.has_transposed_weight = type(source) is Conv1D
        self.multiply = kernels.multiply

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if self.has_transposed_weight else self.weight
        out: Tensor = self.multiply(x, weight, self.bias)
        return out


@dataclass(frozen=True)
class RMSForm:
    """How an RMS norm multiplies by its weight."""

    is_offset: bool = False  # by 1 + weight, before rounding
    is_late: bool = False  # by the weight, before rounding

    def compute(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the norm by torch's operators."""
        normal, factors = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps), weight.float()
        if self.is_offset:
            return (normal * (1 + factors)).to(x.dtype)
        return ((normal if self.is_late else normal.to(x.dtype)) * factors).to(x.dtype)


RMS_FORMS = (RMSForm(), RMSForm(is_late=True), RMSForm(is_offset=True))


class ExactRMSNorm(nn.Module):
    """RMS norm by the kernel of one program per row."""

    def __init__(self, weight: nn.Parameter, eps: float, form: RMSForm, kernels: ExactKernels) -> None:
        super().__init__()
        self.weight, self.eps, self.form = weight, eps, form
        self.normalize = kernels.normalize

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # the kernel has no gradient
            return self.form.compute(x, self.weight, self.eps)
        out, _ = self.normalize(
            x.reshape(-1, x.shape[-1]), self.weight, self.eps, None, self.form.is_offset, self.form.is_late
        )
        return out.view(x.shape)


class ExactLayerNorm(nn.Module):
    """Layer norm by the kernel of one program per row."""

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, eps: float, kernels: ExactKernels
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps
        self.normalize = kernels.normalize_layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.normalize(x.reshape(-1, x.shape[-1]), self.weight, self.bias, self.eps)
        return out.view(x.shape)


EXACT_MODULES = (ExactLinear, ExactRMSNorm, ExactLayerNorm)


def replace_modules(model: Any, kernels: ExactKernels) -> None:
    """Replace the linear layers and norms of a model by exact ones. Modules of other kinds stay."""
    _replace(model, lambda module: _make_exact(module, kernels))


def replace_rms_norms(model: Any, kernels: ExactKernels) -> None:
    """Replace the RMS norms of a model by those of one kernel each. Other modules stay."""

    def make(module: nn.Module) -> nn.Module | None:
        trial = _NormTrial.run(module)
        return None if trial is None else _make_rms_norm(trial, kernels)

    _replace(model, make)


@torch.no_grad()
def _replace(model: Any, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace the modules for which `make` returns another."""
    for path, module in list(model.named_modules()):
        made = make(module)
        if made is not None:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, made.eval())


def _make_exact(module: nn.Module, kernels: ExactKernels) -> nn.Module | None:
    """Make the exact version of a module; None if it has none."""
    if type(module) in (nn.Linear, GridLinear, Conv1D):
        return ExactLinear(module, kernels)
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return ExactLayerNorm(module.weight, module.bias, module.eps, kernels)
    trial = _NormTrial.run(module)
    return None if trial is None else _make_rms_norm(trial, kernels) or _make_layer_norm(trial, kernels)


def _make_rms_norm(trial: "_NormTrial", kernels: ExactKernels) -> nn.Module | None:
    form = next((form for form in RMS_FORMS if _is_equal(trial.out, form.compute(*trial.inputs))), None)
    return None if form is None else ExactRMSNorm(trial.weight, trial.eps, form, kernels)


def _make_layer_norm(trial: "_NormTrial", kernels: ExactKernels) -> nn.Module | None:
    weight, rows = trial.weight, trial.rows
    wide = nn.functional.layer_norm(rows.float(), weight.shape, weight.float(), None, trial.eps)
    return ExactLayerNorm(weight, None, trial.eps, kernels) if _is_equal(trial.out, wide.to(rows.dtype)) else None


@dataclass(frozen=True)
class _NormTrial:
    """Result of a module of one weight on random rows."""

    rows: Tensor
    out: Any
    weight: nn.Parameter
    eps: float

    @property
    def inputs(self) -> tuple[Tensor, Tensor, float]:
        return self.rows, self.weight, self.eps

    @classmethod
    def run(cls, module: nn.Module) -> "_NormTrial | None":
        """Run a module; None if it is no norm of rows with one weight."""
        parameters, eps = list(module.named_parameters()), _find_eps(module)
        if eps is None or [name for name, _ in parameters] != ["weight"] or parameters[0][1].dim() != 1:
            return None
        if len(inspect.signature(module.forward).parameters) != 1:  # such as a gate
            return None
        weight = parameters[0][1]
        rows = _make_rows(weight)
        try:
            return cls(rows, module(rows), weight, eps)
        except Exception:  # the weight may not be one of rows
            return None


def _find_eps(module: nn.Module) -> float | None:
    return next((value for name in EPS_NAMES if isinstance(value := vars(module).get(name), float)), None)


def _make_rows(weight: Tensor) -> Tensor:
    """Make random rows [1, 8, H] of two sizes. Their mean is not zero, by which norms differ."""
    noise = torch.Generator().manual_seed(0)
    rows = torch.cat([(torch.randn(1, 4, len(weight), generator=noise) + 0.5) * scale for scale in SCALES], 1)
    return rows.to(weight.device, weight.dtype)


def _is_equal(a: Any, b: Tensor) -> bool:
    """Whether a module's result equals a formula's, but for the order of a sum."""
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    error = MAX_ERROR * torch.finfo(torch.float32).eps * b.double().abs()
    return float(((a.double() - b.double()).abs() > error).double().mean()) <= MAX_DIFFERENT
