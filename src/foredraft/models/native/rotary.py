"""Tables of rotary factors for native decoders."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

RotaryTable = Callable[[int], tuple[Tensor, Tensor]]  # positions -> cos and sin [positions, rotary / 2]
MixedFactors = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [A, T] -> cos and sin [T, rotary / 2]


@dataclass(frozen=True)
class RotaryTables:
    """Rotary factors of a model's layers."""

    main: RotaryTable
    local: RotaryTable | None = None  # of layers with a sliding window; None = the same
    mixed: MixedFactors | None = None  # factors of positions with several axes, if the module takes them

    @classmethod
    def from_module(
        cls, module: Any, has_paired_factors: bool = False, has_single_factors: bool = False
    ) -> "RotaryTables":
        """Make the tables of a rotary module of transformers with one base.

        Args:
            module: rotary module.
            has_paired_factors: whether it repeats its factors by pairs. Default False = by halves.
            has_single_factors: whether it does not repeat its factors. Default False.
        """
        take_half: Callable[[Tensor], Tensor] = _take_every_other if has_paired_factors else take_first_half
        if has_single_factors:
            take_half = _take_all
        return cls(_make_table(module, take_half), mixed=partial(_mix_factors, module, take_half))

    @classmethod
    def from_module_by_type(cls, module: Any) -> "RotaryTables":
        """Make the tables of a rotary module of transformers with a base by type of layer."""
        types = module.layer_types
        full, sliding = "full_attention", "sliding_attention"
        return cls(
            _make_table(module, take_first_half, full if full in types else sliding),
            _make_table(module, take_first_half, sliding if sliding in types else full),
        )

    @classmethod
    def make_empty(cls) -> "RotaryTables":
        """Make the tables of a model without rotary embeddings."""
        return cls(lambda positions: (torch.empty(positions, 0), torch.empty(positions, 0)))

    @property
    def width(self) -> int:
        """Number of rotated values of a head."""
        return 2 * self.main(1)[0].shape[1]


def _make_table(module: Any, take_half: Callable[[Tensor], Tensor], *layer_type: str) -> RotaryTable:
    def table(positions: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = module(torch.empty(0, dtype=torch.float32), torch.arange(positions)[None], *layer_type)
        return take_half(cos[0]), take_half(sin[0])

    return table


def _mix_factors(module: Any, take_half: Callable[[Tensor], Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        cos, sin = module(torch.empty(0, dtype=torch.float32), positions[:, None])
    return take_half(cos[0]), take_half(sin[0])


def take_first_half(factors: Tensor) -> Tensor:
    """Return the first half [positions, rotary / 2] of every row of [positions, rotary]; the second half is equal."""
    return factors[:, : factors.shape[-1] // 2].contiguous()


def _take_all(factors: Tensor) -> Tensor:
    return factors.contiguous()


def _take_every_other(factors: Tensor) -> Tensor:
    return factors[:, ::2].contiguous()
