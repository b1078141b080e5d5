"""Checks that the engine can serve a model, and how: its configuration, a probe pass, and a comparison of logits.

transformers' hook ensures that attention calls our function, but not that tokens interact in no other way. The probe
pass uses an attention that computes nothing and records its arguments. A model that fails it may still run on its own
attention, if its logits over paged KV equal those of its own pass.
"""

import logging
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
from foredraft.kernels.gpu.checks import explain_unsupported_tensors
from foredraft.models.attention import read_implementations
from foredraft.models.cache_examination import examine_cache_pass, run_own_pass
from foredraft.models.cache_pass import RecurrentStateError
from foredraft.models.packed_pass import ModulePass, PackedPass
from foredraft.models.recomputation_examination import examine_recomputed_pass
from foredraft.models.recomputed_pass import TOKEN_ELEMENTS
from foredraft.models.recurrent.examination import (
    find_cache_obstacle,
    find_state_obstacle,
    has_recurrent_layers,
    list_layer_kinds,
)
from foredraft.models.recurrent.state_probe import StateProbe

log = logging.getLogger(__name__)

PROBE_ATTENTION = "foredraft_probe"
# Decoder tokens and encoder states of the pass that compares our decoder with the model's.
COMPARED_LENGTHS = (6, 5)
# Allowed error of the logits, in units of their standard deviation times the square root of the dtype's epsilon.
MAX_LOGIT_ERROR = 2.0
MAX_COMPARED_TOKEN = 1 << 10  # token ids of the comparison lie below this
REMEDY = "; use a model that docs/models.md lists as running, or transformers' generate()"  # ends every refusal
MAX_ERROR_CHARS = 120  # characters of another library's error that our message repeats
_FAR_BITS = 22
_FAR_POSITION = 1 << _FAR_BITS  # position in tokens beyond every sliding window


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call of a layer's attention."""

    layer: int
    is_causal: bool
    sliding_window: int | None
    mask: Tensor | None
    kv_elements: int  # numbers in the key and the value of one token
    kernel_obstacle: str | None  # why the kernel of GPUs does not take its tensors; None if it does
    has_position_bias: bool = False


@dataclass(frozen=True)
class CausalExamination:
    """How a causal LM runs."""

    module_pass: ModulePass
    kv_elements: int  # numbers in the keys and values of one token, over all layers
    probe: Callable[[Any], object]  # short pass of the model's own modules
    calls: tuple[AttentionCall, ...] = ()  # one per layer of a model on paged attention, in the order of the pass
    states: StateProbe | None = None  # of the recurrent layers, if the model declares any

    def list_windows(self, num_layers: int) -> list[int | None]:
        """List the sliding window of every layer: maximum number of tokens that a row of attention sees, or None."""
        windows = {call.layer: call.sliding_window for call in self.calls}
        return [windows.get(layer) for layer in range(num_layers)]


def examine_causal_lm(model: Any, name: str) -> CausalExamination:
    """Check a causal LM and find its pass: paged attention, its own attention with a paged cache, or whole sequences.

    Args:
        model: transformers model.
        name: name of the model in errors.

    Raises:
        ForedraftError: the engine cannot serve the model; the message has the reason and what to do.
    """
    reason: str | None = "is an encoder-decoder model, which is not loaded as a causal LM"
    if not model.config.is_encoder_decoder:
        found = _examine_recurrent(model) if has_recurrent_layers(model) else _examine_passes(model)
        if isinstance(found, CausalExamination):
            _warn_about_positions(model, name)
            return found
        reason, recomputed = found, examine_recomputed_pass(model)
        if recomputed is not None:
            log.warning(
                "%s (%s) computes all tokens of a request again in every pass, which is slow for long texts: it %s",
                name, type(model).__name__, reason if recomputed.is_causal else "predicts at a place after the text",
            )  # fmt: skip
            return CausalExamination(recomputed, TOKEN_ELEMENTS, run_own_pass)
    raise ForedraftError(f"{name} ({type(model).__name__}) {reason}{REMEDY}")


def _examine_recurrent(model: Any) -> CausalExamination | str:
    """Find the pass of a model that declares recurrent layers; otherwise return the reason why there is none."""
    states = StateProbe()
    calls: list[AttentionCall] = []
    obstacle = find_cache_obstacle(model)
    if obstacle is None:
        obstacle, calls = _find_probe_obstacle(model, states)
    if obstacle is not None:
        return f"has recurrent layers, and {obstacle}"
    kv_elements = sum(call.kv_elements for call in calls)
    return CausalExamination(PackedPass(), kv_elements, _probe_recurrent, tuple(calls), states)


