"""Sampling settings of rows as tensors: the distribution without a wait for the device and with fixed shapes.

A recorded pass reads other settings at every replay, so they cannot be numbers of the program. The operators are those
of `distribution`, in the same order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling import filters, weights
from foredraft.sampling.filters import NEG_INF
from foredraft.sampling.params import Sampling
from foredraft.sampling.weights import LOG2_E


@dataclass(frozen=True)
class FilterSizes:
    """Sizes of the filters of all rows, which a recorded pass needs in advance. Equal sizes share a recording."""

    top_k: int = 0  # the largest top-k, rounded up to a power of two; 0 = no row has one
    has_top_p: bool = False
    has_min_p: bool = False

    @classmethod
    def measure(cls, rows: Sequence[Sampling]) -> "FilterSizes":
        """Return the sizes of some rows' settings."""
        largest = max((s.top_k for s in rows), default=0)
        return cls(
            1 << (largest - 1).bit_length() if largest else 0,
            any(s.top_p < 1 for s in rows),
            any(s.min_p > 0 for s in rows),
        )


@dataclass(frozen=True)
class RowSettings:
    """Settings of R rows on one device. Temperatures are positive: a greedy row has another way to its token."""

    sizes: FilterSizes
    temperature: Tensor  # [R] float64
    top_k: Tensor  # [R] int64; 0 = all tokens
    top_p: Tensor  # [R] float64
    min_p: Tensor  # [R] float64

    def compute_probs(self, logits: Tensor) -> Tensor:
        """Compute the distributions [R, V] of logits [R, V], as `distribution` does without shaping of logits.

        A row with invalid logits (NaN, +inf, or no token left) is NaN throughout.
        """
        x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        is_valid = x.amax(-1, keepdim=True).isfinite()
        x = torch.where(is_valid, x, 0)
        if self.sizes.top_k:
            x = self._keep_top_k(x)
        exponents = weights.compute_exponents(x, self._compute_scales(x.dtype)[:, None])
        w = weights.compute_weights(exponents)
        if self.sizes.has_top_p:
            w = torch.where(filters.select_nucleus(w, self.top_p, w), w, 0)
        if self.sizes.has_min_p:
            w = filters.keep_min_p(w, self.min_p)
        return torch.where(is_valid, weights.normalise(w), math.nan)

    def _keep_top_k(self, x: Tensor) -> Tensor:
        """Set logits below the k-th largest of their row to -inf; see `filters.keep_top_k`."""
        size = x.shape[-1]
        best = x.topk(min(self.sizes.top_k, size), -1).values
        floor = best.gather(-1, (self.top_k - 1).clamp(0, best.shape[-1] - 1)[:, None])
        is_kept = ((self.top_k == 0) | (self.top_k >= size))[:, None]
        return x.masked_fill(~is_kept & (x < floor), NEG_INF)

    def _compute_scales(self, dtype: torch.dtype) -> Tensor:
        """Compute `weights.compute_scale` of every row."""
        limits = torch.finfo(dtype)
        scales = LOG2_E / self.temperature.clamp_min(torch.finfo(torch.float64).tiny)
        return scales.clamp(limits.tiny, limits.max).to(dtype)
