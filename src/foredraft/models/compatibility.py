"""Which models paged attention can serve: what their configuration says, and what a pass of two tokens shows.

transformers' hook promises that attention goes through us, not that nothing else does. The two tokens go through the
model with an attention that computes nothing and writes down what it was given; every refusal below was seen to give
wrong text in silence without it.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from foredraft.errors import ForedraftError
from foredraft.models.attention import read_implementations

PROBE_ATTENTION = "foredraft_probe"
_RECURRENT_LAYER_WORDS = ("mamba", "linear_attention", "recurrent", "conv", "rwkv", "ssm")
COMPARED_LENGTHS = (6, 5)  # tokens and states that an encoder-decoder model is tried with
MAX_LOGIT_ERROR = 2.0  # allowed beyond the square root of the type's precision, of the spread of the logits
_FAR_POSITION = 1 << 22  # a position beyond every window


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call of a layer's attention."""

    layer: int
    is_causal: bool
    sliding_window: int | None
    mask: Tensor | None
    kv_elements: int  # in one token's key and value


def examine_causal_lm(model: Any, name: str) -> list[AttentionCall]:
    """Record the arguments of every layer's attention.

    Raises ForedraftError, with the reason, for a model that paged attention cannot serve.
    """
    calls: list[AttentionCall] = []
    why = _find_config_obstacle(model)
    if why is None:
        why, calls = _find_probe_obstacle(model)
    if why is not None:
        raise ForedraftError(f"{name} ({type(model).__name__}) {why}")
    return calls


