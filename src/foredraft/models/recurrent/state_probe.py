"""Probe that finds the recurrent layers of a model: which modules use states, and the shapes of these."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from foredraft.kv.state_pool import CONV, RECURRENT, StateKey, StateShape
from foredraft.models.recurrent.mixers import Projections


class StateProbe(Cache):  # type: ignore[misc]
    """Cache without states, for a short pass. It records which module of which layer would keep which state."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[StateKey, StateShape] = {}
        self.mixers: dict[nn.Module, int] = {}  # module that reads and writes states -> its layer
        self.attention_layers: list[int] = []  # layers that attend, in order
        self.attending: list[nn.Module] = []  # modules that attend, in order
        self._active: list[nn.Module] = []  # modules whose forward runs, innermost last
        self._inputs: list[Any] = []  # first argument of each of them
        # (parent, module, input, output) of the linear modules that ran, and (input, output) of those with states
        self._linear_calls: list[tuple[nn.Module, nn.Module, Any, Any]] = []
        self._results: dict[nn.Module, tuple[Any, Any]] = {}

    @property
    def attention_layer(self) -> int:
        """Layer of the last keys and values."""
        return self.attention_layers[-1]

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Watch which modules of a model run."""
        handles: list[RemovableHandle] = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def list_mixers(self) -> list[tuple[nn.Module, Projections]]:
        """List the modules that read and write states, with their projections."""
        return [(mixer, self._find_projections(mixer)) for mixer in self.mixers]

    def _find_projections(self, mixer: nn.Module) -> Projections:
        given, returned = self._results[mixer]
        returned = returned[0] if isinstance(returned, tuple) else returned
        names = {child: name for name, child in mixer.named_children()}
        calls = [(names[c], x, y) for parent, c, x, y in self._linear_calls if parent is mixer and c in names]
        inputs = [name for name, x, _ in calls if x is given]
        outputs = [name for name, _, y in calls if y is returned]
        return Projections(tuple(inputs), outputs[0] if outputs else None)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._active.append(module)
        self._inputs.append(next(iter((*args, *kwargs.values())), None))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        self._active.pop()
        given = self._inputs.pop()
        if isinstance(module, nn.Linear) and self._active:
            self._linear_calls.append((self._active[-1], module, given, output))
        elif module in self.mixers:
            self._results[module] = given, output

    # -- the interface of transformers' recurrent layers

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.mixers[self._active[-1]] = layer_idx

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.mixers[self._active[-1]] = layer_idx

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._record(StateKey(layer_idx, CONV, state_idx), (*conv_states.shape[1:-1], size), conv_states)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._record(StateKey(layer_idx, RECURRENT, state_idx), tuple(recurrent_states.shape[1:]), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> None:
        self.mixers[self._active[-1]] = layer_idx

    def set_linear_cache(self, layer_idx: int, cache: Tensor) -> None:
        self._record(StateKey(layer_idx, RECURRENT, 0), tuple(cache.shape[1:]), cache)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # -- the interface of attention layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.attention_layers.append(layer_idx)
        self.attending.append(self._active[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def _record(self, key: StateKey, size: tuple[int, ...], state: Tensor) -> None:
        self.mixers[self._active[-1]] = key.layer
        self.shapes[key] = StateShape(size, state.dtype)
