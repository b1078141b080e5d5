"""Training of a DFlash head (2602.06036): blocks of masks at random positions of the target's sequences.

DSpark's authors train with 0.1 cross entropy + 0.9 L1 distance of the distributions: `loss=ce`, `l1_share=0.9`.
A confidence head learns the probability of acceptance, 1 - TV(p, q), by binary cross entropy beside it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import derive_block_shape
from foredraft.drafters.dflash.checkpoint import choose_default_layers, make_layout
from foredraft.drafters.dflash.markov import MARKOV_HEADS
from foredraft.drafters.dflash.network import BlockContext, DFlashNetwork, load_network
from foredraft.drafters.dflash.shape import DEFAULT_MARKOV, DFlashShape
from foredraft.drafters.losses import Losses, Trace, check_loss, compute_draft_loss, tv
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel

NUM_DEFAULT_LAYERS = 5  # hidden layers to read by default
MIN_POSITIONS = 2048  # lower bound of a new head's maximum sequence length, in tokens


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        l1_share: share of the L1 distance of the distributions in the loss, in [0, 1]; the rest is `loss`.
        block_size: rows of a block: the last committed token and the masks, of which each drafts a token.
        predicts_from_root: every row drafts the token after its position, the row of the last committed token too.
        markov_rank: rank of a Markov head, by which a row also depends on the draft token before; 0 = none.
        markov_type: vanilla, gated (by the state of the row) or rnn (reads all draft tokens before).
        has_confidence: learn to predict the acceptance of the rows too, for `min_confidence` of chains.
        anchors: blocks per sequence and step, at random positions.
        gamma: the loss of the j-th drafted token, from 0, has the weight exp(-j / gamma).
        taps: layer boundaries of the target to read, ascending; None = up to five, evenly spread.
        num_layers: decoder layers of the head.
        intermediate: width of the layers' transform; None = that of the target.
        mask_token_id: token whose embedding stands for a token to draft; None = the last of the vocabulary. A token
            that never occurs in texts is best.
    """

    loss: str = "ce"
    l1_share: float = 0.0
    block_size: int = 8
    anchors: int = 64
    gamma: float = 4.0
    taps: tuple[int, ...] | None = None
    num_layers: int = 2
    intermediate: int | None = None
    mask_token_id: int | None = None
    predicts_from_root: bool = False
    markov_rank: int = 0
    markov_type: str = DEFAULT_MARKOV
    has_confidence: bool = False

    @staticmethod
    def read_shape(network: DFlashNetwork) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {
            "block_size": shape.block_size,
            "taps": shape.hidden_layers,
            "num_layers": shape.num_layers,
            "intermediate": shape.block.intermediate,
            "mask_token_id": shape.mask_token_id,
            "predicts_from_root": shape.has_anchor_output,
            "markov_rank": shape.markov_rank,
            "markov_type": shape.markov_type,
            "has_confidence": shape.has_confidence,
        }


@dataclass(frozen=True)
class DFlashTrainee:
    """DFlash head in training, on a frozen target. Implements `Trainee`."""

    config: TrainConfig
    network: DFlashNetwork

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(self.network.shape.hidden_layers)

    def compute_loss(self, trace: Trace) -> Losses:
        """Return the weighted mean of the losses of all drafted tokens, and the mean loss at each depth."""
        shape, length = self.network.shape, trace.features.shape[1]
        roots = choose_roots(trace.mask, self.config.anchors)  # [B, A]
        positions = torch.arange(length, device=roots.device).expand(len(roots), -1)
        layers = self.network.compute_context(trace.features, positions)
        context = BlockContext(layers, positions, positions[:, None] < roots[..., None])
        states = self.network(trace.tokens.gather(1, roots), roots, context)[:, :, shape.first_row :]
        depths = torch.arange(1, shape.max_depth + 1, device=roots.device)
        rows = (roots[..., None] + depths).clamp_max(length)  # [B, A, D] index of each drafted token
        is_learnt = _select_drafted(trace.mask, roots, rows, length)
        before = trace.tokens[:, None].expand(-1, rows.shape[1], -1).gather(2, rows - 1)  # [B, A, D]
        sequence, _, depth = is_learnt.nonzero(as_tuple=True)
        token = rows[is_learnt]
        logits = self._compute_logits(states, before, is_learnt)
        probs = trace.target_log_probs.select((sequence, token - 1))
        share, tokens = self.config.l1_share, trace.tokens[sequence, token]
        losses = (1 - share) * compute_draft_loss(self.config.loss, logits, probs, tokens)
        if share:
            losses = losses + share * 2 * compute_draft_loss("tv", logits, probs, tokens)
        if self.network.confidence_head is not None:
            odds = self.network.confidence_head(states[is_learnt], self.network.markov_head, before[is_learnt])
            accepted = 1 - tv(*probs.align_outcomes(logits.detach()))
            losses = losses + F.binary_cross_entropy_with_logits(odds.float(), accepted, reduction="none")
        return _average(losses, depth, self.config.gamma, shape.max_depth)

    def _compute_logits(self, states: Tensor, before: Tensor, is_learnt: Tensor) -> Tensor:
        """Compute the logits [R, V] of the rows to learn, from the states and the true tokens before all rows."""
        logits, markov = self.network.compute_logits(states[is_learnt]), self.network.markov_head
        return logits if markov is None else logits + markov(markov.unroll(before, states)[is_learnt])

    def to_checkpoint(self) -> CheckpointLayout:
        """Return the authors' layout."""
        return make_layout(self.network.shape, self.network.state_dict())


