"""Target whose layers run on a server: the tables are here, and traces come from the server."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft import zoo
from foredraft.checkpoints.target_tables import load_tables
from foredraft.drafters.losses import TargetLogProbs
from foredraft.errors import ForedraftError
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel
from foredraft.train.remote.server import TargetServer


@dataclass
class TableTarget(HFModel):
    """A causal LM with the tables of its folder and without layers."""

    @classmethod
    def load_tables(cls, name: str, dtype: str | torch.dtype, device: torch.device) -> "TableTarget":
        """Load the tables.

        Args:
            name: built-in target, folder or hub id.
            dtype: dtype of the tables; "auto" = as stored.
            device: device of the trainer.

        Raises:
            ForedraftError: the tables cannot be loaded.
        """
        builtin = zoo.resolve_target(name)
        folder = name if builtin is None else str(zoo.find_target_folder(builtin))
        model = load_tables(folder, dtype, device)
        count = sum(parameter.numel() for parameter in model.parameters())
        return cls(model, folder, KVPool(), 1, count)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Raise ForedraftError: the layers are not here."""
        raise ForedraftError(
            f"this method needs the layers of {self.name} here, and they run on a server; leave --target-url out"
        )


@dataclass
class RemoteTarget(TableTarget):
    """A causal LM with the tables of its folder, whose layers run on a server."""

    server: TargetServer = field(kw_only=True)

    @classmethod
    def load(cls, name: str, dtype: str | torch.dtype, device: torch.device, server: TargetServer) -> "RemoteTarget":
        """Load the tables and check that the server has the same target.

        Args:
            name: built-in target, folder or hub id.
            dtype: dtype of the tables; "auto" = as stored.
            device: device of the trainer.
            server: server that runs the target.

        Raises:
            ForedraftError: the server has another target or sends no traces, or the tables cannot be loaded.
        """
        tables = TableTarget.load_tables(name, dtype, device)
        server.check_target(tables, name)
        return cls(
            tables.model, tables.name, tables.pool, tables.kv_elements_per_token, tables.num_parameters,
            max_context=server.max_context, server=server,
        )  # fmt: skip

    def fetch_traces(
        self, tokens: Tensor, hidden_layers: Sequence[int], top: int | None
    ) -> tuple[Tensor, TargetLogProbs]:
        """Fetch hidden states and distributions from the server; arguments and result as in `TargetServer`."""
        return self.server.fetch_traces(self, tokens, hidden_layers, top)
