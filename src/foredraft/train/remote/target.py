"""Target whose layers run on a server: the tables are here, and traces come by HTTP."""

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
from foredraft.train.fingerprint import fingerprint_target
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.wire import decode_traces

TRACES_PATH = "/v1/traces"


@dataclass
class RemoteTarget(HFModel):
    """A causal LM with the tables of its folder, whose layers run on a server."""

    client: TargetClient = field(kw_only=True)

    @classmethod
    def load(cls, name: str, dtype: str | torch.dtype, device: torch.device, client: TargetClient) -> "RemoteTarget":
        """Load the tables and check that the server has the same target.

        Args:
            name: built-in target, folder or hub id.
            dtype: dtype of the tables; "auto" = as stored.
            device: device of the trainer.
            client: client of the server.

        Raises:
            ForedraftError: the server has another target or sends no traces, or the tables cannot be loaded.
        """
        builtin = zoo.resolve_target(name)
        folder = name if builtin is None else str(zoo.find_target_folder(builtin))
        model = load_tables(folder, dtype, device)
        count = sum(parameter.numel() for parameter in model.parameters())
        target = cls(model, folder, KVPool(), 1, count, client=client)
        served, own = client.get_json(TRACES_PATH)["target"], fingerprint_target(target)
        if served != own:
            differing = next(key for key in own if served.get(key) != own[key])
            raise ForedraftError(
                f"{client.url} serves another target than {name}: its {differing} is {served.get(differing)}, here it "
                f"is {own[differing]}; give the --model that the server has"
            )
        return target

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Raise ForedraftError: the layers are not here."""
        raise ForedraftError(
            f"this method needs the layers of {self.name} here, and they run on {self.client.url}; leave --target-url "
            "out"
        )

    def fetch_traces(
        self, tokens: Tensor, hidden_layers: Sequence[int], top: int | None
    ) -> tuple[Tensor, TargetLogProbs]:
        """Fetch hidden states and distributions from the server.

        Args:
            tokens: [B, L] token ids.
            hidden_layers: layer boundaries of the states.
            top: likeliest tokens of each distribution; None = all.

        Returns:
            Hidden states [B, L, F] and distributions [B, L, k or V] after each token.
        """
        body = {"tokens": tokens.tolist(), "hidden_layers": list(hidden_layers), "top": top}
        features, probs = decode_traces(self.client.post(TRACES_PATH, body))
        ids = None if probs.token_ids is None else probs.token_ids.to(self.device)
        return features.to(self.device), TargetLogProbs(probs.logprobs.to(self.device), ids)
