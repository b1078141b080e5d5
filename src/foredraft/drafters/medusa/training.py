"""Training of Medusa's heads: on a frozen target (Medusa-1) or together with it (Medusa-2); 2401.10774, section 2.2."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.head_losses import compute_head_loss, gather_targets, select_roots
from foredraft.drafters.common.static_tree import NUM_RANKS
from foredraft.drafters.common.target_access import scale_output_matrix
from foredraft.drafters.joint_training import JointSettings
from foredraft.drafters.losses import Losses, Trace, average_losses, check_decay, check_loss
from foredraft.drafters.medusa.checkpoint import MedusaShape, make_layout
from foredraft.drafters.medusa.network import MedusaHeads
from foredraft.drafters.trainee import NOT_TRAINABLE, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel


@dataclass(frozen=True)
class TrainConfig(JointSettings):
    """Training settings, besides those of `JointSettings`.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        heads: number of heads.
        layers: residual blocks per head.
        own_head: whether every head has its own output matrix, initialised with the target's. Without, all use the
            target's: faster, with a tenth of the memory.
        decay: weight of head h is decay^h, in (0, 1].
    """

    loss: str = "kl"
    heads: int = 4
    layers: int = 1
    own_head: bool = True
    decay: float = 0.8

    @staticmethod
    def read_shape(network: MedusaHeads) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {"heads": shape.num_heads, "layers": shape.num_layers, "own_head": shape.has_own_head}


class MedusaTrainee:
    """Medusa heads in training. Head h at position i predicts token i + 2 + h."""

    def __init__(self, network: MedusaHeads, target: HFModel, config: TrainConfig) -> None:
        self.network = network
        self.target = target
        self.config = config
        self.accuracies = network.shape.accuracies

    @property
    def spec(self) -> TraineeSpec:
        joint = self.config.make_joint_training(self.config.loss)
        return TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,), finish=self.finish, joint=joint)

    def compute_loss(self, trace: Trace) -> Losses:
        name, vocab_size = self.config.loss, self.network.shape.vocab_size
        losses = (
            compute_head_loss(name, partial(self.compute_logits, head), trace, head, vocab_size)
            for head in range(len(self.network))
        )
        return average_losses(losses, self.config.decay)

    @torch.no_grad()
    def finish(self, traces: Iterable[Trace]) -> None:
        """Measure how often each rank of each head is the target's argmax. Trees are built from these accuracies."""
        hits = torch.zeros(len(self.network), NUM_RANKS, dtype=torch.int64)
        counts = torch.zeros(len(self.network), 1, dtype=torch.int64)
        for trace in traces:
            for head in range(len(self.network)):
                rows = select_roots(trace, head + 1)
                log_probs, _ = gather_targets(trace, rows, head + 1)
                logits = self.compute_logits(head, trace.features[rows])
                best = logits.topk(min(NUM_RANKS, logits.shape[-1]), -1).indices
                hits[head, : best.shape[1]] += (best == log_probs.find_argmax()[:, None]).sum(0).cpu()
                counts[head] += len(best)
        rates = (hits / counts.clamp_min(1)).tolist()
        self.accuracies = tuple(tuple(round(rate, 4) for rate in row) for row in rates)

    def compute_logits(self, head: int, states: Tensor) -> Tensor:
        """Compute logits [R, V] of one head from states [R, H]."""
        x = self.network(states.to(self._dtype), head)
        if self.network.shape.has_own_head:
            return x  # type: ignore[no-any-return]
        return self.target.compute_logits(x.to(self.target.model.dtype))

    def to_checkpoint(self) -> CheckpointLayout:
        """Return the layout of FasterDecoding, with the accuracies as an extra field."""
        return make_layout(replace(self.network.shape, accuracies=self.accuracies), self.network.state_dict())

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> MedusaTrainee:
    """Make heads to train; new ones predict what the target's output matrix would. See `Training`."""
    check_loss(config.loss)
    check_decay(config.decay)
    if start is None:
        network = MedusaHeads(_build_shape(config, target))
        _init_from_target(network, target)
    else:
        network = MedusaHeads(start.require_shape(MedusaShape, "Medusa heads", NOT_TRAINABLE))
        network.load_state_dict(start.tensors)
    if config.backbone is not None and config.lora_rank is None and not network.shape.has_own_head:
        raise ForedraftError(
            "backbone trains the target, which changes the output matrix that the heads share; use own_head, or "
            "lora_rank, which leaves that matrix as it is"
        )
    return MedusaTrainee(network.float().to(target.device), target, config)


def _build_shape(config: TrainConfig, target: HFModel) -> MedusaShape:
    if config.heads < 1 or config.layers < 1:
        raise ForedraftError(f"heads and layers must be positive, got {config.heads} and {config.layers}")
    return MedusaShape(target.hidden_size, target.vocab_size, config.heads, config.layers, config.own_head)


@torch.no_grad()
def _init_from_target(network: MedusaHeads, target: HFModel) -> None:
    weight = scale_output_matrix(target)
    for name, parameter in network.named_parameters():
        if ".linear." in name:
            parameter.zero_()
        else:
            parameter.copy_(weight)
