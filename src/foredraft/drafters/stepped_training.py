"""The loss of networks that draft step by step: every state of a text is the root of a draft whose tokens are the
text's own, so that all positions learn at once."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from foredraft.drafters.newest_training import Rows, answers, asked, mean_loss
from foredraft.drafters.training import Losses, Trace


class SteppedNetwork(Protocol):
    """The network as it is trained, `Steps` as it drafts."""

    def begin(self, hidden: Tensor) -> Tensor: ...

    @property
    def __call__(self) -> Callable[[int, Tensor, Tensor], Tensor]:
        """(step, states [R, ..], tokens [R]) -> the states after those tokens, [R, ..]."""

    def logits(self, step: int, states: Tensor) -> Tensor:
        """[R, ..] -> [R, V] of the token after those that made the states."""


def stepped_loss(
    network: SteppedNetwork, trace: Trace, hidden: Tensor, name: str, steps: int, decay: float, vocab_size: int
) -> Losses:
    """Step i from hidden[t] [B, L, H] reads token t + 1 + i, is asked for token t + 2 + i, and counts decay^i."""
    total, weight, parts = hidden.new_zeros(()).float(), 0.0, {}
    rows = asked(trace, 1)
    states = network.begin(hidden[rows])
    for step in range(steps):
        rows, states = _deeper(trace, rows, states, step + 1)
        states = network(step, states, trace.tokens[rows[0], rows[1] + 1 + step])
        law, tokens = answers(trace, rows, step + 1)
        loss = mean_loss(name, partial(network.logits, step), states, law, tokens, vocab_size)
        total, weight = total + decay**step * loss, weight + decay**step
        parts[f"loss_{step + 1}"] = float(loss.detach())
    return Losses(total / weight, parts)


def _deeper(trace: Trace, rows: Rows, states: Tensor, depth: int) -> tuple[Rows, Tensor]:
    """Those of some drafts whose text is to be learnt down to `depth` below the root."""
    text, position = rows
    end = position + depth + 1
    is_inside = end < trace.mask.shape[1]
    kept = is_inside & trace.mask[text, end.clamp_max(trace.mask.shape[1] - 1)]
    return (text[kept], position[kept]), states[kept]
