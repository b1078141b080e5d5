"""The cache that transformers' modules see in a pass: recurrent states of the runs that a layer computes.

transformers' recurrent layers read and write their state through `Cache`. Attention layers pass their keys and values
through it too; paged attention stores these, so here they pass unchanged.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from foredraft.kv.state_pool import CONV, RECURRENT, StateKey, StatePool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.recurrent.native_mixer import NativeMixer
from foredraft.models.recurrent.runs import RunGroup, RunPlan, plan_runs


class StateCache(Cache):  # type: ignore[misc]
    """Cache of one forward pass. A layer runs group by group: `start_group`, its forward, `end_group`."""

    def __init__(self, pool: StatePool, plan: RunPlan, natives: Mapping[int, NativeMixer]) -> None:
        """Begin a pass.

        Args:
            pool: states of the model, with memory for all states of the plan.
            plan: runs of the pass.
            natives: native code by layer.
        """
        super().__init__(layers=[])
        self.pool = pool
        self.plan = plan
        self.natives = natives
        self.attention_layer = -1  # layer of the last keys and values
        self._group: RunGroup | None = None
        self._states: dict[StateKey, Tensor] = {}  # states of the group, each [n, *size]

    @classmethod
    def start_pass(
        cls, pool: StatePool, forward_batch: ForwardBatch, natives: Mapping[int, NativeMixer]
    ) -> "StateCache":
        """Plan the runs of a pass, and allocate their states."""
        return cls(pool, plan_runs(forward_batch, pool), natives)

    def start_group(self, group: RunGroup) -> None:
        """Begin with the start states of a group."""
        self._group = group
        self._states.clear()

    def end_group(self) -> None:
        """Store the states that the layer has read and updated as the end states of the group."""
        assert self._group is not None
        for key, state in self._states.items():
            self.pool.write(key, self._group.end_states, state)
        self._group = None
        self._states.clear()

    # -- the interface of transformers' recurrent layers

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._read(StateKey(layer_idx, CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._read(StateKey(layer_idx, RECURRENT, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs [n, C, L] of a convolution. Returns them after those of the state, [n, C, K + L]."""
        key = StateKey(layer_idx, CONV, state_idx)
        state = self._read(key)
        inputs = torch.cat([state.to(conv_states.dtype), conv_states], -1)
        self._states[key] = inputs[..., inputs.shape[-1] - state.shape[-1] :]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._states[StateKey(layer_idx, RECURRENT, state_idx)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor:
        """Return the recurrent state, by the name that MiniMax uses."""
        return self._read(StateKey(layer_idx, RECURRENT, 0))

    def set_linear_cache(self, layer_idx: int, cache: Tensor) -> None:
        self._states[StateKey(layer_idx, RECURRENT, 0)] = cache

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # -- the interface of attention layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.attention_layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _read(self, key: StateKey) -> Tensor:
        state = self._states.get(key)
        if state is None:
            assert self._group is not None, "a layer reads its state outside a group of runs"
            state = self._states[key] = self.pool.read(key, self._group.start_states)
        return state
