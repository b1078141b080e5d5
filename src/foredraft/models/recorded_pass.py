"""Forward passes of a model as recordings (CUDA graphs), one for each size that occurs."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.graphs import Outputs, ReplayCache
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.pass_size import ROW_BUCKETS, PassSize

log = logging.getLogger(__name__)
MAX_REASON_CHARS = 200

# (padded rows, layer boundaries) -> logits [R, V], and hidden states [T, F] or None
RunPass = Callable[[PaddedRows, tuple[int, ...]], tuple[Tensor, Tensor | None]]


@dataclass
class RecordedPasses:
    """Recordings of the passes of one model over one KV pool.

    A pass is padded to the next `PassSize`, recorded at the first use of the size, and replayed from then on. A model
    that cannot be recorded runs without, and a line of the log says why.
    """

    name: str  # of the model, for the log
    pool: KVPool
    reason: str | None = None  # why the model cannot be recorded
    _cache: ReplayCache | None = None  # made at the first recording
    _inputs: dict[PassSize, PaddedRows] = field(default_factory=dict)
    _layout_version: int = -1  # of the pool, when the recordings were made

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of rows that passes are padded to; () if none is recorded."""
        return () if self.pool.recorder is None or self.reason is not None else ROW_BUCKETS

    def run(
        self, batch: ForwardBatch, hidden_layers: tuple[int, ...], run: RunPass
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run a pass by a recording.

        Args:
            batch: packed rows.
            hidden_layers: layer boundaries to return.
            run: runs the model over padded rows.

        Returns:
            Logits [R, V], valid until the next pass, and hidden states [T, F] or None, as of `LM.forward`. None if the
            pass must run without a recording: it is too large, the pool has no tensors yet, or the model cannot be
            recorded.
        """
        # rows at fixed addresses are a part of a larger recording already, such as a draft loop
        cache = self._find_cache() if batch.made_rows is None else None
        size = None if cache is None else PassSize.fit(batch)
        if cache is None or size is None:
            return None
        rows = self._inputs.get(size)
        if rows is None:
            rows = self._inputs[size] = PaddedRows.allocate(size, self._count_slots(), batch.device)
        rows.load(batch)
        outputs = self._replay(cache, (size, hidden_layers), lambda: _run_padded(run, rows, hidden_layers))
        if outputs is None:
            return None
        logits = outputs[0][: len(batch.logit_row_list)]
        # drafters keep hidden states beyond the next pass
        return logits, outputs[1][: batch.num_rows].clone() if hidden_layers else None

    def _find_cache(self) -> ReplayCache | None:
        """Return the recordings for the addresses of the pool; None if no pass can be recorded."""
        pool = self.pool
        if pool.recorder is None or pool.graph_memory is None or self.reason is not None:
            return None
        # growing tensors change their addresses, and a recording has no gradients
        if not pool.is_whole or not pool.layers or not torch.is_inference_mode_enabled():
            return None
        if self._cache is None:
            self._cache = ReplayCache(pool.recorder, pool.graph_memory)
        if self._layout_version != pool.layout_version:
            self._cache.clear()
            self._inputs.clear()
            self._layout_version = pool.layout_version
        return self._cache

    def _count_slots(self) -> int:
        return min(len(keys) for keys, _ in self.pool.layers.values())

    def _replay(self, cache: ReplayCache, key: Hashable, run: Callable[[], Outputs]) -> Outputs | None:
        """Replay the recording of a key, and return its outputs; None if the model cannot be recorded."""
        try:
            replay = cache.get(key, run)
        except (RuntimeError, ForedraftError) as error:  # a wait for the device, an operator that cannot be captured
            self.reason = _summarise(error)
            log.warning("passes of %s run without CUDA graphs, which is slower: %s", self.name, self.reason)
            cache.clear()
            return None
        replay()
        return replay.outputs


def _summarise(error: BaseException) -> str:
    """Return the first line of an error, or of the one that led to it: the end of a failed capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0][:MAX_REASON_CHARS]


def _run_padded(run: RunPass, rows: PaddedRows, hidden_layers: tuple[int, ...]) -> Outputs:
    logits, states = run(rows, hidden_layers)
    return (logits,) if states is None else (logits, states)
