"""A loaded transformers model as an LM, by its kind."""

from typing import Any

import torch

from foredraft.kernels.linear import KINDS
from foredraft.models import fused
from foredraft.models.encdec import EncoderDecoder
from foredraft.models.lm import HFModel


def adopt(
    model: Any, name: str, is_fused: bool = False, is_ours: bool = False, quantization: str | None = None
) -> HFModel:
    """Arguments and errors as in HFModel.adopt."""
    kind = EncoderDecoder if model.config.is_encoder_decoder else HFModel
    return kind.adopt(model, name, is_fused, is_ours, quantization)


def why_not_native(model: Any) -> str | None:
    """Why a model keeps transformers' modules, or torch's operators; None if it can run as native code."""
    if not model.config.is_encoder_decoder:
        return fused.why_not(model)
    is_native = model.device == torch.device("cpu") and model.dtype in KINDS
    return None if is_native else f"{model.dtype} on {model.device.type}"
