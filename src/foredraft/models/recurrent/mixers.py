"""Recurrent layers on packed rows: their own forward, group by group of runs."""

import inspect
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from foredraft.models.recurrent.state_cache import StateCache

PASS_ARGUMENTS = ("forward_batch", "pool", "attention_cache")  # those of our own attention; no recurrent layer has them


class PackedMixer(nn.Module):
    """First base of a recurrent layer that runs on the packed rows [1, T, H] of a pass if its cache is a StateCache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        names = list(inspect.signature(run).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        cache = arguments.get("cache")
        if not isinstance(cache, StateCache):
            return run(*args, **kwargs)
        num_rows = arguments[names[0]].shape[1]
        arguments = {name: value for name, value in arguments.items() if name not in PASS_ARGUMENTS}
        rows, outputs = [], []
        for group in cache.groups:
            cache.start_group(group)
            can_run_whole = cache.pool.continues_chunks or group.starts_empty
            for part in [group.rows] if can_run_whole else group.rows.split(1, dim=1):
                selected = {name: _select(value, part, num_rows) for name, value in arguments.items()}
                rows.append(part)
                outputs.append(run(**selected))
            cache.end_group()
        if isinstance(outputs[0], tuple):
            return tuple(_join(rows, parts, num_rows) for parts in zip(*outputs, strict=True))
        return _join(rows, outputs, num_rows)


def install_mixers(mixers: Iterable[nn.Module]) -> None:
    """Let recurrent layers run on packed rows. Outside a forward pass of ours they run as before."""
    for module in mixers:
        # A replaced `forward` would refer to its module, and the cycle would keep an unloaded model in memory.
        module.__class__ = _make_packed_class(type(module))


@cache
def _make_packed_class(kind: type[nn.Module]) -> type[nn.Module]:
    return kind if issubclass(kind, PackedMixer) else type(kind.__name__, (PackedMixer, kind), {})


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
