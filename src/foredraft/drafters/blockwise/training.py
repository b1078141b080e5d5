"""Training of blockwise heads on a frozen target (1811.03115, section 6)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.blockwise.checkpoint import BlockwiseShape, make_layout
from foredraft.drafters.blockwise.network import BlockwiseHeads
from foredraft.drafters.common.head_losses import compute_head_loss
from foredraft.drafters.losses import Losses, Trace, check_decay, check_loss
from foredraft.drafters.trainee import NOT_TRAINABLE, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel

HEADS_PER_STEP = ("all", "one")


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        heads: number of heads beside the target's own.
        inner: width of the hidden layer per head; None = the target's hidden size.
        heads_per_step: "all" = mean loss of all heads; "one" = loss of one random head per step, which saves memory and
            has the same expectation, as in the paper.
        decay: weight of head h is decay^h, in (0, 1]; 1 = the paper's mean.
    """

    loss: str = "kl"
    heads: int = 4
    inner: int | None = None
    heads_per_step: str = "all"
    decay: float = 1.0

    @staticmethod
    def read_shape(network: BlockwiseHeads) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {"heads": shape.num_heads, "inner": shape.inner // shape.num_heads}


@dataclass(frozen=True)
class BlockwiseTrainee:
    """Blockwise heads in training. Head h at position i predicts token i + 2 + h."""

    network: BlockwiseHeads
    target: HFModel
    config: TrainConfig
    spec = TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,))

    def compute_loss(self, trace: Trace) -> Losses:
        weights = [self.config.decay**head for head in range(self.network.shape.num_heads)]
        if self.config.heads_per_step == "one" and self.network.training:
            head = int(torch.multinomial(torch.tensor(weights), 1))
            # no components: the processes of a run choose different heads
            return Losses(self._compute_head_loss(trace, head), {})
        losses = [self._compute_head_loss(trace, head) for head in range(len(weights))]
        total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return Losses(total, {f"loss_{head + 1}": float(loss.detach()) for head, loss in enumerate(losses)})

    def _compute_head_loss(self, trace: Trace, head: int) -> Tensor:
        logits_fn = partial(self.compute_logits, head)
        return compute_head_loss(self.config.loss, logits_fn, trace, head, self.network.shape.vocab_size)

    def compute_logits(self, head: int, states: Tensor) -> Tensor:
        """Compute logits [R, V] of one head from states [R, H]."""
        x = self.network(states.to(self.network.hidden.weight.dtype), head)
        return self.target.compute_logits(x.to(self.target.model.dtype))

    def to_checkpoint(self) -> CheckpointLayout:
        return make_layout(self.network.shape, self.network.state_dict())


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> BlockwiseTrainee:
    """Make heads to train; new ones predict what the target's output matrix would. See `Training`."""
    check_loss(config.loss)
    if config.heads_per_step not in HEADS_PER_STEP:
        raise ForedraftError(f"heads_per_step must be {' or '.join(HEADS_PER_STEP)}, got {config.heads_per_step!r}")
    check_decay(config.decay)
    if start is None:
        network = BlockwiseHeads(_build_shape(config, target))
        nn.init.zeros_(network.output.weight)
        nn.init.zeros_(network.output.bias)
    else:
        network = BlockwiseHeads(start.require_shape(BlockwiseShape, "blockwise heads", NOT_TRAINABLE))
        network.load_state_dict(start.tensors)
    return BlockwiseTrainee(network.float().to(target.device), target, config)


def _build_shape(config: TrainConfig, target: HFModel) -> BlockwiseShape:
    inner = target.hidden_size if config.inner is None else config.inner
    if config.heads < 1 or inner < 1:
        raise ForedraftError(f"heads and inner must be positive, got {config.heads} and {inner}")
    return BlockwiseShape(target.hidden_size, target.vocab_size, config.heads, config.heads * inner)
