"""Training loss of networks that draft step by step (MLP speculator, Hydra).

Every target state of a sequence starts a draft whose tokens are the sequence's own, so all positions train at once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from torch import Tensor

from foredraft.drafters.common.head_losses import RootRows, compute_mean_loss, gather_targets, select_roots
from foredraft.drafters.losses import Losses, Trace, average_losses


class TrainableStepNetwork(Protocol):
    """Network in training. A `StepRunner` is its form for drafting."""

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [R, H] to the states that the first step reads."""

    @property
    def __call__(self) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Function (step, states [R, ..], tokens [R]) -> states after those tokens [R, ..]."""

    def compute_logits(self, step: int, states: Tensor) -> Tensor:
        """Compute logits [R, V] of the next token from states [R, ..]."""


def compute_step_losses(
    network: TrainableStepNetwork, trace: Trace, hidden: Tensor, name: str, steps: int, decay: float, vocab_size: int
) -> Losses:
    """Compute the mean loss of all steps. Step i from state t reads token t + 1 + i and predicts token t + 2 + i.

    Args:
        network: network in training.
        trace: sequences and target outputs.
        hidden: states [B, L, H] that drafts start from.
        name: loss, one of `losses.LOSS_NAMES`.
        steps: number of steps.
        decay: step i has the weight decay^i.
        vocab_size: V, to bound the memory for logits.
    """
    return average_losses(_compute_losses(network, trace, hidden, name, steps, vocab_size), decay)


def _compute_losses(
    network: TrainableStepNetwork, trace: Trace, hidden: Tensor, name: str, steps: int, vocab_size: int
) -> Iterator[Tensor]:
    rows = select_roots(trace, 1)
    states = network.begin(hidden[rows])
    for step in range(steps):
        rows, states = _select_deeper(trace, rows, states, step + 1)
        states = network(step, states, trace.tokens[rows[0], rows[1] + 1 + step])
        log_probs, tokens = gather_targets(trace, rows, step + 1)
        yield compute_mean_loss(name, partial(network.compute_logits, step), states, log_probs, tokens, vocab_size)


def _select_deeper(trace: Trace, rows: RootRows, states: Tensor, depth: int) -> tuple[RootRows, Tensor]:
    """Select the drafts whose sequence is trained on down to `depth` below the root."""
    sequence, position = rows
    end = position + depth + 1
    is_inside = end < trace.mask.shape[1]
    selected = is_inside & trace.mask[sequence, end.clamp_max(trace.mask.shape[1] - 1)]
    return (sequence[selected], position[selected]), states[selected]
