"""Pass through a model whose keys or states cannot lie in pages: it computes the whole sequences again every time.

transformers' `generate` does so for models without a cache. The pages hold token ids, so prefix cache, preemption and
the moves of accepted paths work as with keys and values.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.sequences import SequenceGroup, group_sequences

TOKEN_LAYER = 0  # layer of the pool with the token ids
TOKEN_DTYPE = torch.float32  # has every id below 2^24 exactly, and every store takes it
# Numbers in the KV of one token, in the dtype of the model: two of TOKEN_DTYPE in a dtype of 16 bits.
TOKEN_ELEMENTS = 4


@dataclass(frozen=True)
class RecomputedPass:
    """Forward pass over whole sequences, with the inputs that `generate` gives without a cache."""

    vocab_size: int
    # Whether one pass gives the rows of all prefixes. Otherwise every row is a pass over its prefix.
    is_causal: bool
    keeps_logits: bool  # whether the model takes `logits_to_keep`

    @property
    def recording_obstacle(self) -> str | None:
        """Reason why passes cannot be recorded as CUDA graphs."""
        return "the model computes whole sequences, whose lengths differ from pass to pass"

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own."""
        return "it computes the tokens of several requests again in one pass of its own layout"

    @property
    def image_obstacle(self) -> str | None:
        """Reason why requests cannot have images; None if they can."""
        return "it computes all tokens again in every pass"

    def prepare(self, model: Any) -> None:
        """Do nothing: the model keeps its own attention."""

    def run(
        self, model: Any, pool: KVPool, rows: ForwardBatch | PaddedRows, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the modules; see `ModulePass.run`. Sequences without rows of logits are not computed."""
        assert isinstance(rows, ForwardBatch), "only recordings have padded rows, and this pass is not recorded"
        if hidden_layers and not self.is_causal:
            raise ForedraftError(
                f"{type(model).__name__} predicts a token at a place that it adds after the text, so no hidden state "
                "belongs to a token; use a method that reads no hidden states, such as ngram or draft_model"
            )
        ids = rows.tokens[0].to(TOKEN_DTYPE)[:, None, None]  # [T, 1, 1]
        stored, _ = pool.write(TOKEN_LAYER, rows.write_slots, ids, ids, rows.num_slots)
        logits: dict[int, Tensor] = {}
        features: list[Tensor] = []
        for group in group_sequences(rows, is_padded=False):
            wanted = [row for row in rows.logit_row_list if row in group.columns]
            if not wanted and not hidden_layers:
                continue
            sequences = stored[:, 0, 0][group.slots].long()  # [b, L]
            columns = sorted({group.columns[row][1] for row in wanted} or {group.num_columns - 1})
            with capture_hidden_states(model, hidden_layers) as captured:
                output = self._compute_columns(model, group, sequences, columns)
            for row in wanted:
                b, column = group.columns[row]
                logits[row] = output[b, columns.index(column)]
            if hidden_layers:
                states = torch.cat([captured[layer] for layer in hidden_layers], -1)
                features.append(states[:, -group.num_columns :].flatten(0, 1))
        kept = [logits[row] for row in rows.logit_row_list]
        stacked = torch.stack(kept) if kept else torch.empty(0, self.vocab_size, dtype=model.dtype, device=rows.device)
        return stacked, torch.cat(features) if features else None

    def _compute_columns(self, model: Any, group: SequenceGroup, sequences: Tensor, columns: list[int]) -> Tensor:
        """Compute the logits [b, c, V] of c of the last columns of sequences [b, L]."""
        first = group.num_keys - group.num_columns
        return self.compute_ranks(model, sequences, [first + column for column in columns])

    def compute_ranks(self, model: Any, sequences: Tensor, ranks: Sequence[int]) -> Tensor:
        """Compute the logits [b, c, V] that follow the tokens of c ranks of sequences [b, L]."""
        if not self.is_causal:
            prefixes = (make_inputs(model, sequences[:, : rank + 1]) for rank in ranks)
            return torch.stack([model(**inputs).logits[:, -1] for inputs in prefixes], 1)
        inputs, kept = make_inputs(model, sequences), torch.tensor(ranks, device=sequences.device)
        if self.keeps_logits:
            inputs["logits_to_keep"] = kept
        logits: Tensor = model(**inputs).logits
        return logits if logits.shape[1] == len(ranks) else logits[:, kept]


def make_inputs(model: Any, sequences: Tensor) -> dict[str, Any]:
    """Make the inputs that `generate` gives a model for sequences [b, L] without a cache."""
    mask = torch.ones_like(sequences)
    options = {"attention_mask": mask, "use_cache": False, "is_first_iteration": True}
    inputs = dict(model.prepare_inputs_for_generation(sequences, **options))
    names = set(list_argument_names(model))
    return {name: value for name, value in inputs.items() if value is not None and name in names}


def list_argument_names(model: Any) -> Iterator[str]:
    """List the names of a model's arguments. A subclass may pass on its arguments without naming them."""
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            yield from inspect.signature(vars(kind)["forward"]).parameters
