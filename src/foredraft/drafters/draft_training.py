"""Distilling a whole small model as a draft (DistillSpec, 2310.08461): its law against the target's at every token."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft.drafters.training import Losses, Trace, check_loss, draft_loss, mean
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.load import check_vocabularies, load_model, load_tokenizer

SIXTH = 6  # of the target's layers a draft has if nothing is said


@dataclass(frozen=True)
class TrainConfig:
    """The draft is of the target's architecture with `layers` layers of width `hidden`, or what `draft_config`, a
    config.json, describes. `on_policy`: share of the steps that learn from what the draft itself goes on to say."""

    loss: str = "kl"
    layers: int | None = None  # None = a sixth of the target's
    hidden: int | None = None  # None = half of the target's
    draft_config: str | None = None
    on_policy: float = 0.0


class DraftTrainee:
    """A model that learns the law after every token of a text."""

    taps: tuple[int, ...] = ()

    def __init__(self, network: Any, target: HFModel, config: TrainConfig) -> None:
        self.network: nn.Module = network
        self.target = target
        self.config = config
        self.on_policy = config.on_policy

    def loss(self, trace: Trace) -> Losses:
        logits = self.network(input_ids=trace.tokens[:, :-1], use_cache=False).logits
        mask = trace.mask[:, 1:]
        loss = mean(
            draft_loss(self.config.loss, logits[mask], trace.law.at(mask), trace.tokens[:, 1:][mask]), mask[mask]
        )
        return Losses(loss, {})

    def policy(self) -> Any:
        """A copy to sample from, in the type it will be published in."""
        return copy.deepcopy(self.network).to(self.target.model.dtype).eval()

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model: Any = self.network
        return {name: x.detach() for name, x in model.state_dict().items()}, model.config.to_dict()

    def save(self, folder: Path) -> None:
        """A model folder, with the target's tokenizer so that it can be compared with another target's."""
        self.policy().save_pretrained(folder)
        tokenizer = load_tokenizer(self.target.name) if Path(self.target.name).is_dir() else None
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def trainee(config: TrainConfig, target: HFModel, start: Path | None = None) -> DraftTrainee:
    """An untrained draft, or the model in the folder `start`. Raises ForedraftError if it is not the target's kind."""
    check_loss(config.loss)
    if not 0 <= config.on_policy <= 1:
        raise ForedraftError(f"on_policy is a share in 0..1, got {config.on_policy}")
    if start is not None:
        model = load_model(str(start), torch.float32, torch.device("cpu"))
        size = model.get_output_embeddings().weight.shape[0]
        theirs = (target.name, load_tokenizer(target.name), target.vocab_size)
        check_vocabularies(theirs, (str(start), load_tokenizer(str(start)), size))
    else:
        model = AutoModelForCausalLM.from_config(
            _shape(config, target), dtype=torch.float32, attn_implementation="sdpa"
        )
        _borrow(model, target)
    return DraftTrainee(model.to(target.device), target, config)


def _shape(config: TrainConfig, target: HFModel) -> Any:
    if config.draft_config is None:
        return smaller(target.model.config, config.layers, config.hidden)
    place = Path(config.draft_config)
    if not place.exists():
        raise ForedraftError(f"draft_config {config.draft_config!r} does not exist; give a config.json or its folder")
    try:
        shape = AutoConfig.from_pretrained(str(place), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ForedraftError(f"draft_config {config.draft_config!r} cannot be read: {error}") from None
    if shape.get_text_config().vocab_size != target.vocab_size:
        raise ForedraftError(
            f"draft_config {config.draft_config!r} is for {shape.get_text_config().vocab_size} tokens and the target "
            f"has {target.vocab_size}; a draft shares its target's vocabulary"
        )
    return shape


def smaller(config: Any, layers: int | None, hidden: int | None) -> Any:
    """The target's configuration at another depth and width; heads keep their width."""
    shape = copy.deepcopy(config.get_text_config())
    if not hasattr(shape, "num_attention_heads") or not hasattr(shape, "intermediate_size"):
        raise ForedraftError(
            f"models of type {shape.model_type} cannot be made smaller; give a whole configuration as draft_config"
        )
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    wide = shape.hidden_size
    width = hidden or max(head, wide // 2 // head * head)
    depth = layers or max(1, shape.num_hidden_layers // SIXTH)
    if width % head or width < 1 or depth < 1:
        raise ForedraftError(f"hidden must be a multiple of the {head} of a head, and layers positive")
    heads = width // head
    kv_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    shape.intermediate_size = max(16, round(shape.intermediate_size * width / wide / 16) * 16)
    shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads = width, depth, heads
    shape.num_key_value_heads = math.gcd(heads, kv_heads)
    if getattr(shape, "head_dim", None):
        shape.head_dim = head
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:depth]
    return shape


@torch.no_grad()
def _borrow(model: Any, target: HFModel) -> None:
    """Of the same width, a draft begins with the target's embeddings."""
    own = model.get_input_embeddings().weight
    if own.shape == target.embedding.shape:
        own.copy_(target.embedding.float())
        head, theirs = model.get_output_embeddings().weight, target.head_weight
        if head.shape == theirs.shape:
            head.copy_(theirs.float())
