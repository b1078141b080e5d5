"""Tracer of a target that runs on a server."""

from collections.abc import Sequence

from torch import Tensor

from foredraft.drafters.losses import TargetLogProbs
from foredraft.models.hf import HFModel
from foredraft.source import EncoderSource
from foredraft.train.remote.target import RemoteTarget
from foredraft.train.trace import Tracer


class RemoteTracer(Tracer):
    """Tracer that fetches what `Tracer` computes.

    Args:
        target: target on a server.
        hidden_layers: layer boundaries whose states are recorded.
        top: likeliest tokens to store per position; None = the whole distribution.
    """

    target: RemoteTarget

    def run_target(self, tokens: Tensor, sources: tuple[EncoderSource, ...] = ()) -> tuple[Tensor, TargetLogProbs]:
        """Fetch what the server's target computes for rows of tokens; arguments and result as in `Tracer`."""
        return self.target.fetch_traces(tokens, self.hidden_layers, self.top)

    def compute_states(self, tokens: Tensor, layers: Sequence[int], sources: tuple[EncoderSource, ...] = ()) -> Tensor:
        """Fetch states of the server's target; arguments and result as in `Tracer`."""
        return self.target.fetch_traces(tokens, layers, 1)[0]


def make_tracer(target: HFModel, hidden_layers: Sequence[int] = (), top: int | None = None) -> Tracer:
    """Make the tracer of a target, wherever it runs; arguments as of `Tracer`."""
    kind = RemoteTracer if isinstance(target, RemoteTarget) else Tracer
    return kind(target, hidden_layers, top)
