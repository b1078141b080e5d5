"""Training of an EAGLE-3 head."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import derive_block_shape, init_as_identity
from foredraft.drafters.common.training_time_test import MaskedPair, UnrolledStep, average_step_losses, unroll
from foredraft.drafters.eagle3.aux_layers import choose_default_layers, is_ascending
from foredraft.drafters.eagle3.checkpoint import make_layout
from foredraft.drafters.eagle3.network import Eagle3Network, load_network
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.drafters.losses import Losses, Trace, check_loss
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel

OUT_OF_VOCAB_LOG_PROB = -30.0  # log-probability, in the loss, of tokens outside the draft's vocabulary
NUM_DEFAULT_LAYERS = 3  # hidden layers to read by default
MIN_POSITIONS = 2048  # lower bound of a new head's maximum sequence length, in tokens


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        steps: depth of drafts on the network's own outputs (training-time test).
        decay: weight of step k is decay^k, in (0, 1].
        taps: layer boundaries of the target to read, ascending; None = 2, n/2, n - 3 of n layers, or up to three evenly
            spread ones for fewer than 7 layers.
        num_layers: decoder layers of the head.
        draft_vocab_size: number of tokens that can be drafted, the most frequent in the data; None = all.
        parallel: draft all tokens in one pass (P-EAGLE): a step reads a mask in place of a token and an output.
        mask_token_id: token of the masks; None = the last of the vocabulary. A token that never occurs is best.
    """

    loss: str = "kl"
    steps: int = 5
    decay: float = 0.8
    taps: tuple[int, ...] | None = None
    num_layers: int = 1
    draft_vocab_size: int | None = None
    parallel: bool = False
    mask_token_id: int | None = None

    @staticmethod
    def read_shape(network: Eagle3Network) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {
            "taps": shape.hidden_layers,
            "num_layers": shape.num_layers,
            "draft_vocab_size": shape.draft_vocab_size,
            "parallel": shape.mask_token_id is not None,
            "mask_token_id": shape.mask_token_id,
        }


@dataclass
class Eagle3Trainee:
    """EAGLE-3 head in training, on a frozen target."""

    config: TrainConfig
    network: Eagle3Network

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(self.network.shape.hidden_layers, prepare=self.prepare)

    def prepare(self, counts: Tensor) -> None:
        """Choose the draft's vocabulary: the most frequent tokens by `counts` [V] over the training data."""
        shape = self.network.shape
        if shape.draft_vocab_size == shape.vocab_size:
            return
        offsets: Tensor = self.network.get_buffer("d2t")
        ids = counts.topk(shape.draft_vocab_size).indices.sort().values.to(offsets.device)
        offsets.copy_(ids - torch.arange(len(ids), device=ids.device))
        _copy_head(self.network, ids)

    def compute_loss(self, trace: Trace) -> Losses:
        first = self.network.project_features(trace.features.to(self.network.norm.weight.dtype))
        mask = self._make_mask()
        steps = unroll(self.network, trace, first, self.config.steps, mask)
        return average_step_losses(steps, self._compute_step_losses, self.config.decay)

    def _make_mask(self) -> MaskedPair | None:
        if self.network.shape.mask_token_id is None:
            return None
        return MaskedPair(self.network.mask_token_id, self.network.project_mask())

    def _compute_step_losses(self, step: UnrolledStep) -> Tensor:
        """Return the losses [B, n] of one step, over the target's vocabulary."""
        ids = self.network.token_ids
        if ids is None:
            return step.compute_losses(self.config.loss)
        logits = step.logits.new_full((*step.logits.shape[:-1], self.network.shape.vocab_size), -torch.inf)
        log_q = step.logits.float().log_softmax(-1)
        logits = logits.float().index_copy(-1, ids, log_q).clamp_min(OUT_OF_VOCAB_LOG_PROB)
        return step.compute_losses(self.config.loss, logits)

    def to_checkpoint(self) -> CheckpointLayout:
        return make_layout(self.network.shape, self.network.state_dict())


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> Eagle3Trainee:
    """Make a head to train; a new one has the target's output matrix. See `Training`."""
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay must be above 0 and at most 1")
    if config.mask_token_id is not None and not config.parallel:
        raise ForedraftError("mask_token_id is the token of parallel drafts; set parallel=true too")
    if start is None:
        network = Eagle3Network(_build_shape(config, target), target)
        init_as_identity(network.fc, network.layers)
        _copy_head(network, torch.arange(network.shape.draft_vocab_size))
        if config.parallel:
            torch.nn.init.normal_(network.get_parameter("mask_hidden"))
    else:
        if isinstance(start.shape, Eagle3Shape) and start.shape.block.sliding_windows:
            raise ForedraftError(
                f"{start.folder} has sliding-window attention, which training does not support; train without --start"
            )
        network = load_network(start, target)
    return Eagle3Trainee(config, network.float().to(target.device))


def _build_shape(config: TrainConfig, target: HFModel) -> Eagle3Shape:
    n, size = target.num_layers, config.draft_vocab_size or target.vocab_size
    if n < 2:
        raise ForedraftError(
            f"{target.name} has {n} layer, and EAGLE-3 reads states between layers; train medusa for it"
        )
    layers = _choose_hidden_layers(n) if config.taps is None else tuple(config.taps)
    if sorted(set(layers)) != list(layers) or not layers or layers[0] < 1 or layers[-1] >= n:
        example = ",".join(map(str, _choose_hidden_layers(n)))
        raise ForedraftError(
            f"taps must be different boundaries between 1 and {n - 1} of {target.name}'s {n} layers, ascending "
            f"(--set taps={example}); got {layers}"
        )
    if not 1 <= size <= target.vocab_size:
        raise ForedraftError(f"draft_vocab_size must lie in 1..{target.vocab_size}, got {size}")
    block = replace(
        derive_block_shape(target), max_positions=max(MIN_POSITIONS, derive_block_shape(target).max_positions)
    )
    mask = _choose_mask_token(config, target) if config.parallel else None
    return Eagle3Shape(
        block, target.vocab_size, size, target.hidden_size, layers, config.num_layers, mask_token_id=mask
    )


def _choose_mask_token(config: TrainConfig, target: HFModel) -> int:
    mask = target.vocab_size - 1 if config.mask_token_id is None else config.mask_token_id
    if not 0 <= mask < target.vocab_size:
        raise ForedraftError(f"mask_token_id must lie in 0..{target.vocab_size - 1}, got {mask}")
    return mask


def _choose_hidden_layers(num_layers: int) -> tuple[int, ...]:
    """Return the authors' hidden layers, or evenly spread ones if the target has too few layers for them."""
    published = choose_default_layers(num_layers)
    if is_ascending(published) and published[-1] < num_layers:
        return published
    count, last = min(NUM_DEFAULT_LAYERS, num_layers - 1), num_layers - 1
    if count < 2:
        return (1,)
    return tuple(1 + round(i * (last - 1) / (count - 1)) for i in range(count))


@torch.no_grad()
def _copy_head(network: Eagle3Network, ids: Tensor) -> None:
    """Initialise the head's output matrix with the target's rows of these tokens."""
    weight = network.target[0].head_weight
    network.lm_head.weight.copy_(weight[ids.to(weight.device)])
