"""Preparation of a draft model for training to draft in parallel (PARD), and the means that training reports."""

from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.draft_model.masked_rows import takes_masked_rows
from foredraft.drafters.draft_model.parallel import PARD_KEYS
from foredraft.errors import ForedraftError

FULL_ATTENTION = "full_attention"  # the one value of `layer_types` that the rows of a masked pass stand for
SPECULATION_TYPE = {"spd_type": "pard"}  # beside the mask token, in the authors' folders


def read_mask_token(config: Any) -> int | None:
    """Return the mask token in the configuration of a model that drafts in parallel; None for other models."""
    values = config.to_dict()
    return next((values[key] for key in PARD_KEYS if values.get(key) is not None), None)


def prepare_parallel(model: Any, mask_token_id: int | None) -> None:
    """Write the mask token into the configuration of a model.

    Args:
        model: transformers model.
        mask_token_id: the token; None = that of its configuration, or the last of the vocabulary.

    Raises:
        ForedraftError: for a token outside the vocabulary or other than the stored one, or a model that cannot be
            trained so.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise ForedraftError("an encoder-decoder model cannot be trained to draft in parallel; leave parallel out")
    size, stored = config.get_text_config().vocab_size, read_mask_token(config)
    token = mask_token_id if mask_token_id is not None else size - 1 if stored is None else stored
    if stored not in (None, token):
        raise ForedraftError(f"the draft model has mask_token_id={stored}, not {token}; leave mask_token_id out")
    if not 0 <= token < size:
        raise ForedraftError(f"mask_token_id must lie in 0..{size - 1}, got {token}")
    if not _has_full_attention(config) or not takes_masked_rows(model, token):
        raise ForedraftError(
            f"models of type {config.model_type} with these layers cannot be trained to draft in parallel: a layer "
            "does not attend to all tokens before it; leave parallel out, or give another draft_config"
        )
    config.update({PARD_KEYS[0]: token, **SPECULATION_TYPE})


def _has_full_attention(config: Any) -> bool:
    """Return whether no layer has a window. Layers without attention are left to `takes_masked_rows`."""
    values = config.get_text_config().to_dict()
    types = values.get("layer_types")
    return set(types) == {FULL_ATTENTION} if types else values.get("sliding_window") is None


def average_by_depth(losses: Tensor, depths: Tensor, num_depths: int) -> dict[str, float]:
    """Return the mean of losses [R] at depths [R], counted from 0, as loss_1, loss_2, ..."""
    counts = torch.bincount(depths, minlength=num_depths)
    sums = torch.zeros(num_depths, device=losses.device).index_add_(0, depths, losses.detach().float())
    means = (sums / counts.clamp_min(1)).tolist()
    return {f"loss_{k + 1}": mean for k, mean in enumerate(means)}
