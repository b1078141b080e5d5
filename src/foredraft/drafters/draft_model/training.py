"""Distillation of a whole small model as draft model (DistillSpec, 2310.08461), on every token of a sequence."""

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.drafters.draft_model.architecture import DraftSize, read_size, shrink_config
from foredraft.drafters.draft_model.boosting import EarlierDrafts
from foredraft.drafters.draft_model.compatibility import check_same_kind, check_same_vocabulary
from foredraft.drafters.draft_model.masked_rows import choose_rows, compute_masked_logits
from foredraft.drafters.draft_model.parallel_training import average_by_depth, prepare_parallel, read_mask_token
from foredraft.drafters.draft_model.teacher_forcing import compute_trace_logits
from foredraft.drafters.losses import Losses, Trace, average_over_mask, check_loss, compute_draft_loss
from foredraft.drafters.trainee import OnPolicyTraining, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.loading import load_model, load_tokenizer

PARALLEL_SETTINGS = ("mask_token_id", "parallel_tokens", "retention", "min_retention")


@dataclass(frozen=True)
class TrainConfig:
    """Training settings. The draft model has the target's architecture, unless `draft_config` describes another.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        layers: number of decoder layers; None = a sixth of the target's.
        hidden: hidden size, a multiple of the head size; None = half of the target's.
        encoder_layers: number of encoder layers of an encoder-decoder model; None = half of the target's.
        draft_config: path of a config.json; replaces the three sizes.
        on_policy: share of the steps, 0 to 1, on sequences that the draft model writes (GKD, 2306.13649).
        boost: folders of earlier draft models. The new one learns what they miss, to draft beside them (SpecInfer).
        boost_weight: weight, 0 to 1, of positions at which one of them predicts the target's likeliest token.
        parallel: draft all tokens in one pass (PARD): a row reads a mask in place of each drafted token before it.
        mask_token_id: token of the masks; None = the last of the vocabulary. A token that never occurs is best.
        parallel_tokens: longest draft to learn, in tokens.
        retention: share of the masks that is kept, in (0, 1]: retention^d of those of depth d.
        min_retention: lower bound of that share, 0 to 1.
    """

    loss: str = "kl"
    layers: int | None = None
    hidden: int | None = None
    encoder_layers: int | None = None
    draft_config: str | None = None
    on_policy: float = 0.0
    boost: tuple[str, ...] = ()
    boost_weight: float = 0.25
    parallel: bool = False
    mask_token_id: int | None = None
    parallel_tokens: int = 8
    retention: float = 0.7
    min_retention: float = 0.2

    @staticmethod
    def read_shape(model: Any) -> dict[str, object]:
        """Return the settings that a model to start from determines, with their values."""
        mask = read_mask_token(model.config)
        masks = {} if mask is None else {"mask_token_id": mask}
        return {**asdict(read_size(model.config)), "draft_config": None, **masks}


