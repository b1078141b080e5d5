"""What drafters on one state of the target share while they learn: which positions are asked, and a lean loss."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from foredraft.drafters.training import TargetLaw, Trace, draft_loss

KEPT_LOGITS = 1 << 26  # logits of one step that training keeps until it goes back; beyond, they are made twice

Rows = tuple[Tensor, Tensor]  # text and position of R states, [R] int64 each


def asked(trace: Trace, depth: int) -> Rows:
    """States that learn to guess the token at `depth` below their root, which is the token after them: those where the
    text from the root down to that token is one to learn, for nothing is ever drafted below a prompt."""
    length = max(trace.features.shape[1] - depth, 0)
    learnt = trace.mask[:, 1 : 1 + length]
    for step in range(1, depth + 1):
        learnt = learnt & trace.mask[:, 1 + step : 1 + step + length]
    text, position = learnt.nonzero(as_tuple=True)
    return text, position


def answers(trace: Trace, rows: Rows, depth: int) -> tuple[TargetLaw, Tensor]:
    """The target's law of the token at `depth` below the root, and that token, [R, ..] and [R].

    State i's root is token i + 1; its law stands at i, that of the token at depth d at i + d.
    """
    text, position = rows
    return trace.law.at((text, position + depth)), trace.tokens[text, position + depth + 1]


def mean_loss(name: str, logits_of: Callable[[Tensor], Tensor], states: Tensor, law: TargetLaw, tokens: Tensor,
              vocab_size: int) -> Tensor:  # fmt: skip
    """Scalar, over R states. Large logits are not kept for the way back but made again."""
    if not len(states):
        return states.sum().float()

    def loss(states: Tensor) -> Tensor:
        return draft_loss(name, logits_of(states), law, tokens).mean()

    if len(states) * vocab_size <= KEPT_LOGITS:
        return loss(states)
    return checkpointed(loss, states, use_reentrant=False)  # type: ignore[no-any-return]


def choice(law: TargetLaw) -> Tensor:
    """[R] the target's likeliest tokens."""
    best = law.logprobs.argmax(-1, keepdim=True)
    return (best if law.ids is None else law.ids.gather(-1, best))[..., 0]
