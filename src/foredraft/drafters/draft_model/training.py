"""Distillation of a whole small model as draft model (DistillSpec, 2310.08461), on every token of a sequence."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.drafters.draft_model.boosting import EarlierDrafts, check_same_vocabulary
from foredraft.drafters.losses import Losses, Trace, average_over_mask, check_loss, compute_draft_loss
from foredraft.drafters.trainee import OnPolicyTraining, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.loading import load_model, load_tokenizer

LAYER_DIVISOR = 6  # default depth: the target's layers over this
WIDTH_DIVISOR = 2  # default width: the target's hidden size over this
WIDTH_MULTIPLE = 16  # the width of an MLP layer is a multiple of this


@dataclass(frozen=True)
class TrainConfig:
    """Training settings. The draft model has the target's architecture, unless `draft_config` describes another.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        layers: number of layers; None = a sixth of the target's.
        hidden: hidden size, a multiple of the head size; None = half of the target's.
        draft_config: path of a config.json; replaces `layers` and `hidden`.
        on_policy: share of the steps, 0 to 1, on sequences that the draft model writes (GKD, 2306.13649).
        boost: folders of earlier draft models. The new one learns what they miss, to draft beside them (SpecInfer).
        boost_weight: weight, 0 to 1, of positions at which one of them predicts the target's likeliest token.
    """

    loss: str = "kl"
    layers: int | None = None
    hidden: int | None = None
    draft_config: str | None = None
    on_policy: float = 0.0
    boost: tuple[str, ...] = ()
    boost_weight: float = 0.25

    @staticmethod
    def read_shape(model: Any) -> dict[str, object]:
        """Return the settings that a model to start from determines, with their values."""
        shape = model.config.get_text_config()
        return {"layers": shape.num_hidden_layers, "hidden": shape.hidden_size, "draft_config": None}


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
        logits = self.network(input_ids=trace.tokens[:, :-1], use_cache=False).logits
        mask = trace.mask[:, 1:]
        losses = compute_draft_loss(
            self.config.loss, logits[mask], trace.target_log_probs.select(mask), trace.tokens[:, 1:][mask]
        )
        if self.earlier is None:
            return Losses(average_over_mask(losses, mask[mask]), {})
        covered = self.earlier.find_covered(trace)[mask]
        weights = torch.where(covered, self.config.boost_weight, 1.0)
        return Losses(average_over_mask(losses * weights, mask[mask]), {"covered": covered.float().mean().item()})

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
    earlier = EarlierDrafts.load(config.boost, target) if config.boost else None
    if start is not None:
        model = load_model(str(start), torch.float32, torch.device("cpu"))
        check_same_vocabulary(model, str(start), target)
    else:
        model = AutoModelForCausalLM.from_config(
            _build_model_config(config, target), dtype=torch.float32, attn_implementation="sdpa"
        )
        _copy_embeddings(model, target)
    return DraftTrainee(model.to(target.device), target, config, earlier)


def _build_model_config(config: TrainConfig, target: HFModel) -> Any:
    if config.draft_config is None:
        return shrink_config(target.model.config, config.layers, config.hidden)
    path = Path(config.draft_config)
    if not path.exists():
        raise ForedraftError(f"draft_config {config.draft_config!r} does not exist; give a config.json or its folder")
    try:
        shape = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ForedraftError(f"draft_config {config.draft_config!r} cannot be read: {error}") from None
    if shape.get_text_config().vocab_size != target.vocab_size:
        raise ForedraftError(
            f"draft_config {config.draft_config!r} is for {shape.get_text_config().vocab_size} tokens and the target "
            f"has {target.vocab_size}; a draft shares its target's vocabulary"
        )
    return shape


def shrink_config(config: Any, layers: int | None, hidden: int | None) -> Any:
    """Copy a model configuration with fewer layers and a smaller hidden size. The head size stays.

    Args:
        config: configuration of the target.
        layers: number of layers; None = a sixth.
        hidden: hidden size; None = half.

    Raises:
        ForedraftError: for an unusual architecture, or a hidden size that is no multiple of the head size.
    """
    shape = copy.deepcopy(config.get_text_config())
    if not hasattr(shape, "num_attention_heads") or not hasattr(shape, "intermediate_size"):
        raise ForedraftError(
            f"models of type {shape.model_type} cannot be made smaller; give a whole configuration as draft_config"
        )
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    target_width = shape.hidden_size
    width = hidden or max(head, target_width // WIDTH_DIVISOR // head * head)
    depth = layers or max(1, shape.num_hidden_layers // LAYER_DIVISOR)
    if width % head or width < 1 or depth < 1:
        raise ForedraftError(f"hidden must be a multiple of the head size {head}, and layers must be positive")
    heads = width // head
    kv_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    shape.intermediate_size = max(
        WIDTH_MULTIPLE, round(shape.intermediate_size * width / target_width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    )
    shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads = width, depth, heads
    shape.num_key_value_heads = math.gcd(heads, kv_heads)
    if getattr(shape, "head_dim", None):
        shape.head_dim = head
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:depth]
    return shape


@torch.no_grad()
def _copy_embeddings(model: Any, target: HFModel) -> None:
    """Copy the target's embedding and output matrix into a draft model of the same hidden size."""
    own = model.get_input_embeddings().weight
    if own.shape == target.embedding.shape:
        own.copy_(target.embedding.float())
        head, target_head = model.get_output_embeddings().weight, target.head_weight
        if head.shape == target_head.shape:
            head.copy_(target_head.float())