def _probe_recurrent(model: Any) -> None:
    """Run the short pass of a model with recurrent layers."""
    probe_attention(model, StateProbe())


def _examine_passes(model: Any) -> CausalExamination | str:
    """Find the pass of a model, paged attention first; otherwise return the reason why there is none."""
    calls: list[AttentionCall] = []
    obstacle: str | None = "does not route its attention through transformers' attention interface"
    if getattr(model, "_supports_attention_backend", False):
        obstacle, calls = _find_probe_obstacle(model)
    if obstacle is None:
        kv_elements = sum(call.kv_elements for call in calls)
        return CausalExamination(PackedPass(), kv_elements, probe_attention, tuple(calls))
    try:
        examination = examine_cache_pass(model)
    except RecurrentStateError:
        return "keeps a recurrent state that is not in transformers' Cache, so a draft cannot be rolled back"
    except Exception as error:  # the model's own code may raise any exception in a pass of this kind
        return f"cannot run on a paged KV cache ({_summarise_error(error)})"
    if examination.cache_pass is None:
        return examination.reason
    return CausalExamination(examination.cache_pass, examination.kv_elements, run_own_pass)


def _warn_about_positions(model: Any, name: str) -> None:
    """Warn about a model whose own pass and transformers' `generate` give a token different positions."""
    tables = (m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and "position" in n)
    if any(table.padding_idx is not None for table in tables):
        log.warning(
            "%s: its own pass counts positions from its padding token, transformers' generate() from 0; Foredraft does "
            "as generate()", name,
        )  # fmt: skip


def _find_probe_obstacle(model: Any, states: StateProbe | None = None) -> tuple[str | None, list[AttentionCall]]:
    """Return the reason why a model cannot run on paged attention or None, and its attention calls."""
    if "chunked_attention" in list_layer_kinds(model):
        return "uses chunked attention", []
    if "indexed_attention" in list_layer_kinds(model):
        return "chooses keys with an indexer in its attention", []
    try:
        calls, num_rows = probe_attention(model, states)
    except Exception as error:  # the model's own code may raise any exception in a pass of this kind
        return f"cannot run on paged attention ({_summarise_error(error)})", []
    if num_rows != 1:
        return "returns the logits of all tokens if one is requested (it ignores logits_to_keep)", calls
    if (reason := _find_layer_obstacle(model, calls, states)) is not None:
        return reason, calls
    max_distance = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FAR_POSITION
    for call in calls:
        if not call.is_causal:
            return "lets tokens attend to later tokens; only causal LMs are supported", calls
        if call.has_position_bias:
            return f"adds a position bias to the attention of layer {call.layer}, which is not supported", calls
        if call.mask is not None and not _is_supported_mask(call.mask, call.sliding_window, max_distance):
            return f"masks the attention of layer {call.layer} in a way that paged attention does not support", calls
    return None, calls


def _find_layer_obstacle(model: Any, calls: list[AttentionCall], states: StateProbe | None) -> str | None:
    """Return why the layers that the probe has seen do not make up the model; None if they do."""
    layers = sorted(call.layer for call in calls)
    if layers == list(range(model.config.get_text_config().num_hidden_layers)) and not (states and states.shapes):
        return None
    if states is None or len(set(layers)) != len(layers):
        return "does not attend exactly once in every layer, and paged attention has one set of keys per layer"
    if layers != sorted(states.attention_layers):
        return "does not route its attention through transformers' attention interface"
    return find_state_obstacle(states)  # a layer without attention has a state, or no link between tokens


def _summarise_error(error: Exception) -> str:
    """Return the first line of an error, or the source line that raised it if it has no message."""
    first = str(error).strip().partition("\n")[0][:MAX_ERROR_CHARS]
    if not first:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first = f"in {frame.name}, {Path(frame.filename).name} line {frame.lineno}; its files may be damaged"
    return f"{type(error).__name__}: {first}"


@torch.no_grad()
def probe_attention(model: Any, states: StateProbe | None = None) -> tuple[list[AttentionCall], int]:
    """Run two tokens through a model with an attention that only records its arguments.

    Args:
        model: transformers model.
        states: records the recurrent layers. Default None = the model has none.

    Returns:
        The attention calls, and the rows of logits that the model returned when one row was requested.
    """
    calls: list[AttentionCall] = []
    implementations = read_implementations(model)
    pair = torch.tensor([[0, 1]], device=model.device)
    model.set_attn_implementation(PROBE_ATTENTION)
    inputs = {"input_ids": pair, "position_ids": pair, "logits_to_keep": pair[0, 1:], "calls": calls}
    try:
        if states is None:
            out = model(**inputs, use_cache=False)
        else:
            with states.watch(model):
                out = model(**inputs, use_cache=False, cache=states, attention_cache=states)
    finally:
        model.set_attn_implementation(implementations)
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
    attention_cache: StateProbe | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    if calls is None:
        raise RuntimeError("keyword arguments do not reach the attention")
    layer = int(module.layer_idx) if attention_cache is None else attention_cache.attention_layer  # type: ignore[arg-type]
    kv_elements = key.shape[1] * (key.shape[3] + value.shape[3])
    is_causal, obstacle = bool(getattr(module, "is_causal", True)), explain_unsupported_tensors(query, key, value)
    has_bias = position_bias is not None
    calls.append(AttentionCall(layer, is_causal, sliding_window, attention_mask, kv_elements, obstacle, has_bias))
    num_shared = query.shape[1] // value.shape[1]
    return value.repeat_interleave(num_shared, 1).transpose(1, 2).contiguous(), None


