"""Training of Medusa's heads: on a frozen target (Medusa-1) or together with it (Medusa-2); 2401.10774, section 2.2."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.head_losses import compute_mean_loss, gather_targets, select_argmax, select_roots
from foredraft.drafters.losses import Losses, Trace, check_loss
from foredraft.drafters.medusa.checkpoint import MedusaShape, make_layout
from foredraft.drafters.medusa.network import NUM_RANKS, MedusaHeads
from foredraft.drafters.trainee import JointTraining, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        heads: number of heads.
        layers: residual blocks per head.
        own_head: whether every head has its own output matrix, initialised with the target's. Without, all use the
            target's: faster, with a tenth of the memory.
        decay: weight of head h is decay^h, in (0, 1].
        backbone: learning rate of the target as a share of the heads' (Medusa-2); None = frozen target (Medusa-1).
    """

    loss: str = "kl"
    heads: int = 4
    layers: int = 1
    own_head: bool = True
    decay: float = 0.8
    backbone: float | None = None

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
        config = self.config
        joint = None if config.backbone is None else JointTraining(config.backbone, config.loss)
        return TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,), finish=self.finish, joint=joint)

    def compute_loss(self, trace: Trace) -> Losses:
        total, weight, components = trace.features.new_zeros(()).float(), 0.0, {}
        for head in range(len(self.network)):
            rows = select_roots(trace, head + 1)
            log_probs, tokens = gather_targets(trace, rows, head + 1)
            logits_fn, states = partial(self.compute_logits, head), trace.features[rows]
            loss = compute_mean_loss(
                self.config.loss, logits_fn, states, log_probs, tokens, self.network.shape.vocab_size
            )
            total, weight = total + self.config.decay**head * loss, weight + self.config.decay**head
            components[f"loss_{head + 1}"] = float(loss.detach())
        return Losses(total / weight, components)

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
                hits[head, : best.shape[1]] += (best == select_argmax(log_probs)[:, None]).sum(0).cpu()
                counts[head] += len(best)
        rates = (hits / counts.clamp_min(1)).tolist()
        self.accuracies = tuple(tuple(round(rate, 4) for rate in row) for row in rates)

    def compute_logits(self, head: int, states: Tensor) -> Tensor:
        """Compute logits [R, V] of one head from states [R, H]."""
        x = self.network(states.to(self._dtype), head)
        if self.network.shape.has_own_head:
            return x  # type: ignore[no-any-return]
        return self.target.compute_logits(x.to(self.target.model.dtype))

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and config.json in FasterDecoding's layout, with the accuracies as an extra field."""
        layout = make_layout(replace(self.network.shape, accuracies=self.accuracies), self.network.state_dict())
        return layout.tensors, layout.config | {"base_model_name_or_path": self.target.name}

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> MedusaTrainee:
    """Make heads to train, in float32.

    Args:
        config: training settings.
        target: target; frozen unless `config.backbone` is set.
        start: checkpoint to continue from; None = new heads that predict what the target's output matrix would.

    Raises:
        ForedraftError: for invalid settings, or a checkpoint of another method.
    """
    check_loss(config.loss)
    if not 0 < config.decay <= 1:
        raise ForedraftError(f"decay must be above 0 and at most 1, got {config.decay}")
    if start is not None:
        if not isinstance(start.shape, MedusaShape):
            raise ForedraftError(f"{start.folder} holds no Medusa heads but {start.format}; it cannot be trained on")
        network = MedusaHeads(start.shape).float()
        network.load_state_dict(start.tensors)
        return MedusaTrainee(network.to(target.device), target, config)
    if config.heads < 1 or config.layers < 1:
        raise ForedraftError(f"heads and layers must be positive, got {config.heads} and {config.layers}")
    if config.backbone is not None and not config.own_head:
        raise ForedraftError(
            "backbone trains the target, which changes the output matrix that the heads share; use own_head"
        )
    shape = MedusaShape(target.hidden_size, target.vocab_size, config.heads, config.layers, config.own_head)
    network = MedusaHeads(shape).float()
    weight = target.head_weight.float()
    scaling = getattr(target.model.config.get_text_config(), "logits_scaling", None) or 1.0
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".linear." in name:
                parameter.zero_()
            else:
                parameter.copy_(weight / scaling)
    return MedusaTrainee(network.to(target.device), target, config)
