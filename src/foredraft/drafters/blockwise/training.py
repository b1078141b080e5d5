"""Training of blockwise heads on a frozen target (1811.03115, section 6)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.blockwise.checkpoint import BlockwiseShape, make_layout
from foredraft.drafters.blockwise.network import BlockwiseHeads
from foredraft.drafters.common.head_losses import compute_mean_loss, gather_targets, select_roots
from foredraft.drafters.losses import Losses, Trace, check_loss
from foredraft.drafters.trainee import TraineeSpec
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


class BlockwiseTrainee:
    """Blockwise heads in training. Head h at position i predicts token i + 2 + h."""

    spec: TraineeSpec = TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,))

    def __init__(self, network: BlockwiseHeads, target: HFModel, config: TrainConfig) -> None:
        self.network = network
        self.target = target
        self.config = config

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
        rows = select_roots(trace, head + 1)
        log_probs, tokens = gather_targets(trace, rows, head + 1)
        logits_fn, states = partial(self.compute_logits, head), trace.features[rows]
        return compute_mean_loss(self.config.loss, logits_fn, states, log_probs, tokens, self.network.shape.vocab_size)

    def compute_logits(self, head: int, states: Tensor) -> Tensor:
        """Compute logits [R, V] of one head from states [R, H]."""
        x = self.network(states.to(self.network.hidden.weight.dtype), head)
        return self.target.compute_logits(x.to(self.target.model.dtype))

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and config.json in the layout of `checkpoint.py`."""
        layout = make_layout(self.network.shape, self.network.state_dict())
        return layout.tensors, layout.config | {"base_model_name_or_path": self.target.name}


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> BlockwiseTrainee:
    """Make heads to train, in float32.

    Args:
        config: training settings.
        target: frozen target.
        start: checkpoint to continue from; None = new heads that predict what the target's output matrix would.

    Raises:
        ForedraftError: for invalid settings, or a checkpoint of another method.
    """
    check_loss(config.loss)
    if config.heads_per_step not in HEADS_PER_STEP:
        raise ForedraftError(f"heads_per_step must be {' or '.join(HEADS_PER_STEP)}, got {config.heads_per_step!r}")
    if not 0 < config.decay <= 1:
        raise ForedraftError(f"decay must be above 0 and at most 1, got {config.decay}")
    if start is not None:
        if not isinstance(start.shape, BlockwiseShape):
            raise ForedraftError(f"{start.folder} holds no blockwise heads but {start.format}; it cannot be trained on")
        network = BlockwiseHeads(start.shape).float()
        network.load_state_dict(start.tensors)
        return BlockwiseTrainee(network.to(target.device), target, config)
    inner = target.hidden_size if config.inner is None else config.inner
    if config.heads < 1 or inner < 1:
        raise ForedraftError(f"heads and inner must be positive, got {config.heads} and {inner}")
    shape = BlockwiseShape(target.hidden_size, target.vocab_size, config.heads, config.heads * inner)
    network = BlockwiseHeads(shape).float()
    nn.init.zeros_(network.output.weight)
    nn.init.zeros_(network.output.bias)
    return BlockwiseTrainee(network.to(target.device), target, config)