def _record_mask(*, mask_function: Any, config: Any, device: Any, **unused: Any) -> Tensor:
    """Sample a mask function from a query far inside a sequence.

    Returns:
        [1, 1, 2, D]: D distances, and for each whether the query sees a key that many tokens back.
    """
    distances = _list_distances(config)
    zero, query = torch.tensor(0), torch.tensor(_FAR_POSITION)
    visible = [bool(mask_function(zero, zero, query, query - d)) for d in distances]
    return torch.tensor([[[distances, visible]]], device=device)


def _list_distances(config: Any) -> list[int]:
    """List the distances to sample, in tokens back; -1 is the next token.

    They lie on both sides of every power of two and of every number of the configuration that may be a window.
    """
    edges = {1 << i for i in range(_FAR_BITS)}
    edges |= {v for v in config.to_dict().values() if isinstance(v, int) and 1 < v < _FAR_POSITION}
    return sorted({-1} | {edge + side for edge in edges for side in (-1, 0)})


def _is_supported_mask(mask: Tensor, sliding_window: int | None, max_distance: int) -> bool:
    """Whether the sampled mask of a layer equals paged attention's mask at all distances below `max_distance`."""
    if mask.shape[:3] != (1, 1, 2) or mask.is_floating_point():
        return False
    return all(
        bool(visible) == (distance >= 0 and (sliding_window is None or distance < sliding_window))
        for distance, visible in mask[0, 0].T.tolist()
        if distance < max_distance
    )


def examine_encoder_decoder(model: Any, name: str, families: Sequence[str]) -> None:
    """Check that an encoder-decoder model is of a supported family.

    Args:
        model: transformers model.
        name: name of the model in errors.
        families: supported values of config.model_type.

    Raises:
        ForedraftError: the family is not supported, or the model has no head for generation.
    """
    kind = model.config.model_type
    reason = None
    if kind not in families:
        supported = ", ".join(sorted(families))
        reason = f"is an encoder-decoder model of type {kind!r}; supported types are: {supported}"
    elif not model.can_generate():
        reason = "has no head for generation; load it with its class for generation"
    if reason is not None:
        raise ForedraftError(f"{name} ({type(model).__name__}) {reason}")


@torch.no_grad()
def compare_decoders(model: Any, name: str, compute_logits: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compare our decoder's logits with the model's, for a few tokens over random encoder states.

    Args:
        model: transformers encoder-decoder model.
        name: name of the model in errors.
        compute_logits: our decoder, from tokens [T] and encoder states [S, H] to logits [T, V].

    Raises:
        ForedraftError: the logits differ, for example because a release of transformers changed the architecture.
    """
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(COMPARED_LENGTHS[1], model.config.d_model, generator=noise).to(model.device, model.dtype)
    max_token = min(model.config.vocab_size, MAX_COMPARED_TOKEN)
    tokens = (torch.arange(COMPARED_LENGTHS[0], device=model.device) * 7 + 3) % max_token  # distinct ids
    encoded = BaseModelOutput(last_hidden_state=states[None])
    expected = model(encoder_outputs=encoded, decoder_input_ids=tokens[None], use_cache=False).logits[0].double()
    # The root mean square, not the maximum: rounding may flip a near tie in the attention and change one row.
    error = (compute_logits(tokens, states).double() - expected).square().mean().sqrt()
    spread = expected.std()
    precision = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)  # T5's norm squares in float32
    if not error <= MAX_LOGIT_ERROR * precision**0.5 * spread:
        raise ForedraftError(
            f"{name} ({type(model).__name__}) is not computed as models of its type are: logits differ by "
            f"{float(error):.2g}, and their standard deviation is {float(spread):.2g}"
        )


AttentionInterface.register(PROBE_ATTENTION, _record_attention)
AttentionMaskInterface.register(PROBE_ATTENTION, _record_mask)
