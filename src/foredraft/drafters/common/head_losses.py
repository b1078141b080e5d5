"""Training code for drafters on one target state: the positions to train on, and a loss that bounds memory."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from foredraft.drafters.losses import TargetLogProbs, Trace, compute_draft_loss

MAX_STORED_LOGITS = 1 << 26  # logits kept for the backward pass; more are computed again in it

RootRows = tuple[Tensor, Tensor]  # sequence and position of R states, [R] int64 each


def select_roots(trace: Trace, depth: int) -> RootRows:
    """Select the states that train on the token at `depth` below their root; state t has the root t + 1.

    All tokens from the root down to that token must be in the mask, since drafts never start inside a prompt.
    """
    length = max(trace.features.shape[1] - depth, 0)
    mask = trace.mask[:, 1 : 1 + length]
    for step in range(1, depth + 1):
        mask = mask & trace.mask[:, 1 + step : 1 + step + length]
    sequence, position = mask.nonzero(as_tuple=True)
    return sequence, position


def gather_targets(trace: Trace, rows: RootRows, depth: int) -> tuple[TargetLogProbs, Tensor]:
    """Return the target distribution [R, ..] of the token at `depth` below the root, and that token [R].

    The root of state i is token i + 1; the distribution of the token at depth d has the index i + d.
    """
    sequence, position = rows
    return trace.target_log_probs.select((sequence, position + depth)), trace.tokens[sequence, position + depth + 1]


def compute_mean_loss(
    name: str,
    logits_fn: Callable[[Tensor], Tensor],
    states: Tensor,
    target_log_probs: TargetLogProbs,
    tokens: Tensor,
    vocab_size: int,
) -> Tensor:
    """Compute the mean loss over R states; more than MAX_STORED_LOGITS logits are recomputed in the backward pass.

    Args:
        name: loss, one of `losses.LOSS_NAMES`.
        logits_fn: maps states to logits [R, V].
        states: R rows.
        target_log_probs: target distribution [R, ..].
        tokens: next tokens [R].
        vocab_size: V.
    """
    if not len(states):
        return states.sum().float()

    def loss(states: Tensor) -> Tensor:
        return compute_draft_loss(name, logits_fn(states), target_log_probs, tokens).mean()

    if len(states) * vocab_size <= MAX_STORED_LOGITS:
        return loss(states)
    return checkpointed(loss, states, use_reentrant=False)  # type: ignore[no-any-return]


def compute_head_loss(
    name: str, logits_fn: Callable[[Tensor], Tensor], trace: Trace, head: int, vocab_size: int
) -> Tensor:
    """Compute the mean loss of a head that reads the state before a root and predicts the token at depth `head` + 1.

    Args:
        name: loss, one of `losses.LOSS_NAMES`.
        logits_fn: maps states [R, H] to the head's logits [R, V].
        trace: sequences and target outputs.
        head: index of the head.
        vocab_size: V.
    """
    rows = select_roots(trace, head + 1)
    log_probs, tokens = gather_targets(trace, rows, head + 1)
    return compute_mean_loss(name, logits_fn, trace.features[rows], log_probs, tokens, vocab_size)
