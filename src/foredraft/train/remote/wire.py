"""Traces as bytes: one safetensors file."""

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from foredraft.drafters.losses import TargetLogProbs
from foredraft.errors import ForedraftError

FEATURES, LOGPROBS, TOKEN_IDS = "features", "logprobs", "token_ids"  # names of the tensors


def encode_traces(features: Tensor, probs: TargetLogProbs) -> bytes:
    """Encode hidden states [B, L, F] and distributions [B, L, k or V]."""
    tensors = {FEATURES: features, LOGPROBS: probs.logprobs}
    if probs.token_ids is not None:
        tensors[TOKEN_IDS] = probs.token_ids.int()
    return bytes(save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}))


def decode_traces(data: bytes) -> tuple[Tensor, TargetLogProbs]:
    """Decode what `encode_traces` encoded. Raises ForedraftError for other bytes."""
    try:
        tensors = load(data)
        ids = tensors.get(TOKEN_IDS)
        return tensors[FEATURES], TargetLogProbs(tensors[LOGPROBS], None if ids is None else ids.long())
    except (SafetensorError, KeyError) as error:
        raise ForedraftError(
            f"the server sent no traces ({error}); is it a `foredraft serve` of this version?"
        ) from None