class DraftTrainee:
    """Draft model in training: it learns the target's distribution after every token of a sequence."""

    def __init__(
        self, network: Any, target: HFModel, config: TrainConfig, earlier: EarlierDrafts | None = None
    ) -> None:
        self.network: nn.Module = network
        self.target = target
        self.config = config
        self.earlier = earlier

    @property
    def spec(self) -> TraineeSpec:
        share = self.config.on_policy
        return TraineeSpec(save=self.save, on_policy=OnPolicyTraining(share, self.make_policy) if share else None)

    def compute_loss(self, trace: Trace) -> Losses:
        if self.config.parallel:
            return self._compute_parallel_loss(trace)
        logits = compute_trace_logits(self.network, trace)
        mask = trace.mask[:, 1:]
        losses = compute_draft_loss(
            self.config.loss, logits[mask], trace.target_log_probs.select(mask), trace.tokens[:, 1:][mask]
        )
        if self.earlier is None:
            return Losses(average_over_mask(losses, mask[mask]), {})
        covered = self.earlier.find_covered(trace)[mask]
        weights = torch.where(covered, self.config.boost_weight, 1.0)
        return Losses(average_over_mask(losses * weights, mask[mask]), {"covered": covered.float().mean().item()})

    def _compute_parallel_loss(self, trace: Trace) -> Losses:
        """Return the mean loss of all kept rows, and the mean of each depth."""
        config = self.config
        network: Any = self.network
        mask_token_id = read_mask_token(network.config)
        assert mask_token_id is not None  # since `prepare_parallel`
        rows = choose_rows(trace.mask, config.parallel_tokens, config.retention, config.min_retention)
        logits = compute_masked_logits(network, trace.tokens[:, :-1], rows, mask_token_id)
        sequence, row = rows.select_learnt(trace.mask).nonzero(as_tuple=True)
        position, depth = rows.positions[row], rows.depths[row]
        losses = compute_draft_loss(
            config.loss,
            logits[sequence, row],
            trace.target_log_probs.select((sequence, position)),
            trace.tokens[sequence, position + 1],
        )
        means = average_by_depth(losses, depth, config.parallel_tokens)
        if self.earlier is not None:
            covered = self.earlier.find_covered(trace)[sequence, position]
            losses = losses * torch.where(covered, config.boost_weight, 1.0)
            means["covered"] = covered.float().mean().item()
        return Losses(average_over_mask(losses, torch.ones_like(losses)), means)

    def make_policy(self) -> Any:
        """Copy the network in the target's dtype, for sampling and for saving."""
        return copy.deepcopy(self.network).to(self.target.model.dtype).eval()

    def to_checkpoint(self) -> CheckpointLayout:
        model: Any = self.network
        tensors = {name: x.detach() for name, x in model.state_dict().items()}
        return CheckpointLayout("draft_model", tensors, model.config.to_dict())

    def save(self, folder: Path) -> None:
        """Write a model folder with the target's tokenizer, so that vocabularies can be compared later."""
        self.make_policy().save_pretrained(folder)
        tokenizer = load_tokenizer(self.target.name) if Path(self.target.name).is_dir() else None
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def create_trainee(config: TrainConfig, target: HFModel, start: Path | None = None) -> DraftTrainee:
    """Make a draft model to train, in float32.

    Args:
        config: training settings.
        target: frozen target.
        start: model folder to continue from; None = a new model, with the target's embeddings if the widths agree.

    Raises:
        ForedraftError: for invalid settings, or a model with another vocabulary.
    """
    check_loss(config.loss)
    if not 0 <= config.on_policy <= 1:
        raise ForedraftError(f"on_policy must lie in 0..1, got {config.on_policy}")
    if not 0 <= config.boost_weight <= 1:
        raise ForedraftError(f"boost_weight must lie in 0..1, got {config.boost_weight}")
    _check_parallel_settings(config)
    earlier = EarlierDrafts.load(config.boost, target) if config.boost else None
    if start is not None:
        model = load_model(str(start), torch.float32, torch.device("cpu"))
        check_same_kind(model.config, str(start), target)
        check_same_vocabulary(model, str(start), target)
    else:
        kind = AutoModelForSeq2SeqLM if target.has_encoder else AutoModelForCausalLM
        attention = {} if target.has_encoder else {"attn_implementation": "sdpa"}  # T5 has no other than its own
        model = kind.from_config(_build_model_config(config, target), dtype=torch.float32, **attention)
        _copy_embeddings(model, target)
    if config.parallel:
        prepare_parallel(model, config.mask_token_id)
    elif start is not None and read_mask_token(model.config) is not None:
        raise ForedraftError(f"{start} drafts in parallel and would forget it; set parallel=true too")
    return DraftTrainee(model.to(target.device), target, config, earlier)


def _check_parallel_settings(config: TrainConfig) -> None:
    defaults = TrainConfig()
    changed = [name for name in PARALLEL_SETTINGS if getattr(config, name) != getattr(defaults, name)]
    if changed and not config.parallel:
        raise ForedraftError(f"only parallel drafts have {', '.join(changed)}; set parallel=true too")
    if config.parallel_tokens < 2:
        raise ForedraftError(f"parallel_tokens must be at least 2, got {config.parallel_tokens}")
    if not 0 < config.retention <= 1 or not 0 <= config.min_retention <= 1:
        raise ForedraftError("retention must be above 0 and at most 1, and min_retention lie in 0..1")


def _build_model_config(config: TrainConfig, target: HFModel) -> Any:
    if config.draft_config is None:
        size = DraftSize(config.layers, config.hidden, config.encoder_layers)
        return shrink_config(target.model.config, size)
    path = Path(config.draft_config)
    if not path.exists():
        raise ForedraftError(f"draft_config {config.draft_config!r} does not exist; give a config.json or its folder")
    try:
        shape = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ForedraftError(f"draft_config {config.draft_config!r} cannot be read: {error}") from None
    check_same_kind(shape, f"draft_config {config.draft_config!r}", target)
    if shape.get_text_config().vocab_size != target.vocab_size:
        raise ForedraftError(
            f"draft_config {config.draft_config!r} is for {shape.get_text_config().vocab_size} tokens and the target "
            f"has {target.vocab_size}; a draft shares its target's vocabulary"
        )
    return shape


@torch.no_grad()
def _copy_embeddings(model: Any, target: HFModel) -> None:
    """Copy the target's embedding and output matrix into a draft model of the same hidden size."""
    own = model.get_input_embeddings().weight
    if own.shape == target.embedding.shape:
        own.copy_(target.embedding.float())
        head = model.get_output_embeddings().weight
        if head is not own:  # a tied T5 scales the states instead of the matrix
            head.copy_(target.head_weight.float())
