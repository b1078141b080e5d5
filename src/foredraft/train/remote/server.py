"""Interface of a server that runs the target."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from foredraft.drafters.losses import TargetLogProbs
from foredraft.models.hf import HFModel
from foredraft.outputs import Completion
from foredraft.sampling.params import Sampling


class TargetServer(Protocol):
    """Server that runs the target: traces and completions."""

    @property
    def max_context(self) -> int | None:
        """Longest row of traces in tokens; None = the model's own limit."""

    def check_target(self, target: HFModel, name: str) -> None:
        """Check that the server has the same target.

        Args:
            target: target of the trainer, which has its tables.
            name: name of this target in errors.

        Raises:
            ForedraftError: the server has another target, or sends no traces.
        """

    def fetch_traces(
        self, target: HFModel, tokens: Tensor, hidden_layers: Sequence[int], top: int | None
    ) -> tuple[Tensor, TargetLogProbs]:
        """Fetch hidden states and distributions.

        Args:
            target: target of the trainer, which has its tables.
            tokens: [B, L] token ids.
            hidden_layers: layer boundaries of the states, numbered as in `HFModel.forward`.
            top: likeliest tokens of each distribution; None = all.

        Returns:
            Hidden states [B, L, F] and distributions [B, L, k or V] after each token, on the target's device.

        Raises:
            ForedraftError: the server does not send them.
        """

    def complete(self, ids: list[int], sampling: Sampling) -> Completion:
        """Generate a completion of a prompt.

        Args:
            ids: token ids of the prompt.
            sampling: temperature, seed and max_tokens are used.
        """