def choose_roots(mask: Tensor, count: int) -> Tensor:
    """Choose random roots [B, A] of blocks in sequences with a mask [B, L + 1] of the tokens to learn.

    A root and the token after it are in the mask. A sequence with fewer roots gives other positions too; their tokens
    are not learnt (`_select_drafted`).
    """
    is_root = mask[:, 1:-1] & mask[:, 2:]
    order = torch.rand(is_root.shape, device=mask.device).masked_fill(~is_root, -1.0)
    return order.topk(min(count, order.shape[1]), -1).indices + 1


def _select_drafted(mask: Tensor, roots: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return [B, A, D]: tokens of a block that are learnt, with all tokens from its root on."""
    lookup = mask[:, None].expand(-1, roots.shape[1], -1)
    is_inside = roots[..., None] + torch.arange(1, rows.shape[-1] + 1, device=rows.device) <= length
    learnt = lookup.gather(2, rows) & is_inside & lookup.gather(2, roots[..., None])
    return learnt.long().cumprod(-1).bool()


def _average(losses: Tensor, depth: Tensor, gamma: float, max_depth: int) -> Losses:
    """Average losses [R] of tokens at depths [R], counted from 0."""
    weights = torch.exp(-depth / gamma)
    total = (losses * weights).sum() / weights.sum().clamp_min(1e-9)
    counts = torch.bincount(depth, minlength=max_depth)
    sums = torch.zeros(max_depth, device=losses.device).index_add_(0, depth, losses.detach().float())
    means = (sums / counts.clamp_min(1)).tolist()
    return Losses(total, {f"loss_{k + 1}": mean for k, mean in enumerate(means)})


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> DFlashTrainee:
    """Make a head to train. See `Training`."""
    _check_heads(config)
    sizes = config.anchors, config.num_layers, config.gamma, 1 if config.intermediate is None else config.intermediate
    if config.block_size < 2 or min(sizes) <= 0:
        raise ForedraftError(
            "block_size must be at least 2; anchors, num_layers, gamma and intermediate must be positive"
        )
    if start is None:
        network = DFlashNetwork(_build_shape(config, target), target)
        _init(network)
    else:
        network = load_network(start, target)
    return DFlashTrainee(config, network.float().to(target.device))


def _check_heads(config: TrainConfig) -> None:
    check_loss(config.loss)
    if not 0 <= config.l1_share <= 1:
        raise ForedraftError(f"l1_share must lie in 0..1, got {config.l1_share}")
    if config.markov_rank < 0 or config.markov_type not in MARKOV_HEADS:
        raise ForedraftError(f"markov_rank must not be negative, and markov_type one of {', '.join(MARKOV_HEADS)}")
    if not config.markov_rank and config.markov_type != DEFAULT_MARKOV:
        raise ForedraftError(f"markov_type={config.markov_type} needs a Markov head; set markov_rank=256 too")


@torch.no_grad()
def _init(network: DFlashNetwork) -> None:
    """Initialise a new head: its context is the last of the states, normed, and its Markov head adds nothing."""
    weight = network.fc.weight
    weight.zero_()
    weight[:, -len(weight) :] = torch.eye(len(weight))
    if network.markov_head is not None:
        network.markov_head.markov_w2.weight.zero_()


def _build_shape(config: TrainConfig, target: HFModel) -> DFlashShape:
    n, mask = target.num_layers, target.vocab_size - 1 if config.mask_token_id is None else config.mask_token_id
    if not 0 <= mask < target.vocab_size:
        raise ForedraftError(f"mask_token_id must lie in 0..{target.vocab_size - 1}, got {mask}")
    layers = _spread_layers(n) if config.taps is None else tuple(config.taps)
    if sorted(set(layers)) != list(layers) or not layers or layers[0] < 1 or layers[-1] > n:
        raise ForedraftError(
            f"taps must be different boundaries between 1 and {n} of {target.name}'s {n} layers, ascending "
            f"(--set taps={','.join(map(str, _spread_layers(n)))}); got {layers}"
        )
    block = derive_block_shape(target)
    block = replace(
        block,
        intermediate=config.intermediate or block.intermediate,
        max_positions=max(MIN_POSITIONS, block.max_positions),
        has_qk_norm=True,
    )
    return DFlashShape(
        block,
        target.vocab_size,
        layers,
        config.num_layers,
        config.block_size,
        mask,
        has_anchor_output=config.predicts_from_root,
        markov_rank=config.markov_rank,
        markov_type=config.markov_type,
        has_confidence=config.has_confidence,
        confidence_reads_token=config.has_confidence and config.markov_rank > 0,
    )


def _spread_layers(num_layers: int) -> tuple[int, ...]:
    """Return the authors' layers, or all boundaries of a target with few layers."""
    published = choose_default_layers(num_layers, NUM_DEFAULT_LAYERS)
    return published if len({*published}) == NUM_DEFAULT_LAYERS else tuple(range(1, num_layers + 1))
