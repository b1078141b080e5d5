"""Changes of transformers' modules by adapters: hooks on linear modules add them to the rows of requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.loaded_adapter import LoadedAdapter
from foredraft.models.forward_batch import ForwardBatch

AdapterRows = tuple[LoadedAdapter, Tensor]  # an adapter, and its packed rows


@dataclass
class ModuleChanges:
    """Hooks on the linear modules of one model. A pass under the lock of the modules sets the rows that they change."""

    _rows: Sequence[AdapterRows] = ()  # of the pass that runs
    _num_rows: int = 0  # T of that pass
    _paths: set[str] = field(default_factory=set)  # modules with a hook

    def install(self, model: nn.Module, paths: Sequence[str]) -> None:
        """Add a hook to every module that has none yet."""
        for path in paths:
            if path not in self._paths:
                model.get_submodule(path).register_forward_hook(partial(self._add_changes, path))
                self._paths.add(path)

    @contextmanager
    def apply(self, batch: ForwardBatch) -> Iterator[None]:
        """Change the rows of a batch that have an adapter, in the passes of the context."""
        if not batch.has_adapters:
            yield
            return
        self._rows, self._num_rows = _list_rows(batch), batch.num_rows
        try:
            yield
        finally:
            self._rows = ()

    def _add_changes(self, path: str, _module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not self._rows:
            return None
        x, out = inputs[0].reshape(-1, inputs[0].shape[-1]), output.clone().reshape(-1, output.shape[-1])
        if len(x) != self._num_rows:
            raise ForedraftError(
                f"the module {path} reads {len(x)} of the {self._num_rows} rows of a pass, so an adapter cannot change "
                "it for single requests; merge the adapter into its model"
            )
        for adapter, rows in self._rows:
            compute = adapter.modules.get(path)
            if compute is not None:
                out[rows] = out[rows] + compute(x[rows]).to(out.dtype)
        return out.view(output.shape)


def _list_rows(batch: ForwardBatch) -> list[AdapterRows]:
    rows_of: dict[LoadedAdapter, list[int]] = {}
    start = 0
    for span in batch.spans:
        if span.adapter is not None:
            rows_of.setdefault(span.adapter, []).extend(range(start, start + len(span.tokens)))
        start += len(span.tokens)
    return [(adapter, torch.tensor(rows, device=batch.device)) for adapter, rows in rows_of.items()]