def _find_config_obstacle(model: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder model, which is not loaded as a causal LM"
    config = model.config.get_text_config()
    kinds = [str(k) for k in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()]
    recurrent = [k for k in kinds if any(word in k for word in _RECURRENT_LAYER_WORDS)]
    if recurrent or getattr(model, "_is_stateful", False):
        why = f"layers of type {recurrent[0]!r}" if recurrent else "recurrent state"
        return (
            f"has {why}, which cannot be rolled back when a draft is rejected, and which the engine does not keep for "
            "plain decoding either; use a model whose layers all attend, or transformers' generate()"
        )
    if not getattr(model, "_supports_attention_backend", False):
        return "does not route its attention through transformers' attention interface"
    if "chunked_attention" in kinds:
        return "uses chunked attention, which is not supported yet"
    if any(
        isinstance(m, nn.Embedding) and m.padding_idx is not None and "position" in n for n, m in model.named_modules()
    ):
        return "counts positions from its padding token, as encoders do; only causal LMs are supported"
    return None


def _find_probe_obstacle(model: Any) -> tuple[str | None, list[AttentionCall]]:
    try:
        calls, num_rows = probe_attention(model)
    except Exception as error:  # whatever a model does with a pass it was not written for
        return f"cannot run on paged attention ({_summarise_error(error)})", []
    if num_rows != 1:
        return "gives the logits of every token when asked for one (it ignores logits_to_keep)", calls
    depth = model.config.get_text_config().num_hidden_layers
    if sorted(call.layer for call in calls) != list(range(depth)):
        return "attends more or less than once in some layer, and paged attention holds one set of keys for each", calls
    reach = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FAR_POSITION
    for call in calls:
        if not call.is_causal:
            return "lets tokens see later ones; only causal LMs are supported", calls
        if call.mask is not None and not _is_supported_mask(call.mask, call.sliding_window, reach):
            return f"masks the attention of layer {call.layer} in a way that paged attention does not see", calls
    return None, calls


def _summarise_error(error: Exception) -> str:
    """The first line of an error, or the place where one without words was raised."""
    first = str(error).strip().partition("\n")[0][:120]
    if not first:
        place = traceback.extract_tb(error.__traceback__)[-1]
        first = f"in {place.name}, {Path(place.filename).name} line {place.lineno}; its files may be damaged"
    return f"{type(error).__name__}: {first}"


@torch.no_grad()
def probe_attention(model: Any) -> tuple[list[AttentionCall], int]:
    """Record the arguments of every layer's attention, and the number of logits rows if one is requested."""
    calls: list[AttentionCall] = []
    own = read_implementations(model)
    pair = torch.tensor([[0, 1]], device=model.device)
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        out = model(input_ids=pair, position_ids=pair, use_cache=False, logits_to_keep=pair[0, 1:], calls=calls)
    finally:
        model.set_attn_implementation(own)
    return calls, out.logits.shape[1]


def _record_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    calls: list[AttentionCall] | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    if calls is None:
        raise RuntimeError("keyword arguments do not reach the attention")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    numbers = key.shape[1] * (key.shape[3] + value.shape[3])
    calls.append(
        AttentionCall(layer, bool(getattr(module, "is_causal", True)), sliding_window, attention_mask, numbers)
    )
    shared = query.shape[1] // value.shape[1]
    return value.repeat_interleave(shared, 1).transpose(1, 2).contiguous(), None


def _record_mask(*, mask_function: Any, config: Any, device: Any, **unused: Any) -> Tensor:
    """Instead of a mask, [1, 1, 2, D] some distances and whether it sees that far, from a place deep inside a text."""
    distances = _list_distances(config)
    zero, here = torch.tensor(0), torch.tensor(_FAR_POSITION)
    seen = [bool(mask_function(zero, zero, here, here - d)) for d in distances]
    return torch.tensor([[[distances, seen]]], device=device)


def _list_distances(config: Any) -> list[int]:
    """Into the future, here, and to both sides of every power of two and of every number that may be a window."""
    edges = {1 << i for i in range(22)}
    edges |= {v for v in config.to_dict().values() if isinstance(v, int) and 1 < v < _FAR_POSITION}
    return sorted({-1} | {edge + side for edge in edges for side in (-1, 0)})


def _is_supported_mask(mask: Tensor, sliding_window: int | None, max_distance: int) -> bool:
    """Whether the mask of a layer is the one paged attention makes, as far as the context reaches."""
    if mask.shape[:3] != (1, 1, 2) or mask.is_floating_point():
        return False
    return all(
        bool(seen) == (distance >= 0 and (sliding_window is None or distance < sliding_window))
        for distance, seen in mask[0, 0].T.tolist()
        if distance < max_distance
    )


def examine_encoder_decoder(model: Any, name: str, families: Sequence[str]) -> None:
    """Raises ForedraftError, with the reason, for an encoder-decoder model whose decoder is of no known family."""
    kind = model.config.model_type
    why = None
    if kind not in families:
        known = ", ".join(sorted(families))
        why = f"is an encoder-decoder model of type {kind!r}; those that can be run are: {known}"
    elif not model.can_generate():
        why = "has no head that makes text; use its class for generation"
    if why is not None:
        raise ForedraftError(f"{name} ({type(model).__name__}) {why}")


@torch.no_grad()
def compare_decoders(model: Any, name: str, compute_logits: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Try what was recognised: our logits [T, V] of a short text over made-up states [S, H] must be the model's own.

    Raises ForedraftError where they are not: a release of transformers, or a configuration, that means something else.
    """
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(COMPARED_LENGTHS[1], model.config.d_model, generator=noise).to(model.device, model.dtype)
    most = min(model.config.vocab_size, 1 << 10)
    tokens = (torch.arange(COMPARED_LENGTHS[0], device=model.device) * 7 + 3) % most
    pair = BaseModelOutput(last_hidden_state=states[None])
    theirs = model(encoder_outputs=pair, decoder_input_ids=tokens[None], use_cache=False).logits[0].double()
    # the mean, not the largest: an attention that is nearly a tie turns over at one rounding, and its row with it
    error = (compute_logits(tokens, states).double() - theirs).square().mean().sqrt()
    spread = theirs.std()
    precision = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)  # T5 squares in float32
    if not error <= MAX_LOGIT_ERROR * precision**0.5 * spread:
        raise ForedraftError(
            f"{name} ({type(model).__name__}) is not computed as models of its type are: logits differ by "
            f"{float(error):.2g} where they spread by {float(spread):.2g}"
        )


AttentionInterface.register(PROBE_ATTENTION, _record_attention)
AttentionMaskInterface.register(PROBE_ATTENTION, _record_mask)
