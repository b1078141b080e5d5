"""Recurrent layers on packed rows: their own forward, group by group of runs.

Most weights of a recurrent layer are in the projections before and after its recurrence, which act on each row alone.
They run once, on all rows of the pass; the rest of the layer runs once per group of runs.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.models.recurrent.state_cache import StateCache

PASS_ARGUMENTS = ("forward_batch", "pool", "attention_cache")  # those of our own attention; no recurrent layer has them
NO_LAYER = -1  # index of a layer that does not know its own


@dataclass(frozen=True)
class Projections:
    """Linear children of a recurrent layer that act on its input rows, or yield its output rows, by name."""

    inputs: tuple[str, ...] = ()
    output: str | None = None


class PackedMixer(nn.Module):
    """First base of a recurrent layer that runs on the packed rows [1, T, H] of a pass if its cache is a StateCache."""

    projections = Projections()
    argument_names: tuple[str, ...] = ()  # of the layer's own forward; the first one is the hidden states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self.argument_names, args, strict=False)) | kwargs
        cache = arguments.get("cache")
        if not isinstance(cache, StateCache):
            return super().forward(*args, **kwargs)
        native = cache.natives.get(vars(self).get("layer_idx", NO_LAYER))
        if native is not None:
            hidden = arguments[self.argument_names[0]]
            return native.run(self._modules, hidden, cache.pool, cache.plan.native_runs)
        arguments = {name: value for name, value in arguments.items() if name not in PASS_ARGUMENTS}
        if len(cache.plan.groups) == 1:  # nothing to share
            return self._run_groups(self, cache, arguments, {})
        hidden = arguments[self.argument_names[0]]
        children: Any = self._modules
        shared = {name: children[name](hidden) for name in self.projections.inputs}
        view = _copy_module(self)
        view._modules |= {name: SharedProjection(children[name]) for name in shared}
        if self.projections.output is None:
            return self._run_groups(view, cache, arguments, shared)
        view._modules[self.projections.output] = nn.Identity()
        output = self._run_groups(view, cache, arguments, shared)
        project = children[self.projections.output]
        return (project(output[0]), *output[1:]) if isinstance(output, tuple) else project(output)

    def _run_groups(self, layer: Any, cache: StateCache, arguments: dict[str, Any], shared: dict[str, Tensor]) -> Any:
        """Run a layer once per group and put the outputs together.

        Args:
            layer: this layer, or its copy with other projections.
            cache: groups and states.
            arguments: arguments of the layer's own forward, with all rows.
            shared: outputs [1, T, ..] of the shared projections by name.
        """
        run, input_name = super(PackedMixer, layer).forward, self.argument_names[0]
        num_rows = arguments[input_name].shape[1]
        rows, outputs = [], []
        for group in cache.plan.groups:
            cache.start_group(group)
            can_run_whole = cache.pool.continues_chunks or group.starts_empty
            for part in [group.rows] if can_run_whole else group.rows.chunk(group.rows.shape[1], 1):
                selected = {name: _select(value, part, num_rows) for name, value in arguments.items()}
                for name, output in shared.items():
                    layer._modules[name].expect(selected[input_name], output[0][part])
                rows.append(part)
                outputs.append(run(**selected))
            cache.end_group()
        if isinstance(outputs[0], tuple):
            return tuple(_join(rows, parts, num_rows) for parts in zip(*outputs, strict=True))
        return _join(rows, outputs, num_rows)


class SharedProjection(nn.Module):
    """Stands for a projection whose output for all rows exists already."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.rows: Tensor | None = None
        self.output: Tensor | None = None

    def expect(self, rows: Tensor, output: Tensor) -> None:
        """Set the rows of the next call, and their output."""
        self.rows, self.output = rows, output

    def forward(self, x: Tensor) -> Any:
        return self.output if x is self.rows else self.original(x)

    def __getattr__(self, name: str) -> Any:
        """Return a parameter or another attribute of the projection."""
        return super().__getattr__(name) if name in ("original", "rows", "output") else getattr(self.original, name)


def install_mixers(mixers: Iterable[tuple[nn.Module, Projections]]) -> None:
    """Let recurrent layers run on packed rows. Outside a forward pass of ours they run as before.

    Raises:
        ForedraftError: hooks replaced the forward of a layer.
    """
    for module, projections in mixers:
        if "forward" in vars(module):
            raise ForedraftError(
                f"the forward of {type(module).__name__} was replaced (device_map does so), so it cannot run on packed "
                "rows; load the model on one device"
            )
        # A replaced `forward` would refer to its module, and the cycle would keep an unloaded model in memory.
        mixer: Any = module
        mixer.__class__ = _make_packed_class(type(module))  # type: ignore[arg-type]
        mixer.projections = projections


@cache
def _make_packed_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, PackedMixer):
        return kind
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    return type(kind.__name__, (PackedMixer, kind), {"argument_names": names})


def _copy_module(module: nn.Module) -> Any:
    """Copy a module around the same parameters and children."""
    view: Any = object.__new__(type(module))
    view.__dict__ = dict(vars(module))
    view._modules = dict(module._modules)
    return view


def _select(value: Any, rows: Tensor, num_rows: int) -> Any:
    """Select rows [n, L] from an argument [1, T, ..], as [n, L, ..]; other arguments stay."""
    if isinstance(value, tuple):
        return tuple(_select(part, rows, num_rows) for part in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (1, num_rows):
        return value
    return value[0][rows]


def _join(rows: Sequence[Tensor], outputs: Sequence[Any], num_rows: int) -> Any:
    """Put outputs [n, L, ..] into the order of the packed rows, [1, T, ..].

    Outputs of other shapes, such as states, are not read by decoder layers; the first of them is returned.

    Args:
        rows: packed rows [n, L] of each output.
        outputs: outputs of the layer.
        num_rows: packed rows T.
    """
    if any(not isinstance(x, Tensor) or x.shape[:2] != part.shape for part, x in zip(rows, outputs, strict=True)):
        return outputs[0]
    joined = outputs[0].new_empty(num_rows, *outputs[0].shape[2:])
    for part, output in zip(rows, outputs, strict=True):
        joined[part.flatten()] = output.flatten(0, 1)
    return joined[None]
