"""Pass through a model whose attention is ours: all rows of a batch are packed into one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models import attention
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.image_modules import place_images
from foredraft.models.padded_rows import PaddedRows


class ModulePass(Protocol):
    """Way in which the modules of a transformers model compute a forward batch."""

    @property
    def recording_obstacle(self) -> str | None:
        """Reason why passes cannot be recorded as CUDA graphs; None if they can be."""

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own, after "because"; None if they can."""

    @property
    def image_obstacle(self) -> str | None:
        """Reason why requests cannot have images, after "because"; None if they can."""

    def prepare(self, model: Any) -> None:
        """Set the attention implementation with which `run` works."""

    def run(
        self, model: Any, pool: KVPool, rows: ForwardBatch | PaddedRows, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the modules.

        Args:
            model: transformers model.
            pool: KV pool of the model.
            rows: T packed rows, in a recording padded to a size.
            hidden_layers: layer boundaries to return. Default () = none.

        Returns:
            Logits [R, V], and hidden states [T, F] at the boundaries, or None without boundaries.
        """


@dataclass(frozen=True)
class PackedPass:
    """Pass with paged attention, which the model calls through transformers' attention interface."""

    @property
    def recording_obstacle(self) -> str | None:
        """None: all inputs are tensors of `rows`."""
        return None

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own; None if they can."""
        return None

    @property
    def image_obstacle(self) -> str | None:
        """Reason why requests cannot have images; None if they can."""
        return None

    def prepare(self, model: Any) -> None:
        """Set paged attention."""
        model.set_attn_implementation(attention.ATTENTION_NAME)

    def run(
        self, model: Any, pool: KVPool, rows: ForwardBatch | PaddedRows, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the modules; see `ModulePass.run`."""
        with place_images(model, rows.images), capture_hidden_states(model, hidden_layers) as captured:
            logits: Tensor = model(
                input_ids=rows.tokens,
                position_ids=rows.positions,
                use_cache=False,
                logits_to_keep=rows.logit_rows,
                forward_batch=rows,
                pool=pool,
            ).logits[0]
        features = torch.cat([captured[layer][0] for layer in hidden_layers], -1) if hidden_layers else None
        return logits, features
