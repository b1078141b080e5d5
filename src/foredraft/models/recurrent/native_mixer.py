"""Recurrent layers of transformers' modules by the native kernel: all runs of a pass in one call per layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.mixers import MixerKernel, NativeRuns
from foredraft.kv.state_pool import CONV, RECURRENT, StateKey, StatePool, StateShape
from foredraft.models.recurrent.mixer_families import MixerFamily, find_mixer_family


@dataclass(frozen=True)
class NativeMixer:
    """Native code of one recurrent layer between its projections, which stay modules. Its states are float32."""

    layer: int
    family: MixerFamily
    kernel: MixerKernel
    order: Tensor | None  # [width] which output of the projections stands where; None = as they are
    factors: Tensor | None  # [width] of the outputs; None = 1

    @classmethod
    def from_module(cls, module: Any, layer: int) -> "NativeMixer | None":
        """Make the native code of a layer; None if its class has none."""
        family = find_mixer_family(module)
        if family is None:
            return None
        tensors: list[Tensor] = []

        def hold(tensor: Tensor) -> int:
            tensors.append(tensor.detach().float().contiguous())
            return tensors[-1].data_ptr()

        kernel = MixerKernel(family.build(module, hold), tuple(tensors))
        return cls(layer, family, kernel, family.order(module), family.factors(module))

    @property
    def shapes(self) -> dict[StateKey, StateShape]:
        """Shapes of the layer's states."""
        return list_state_shapes(self.layer, self.kernel)

    def run(self, children: Mapping[str, Any], hidden: Tensor, pool: StatePool, runs: NativeRuns) -> Tensor:
        """Run the layer.

        Args:
            children: children of the layer's module by name.
            hidden: packed rows [1, T, H].
            pool: states, in the shapes above.
            runs: runs of the pass.

        Returns:
            Output rows [1, T, H].
        """
        parts = [children[name](hidden)[0] for name in self.family.inputs]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        projected = projected.float()
        if self.factors is not None:
            projected = projected * self.factors
        if self.order is not None:
            projected = projected[:, self.order]
        states = None if self.kernel.state_size is None else pool.tensors[StateKey(self.layer, RECURRENT, 0)]
        conv_states = pool.tensors[StateKey(self.layer, CONV, 0)]
        mixed = self.kernel.run(projected.contiguous(), runs, conv_states, states)
        out: Tensor = children[self.family.output](mixed.to(hidden.dtype)[None])
        return out


def list_state_shapes(layer: int, kernel: MixerKernel) -> dict[StateKey, StateShape]:
    """List the shapes of the states of a layer with native code."""
    shapes = {StateKey(layer, CONV, 0): StateShape(kernel.conv_size, torch.float32)}
    if kernel.state_size is not None:
        shapes[StateKey(layer, RECURRENT, 0)] = StateShape(kernel.state_size, torch.float32)
    return shapes


def build_native_mixers(mixers: Iterable[tuple[nn.Module, int]], dtype: torch.dtype) -> dict[int, NativeMixer]:
    """Make the native code of recurrent layers, by layer. Layers without native code are left out.

    Args:
        mixers: (module, layer).
        dtype: dtype of the model. Native code has float32 inside, and is for models in float32 and bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16) or load_library() is None:
        return {}
    # A module is found by its own index in a pass, so both must be the same.
    made = [NativeMixer.from_module(m, layer) for m, layer in mixers if vars(m).get("layer_idx") == layer]
    return {native.layer: native for native in made if native is not None}
