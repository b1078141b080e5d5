"""Wrappers of loaded transformers models as LMs: causal or encoder-decoder."""

from typing import Any

import torch

from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.hf import HFModel
from foredraft.models.native import decoder


def wrap_model(
    model: Any,
    name: str,
    is_fused: bool = False,
    is_owned: bool = False,
    quantization: str | None = None,
    sharer: HFModel | None = None,
    is_exact: bool = False,
) -> HFModel:
    """Wrap a loaded model as an LM; arguments and errors as in HFModel.wrap_model."""
    kind = EncoderDecoder if model.config.is_encoder_decoder else HFModel
    return kind.wrap_model(model, name, is_fused, is_owned, quantization, sharer, is_exact)


def explain_unsupported_model(model: Any) -> str | None:
    """Return the reason why a model cannot run as native code; None if it can."""
    if not model.config.is_encoder_decoder:
        return decoder.explain_unsupported(model)
    is_native = model.device == torch.device("cpu") and model.dtype in DTYPE_KINDS
    return None if is_native else f"{model.dtype} on {model.device.type}"
