"""Pass through a model with recurrent layers, whose states the KV pool holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models import attention
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.image_modules import place_images
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.recurrent.native_mixer import NativeMixer
from foredraft.models.recurrent.state_cache import StateCache


@dataclass(frozen=True)
class StatePass:
    """Pass with paged attention and with states of recurrent layers: a ModulePass."""

    natives: Mapping[int, NativeMixer] = field(default_factory=dict)  # native code of recurrent layers, by layer

    @property
    def recording_obstacle(self) -> str | None:
        """Reason why passes are not recorded."""
        return "recurrent layers plan the states of every pass on the host"

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own; None if they can."""
        return "its recurrent layers read the rows of several requests in another order"

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
        assert pool.states is not None, "the model has recurrent layers, and its pool no states"
        assert isinstance(rows, ForwardBatch), "a pass with recurrent layers is not padded"
        cache = StateCache.start_pass(pool.states, rows, self.natives)
        with place_images(model, rows.images), capture_hidden_states(model, hidden_layers) as captured:
            logits: Tensor = model(
                input_ids=rows.tokens,
                position_ids=rows.positions,
                use_cache=False,
                cache=cache,
                attention_cache=cache,
                logits_to_keep=rows.logit_rows,
                forward_batch=rows,
                pool=pool,
            ).logits[0]
        features = torch.cat([captured[layer][0] for layer in hidden_layers], -1) if hidden_layers else None
        return logits, features
