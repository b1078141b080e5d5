"""Pass through a model that computes attention in code of its own: its cache object reads and writes the KV pool.

The model calls `update` of the cache with the keys and values of its rows, and attends to those that it gets back.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.sequences import SequenceGroup, group_sequences

CACHE_ARGUMENTS = ("cache", "past_key_values")  # names of the cache in releases of transformers, new ones first
INDEXER_LAYERS = 1 << 16  # layer of the pool with the indexer keys of layer 0


class RecurrentStateError(Exception):
    """A model asked its cache for a recurrent state."""


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers' types are not followed
    """One layer of a `PagedCache`.

    Args:
        cache: cache of the pass.
        layer: index of the layer.
    """

    is_sliding = False  # the cache has all keys, so the model's mask hides those outside a window

    def __init__(self, cache: "PagedCache", layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedLayer":
        """Return another layer of the same cache: a model with loops copies its layers."""
        return PagedLayer(self.cache, self.layer)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pool allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys [b, H, n, D] and values [b, H, n, Dv], and return those of all L ranks."""
        return self.cache.exchange(self.layer, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys [b, n, D] that select what a row attends to, and return those of all L ranks."""
        keys = indexer_key_states[:, None]
        return self.cache.exchange(INDEXER_LAYERS + self.layer, keys, keys[..., :1])[0][:, 0]

    def get_seq_length(self) -> int:
        """Return the keys before the rows of the pass."""
        return self.cache.num_past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the rank of the first."""
        return self.cache.num_past + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1


class PagedCache(Cache):  # type: ignore[misc]
    """Cache of one group of sequences, on the pages of their requests.

    Args:
        group: sequences of the pass.
        pool: KV pool.
        num_slots: slots that the pool needs.
        num_layers: layers of the model.
    """

    def __init__(self, group: SequenceGroup, pool: KVPool, num_slots: int, num_layers: int) -> None:
        self.group, self.pool, self.num_slots = group, pool, num_slots
        self.num_past = group.num_keys - group.num_columns
        super().__init__(layers=[PagedLayer(self, layer) for layer in range(num_layers)])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of a layer, and return those of all ranks. There may be more layers than modules."""
        return self.exchange(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the keys before the rows of the pass."""
        return self.num_past

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise RecurrentStateError."""
        raise RecurrentStateError

    get_recurrent_state = update_conv_state = update_recurrent_state = has_previous_state = get_conv_state

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys [b, H, n, D] and values [b, H, n, Dv] of a layer to the pool; return those of all L ranks."""
        group = self.group
        packed = [x.transpose(1, 2).flatten(0, 1).index_select(0, group.real_rows) for x in (keys, values)]
        pooled = self.pool.write(layer, group.write_slots, packed[0], packed[1], self.num_slots)
        shape, slots = group.slots.shape, group.slots.flatten()
        gathered = [x.index_select(0, slots).view(*shape, *x.shape[1:]).transpose(1, 2) for x in pooled]
        return gathered[0].contiguous(), gathered[1].contiguous()  # some models call `view` on them


@dataclass(frozen=True)
class CachePass:
    """Forward pass of transformers' modules with a `PagedCache`."""

    num_layers: int
    cache_argument: str  # name of the cache among the model's arguments
    arguments: frozenset[str]  # names of all of the model's arguments
    is_padded: bool = True  # whether one call may have sequences of different lengths

    @classmethod
    def from_model(cls, model: Any) -> "CachePass | None":
        """Make the pass of a model; None if the model takes no cache."""
        # A subclass may pass on its arguments without naming them.
        functions = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
        arguments = frozenset(name for function in functions for name in inspect.signature(function).parameters)
        name = next((name for name in CACHE_ARGUMENTS if name in arguments), None)
        depth = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
        return None if name is None else cls(depth, name, arguments)

    @property
    def recording_obstacle(self) -> str | None:
        """Reason why passes cannot be recorded as CUDA graphs."""
        return "the model attends in code of its own, over sequences whose lengths differ from pass to pass"

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own; None if they can."""
        return "it computes attention in code of its own, over padded sequences"

    @property
    def image_obstacle(self) -> str | None:
        """Reason why requests cannot have images; None if they can."""
        return "it computes attention in code of its own, over padded sequences"

    def prepare(self, model: Any) -> None:
        """Do nothing: the model keeps its own attention."""

    def run(
        self, model: Any, pool: KVPool, rows: ForwardBatch | PaddedRows, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the modules; see `ModulePass.run`."""
        assert isinstance(rows, ForwardBatch), "only recordings have padded rows, and this pass is not recorded"
        logits: dict[int, Tensor] = {}
        features: list[Tensor] = []
        for group in group_sequences(rows, self.is_padded):
            wanted = [row for row in rows.logit_row_list if row in group.columns]
            columns = sorted({group.columns[row][1] for row in wanted} or {group.num_columns - 1})
            cache = PagedCache(group, pool, rows.num_slots, self.num_layers)
            with capture_hidden_states(model, hidden_layers) as captured:
                output = self._call(model, rows, group, cache, columns)
            for row in wanted:
                b, column = group.columns[row]
                logits[row] = output[b, columns.index(column)]
            if hidden_layers:
                states = torch.cat([captured[layer] for layer in hidden_layers], -1)
                features.append(states.flatten(0, 1).index_select(0, group.real_rows))
        kept = [logits[row] for row in rows.logit_row_list]
        stacked = torch.stack(kept) if kept else output.new_empty(0, output.shape[-1])
        return stacked, torch.cat(features) if features else None

    def _call(
        self, model: Any, forward_batch: ForwardBatch, group: SequenceGroup, cache: PagedCache, columns: list[int]
    ) -> Tensor:
        """Call the model for a group and return the logits [b, c, V] of c columns."""
        kept = torch.tensor(columns, device=group.device)
        inputs = {
            "attention_mask": group.key_mask,
            "position_ids": forward_batch.positions[0][group.rows],
            "logits_to_keep": kept,
        }
        inputs = {name: value for name, value in inputs.items() if name in self.arguments}
        ids = forward_batch.tokens[0][group.rows]
        logits: Tensor = model(input_ids=ids, use_cache=True, **{self.cache_argument: cache}, **inputs).logits
        return logits if logits.shape[1] == len(columns) else logits[:, kept]
