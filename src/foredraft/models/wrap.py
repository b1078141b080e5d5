"""A loaded transformers model as an LM, by its kind."""

from typing import Any

import torch

from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.hf import HFModel
from foredraft.models.native import decoder


def wrap_model(
    model: Any, name: str, is_fused: bool = False, is_owned: bool = False, quantization: str | None = None
) -> HFModel:
    """Arguments and errors as in HFModel.adopt."""
    kind = EncoderDecoder if model.config.is_encoder_decoder else HFModel
    return kind.wrap_model(model, name, is_fused, is_owned, quantization)


def get_native_obstacle(model: Any) -> str | None:
    """Why a model keeps transformers' modules, or torch's operators; None if it can run as native code."""
    if not model.config.is_encoder_decoder:
        return decoder.get_obstacle(model)
    is_native = model.device == torch.device("cpu") and model.dtype in DTYPE_KINDS
    return None if is_native else f"{model.dtype} on {model.device.type}"
