"""Decoder layer of the target's own class, for drafters that add one to a target.

transformers calls the attention of such a layer by name, so the attention is an argument here, as in `DraftLayer`.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import AttentionFunction, attend_causal
from foredraft.models.hf import HFModel

LAYER_ATTENTION_NAME = "foredraft_target_layer"
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one token, and how far a row sees, as the attention of a layer was called."""

    heads: int
    width: int  # mean width of a key and a value
    sliding_window: int | None  # maximum number of positions that a row sees, its own included; None = all


class TargetLayer:
    """Decoder layer of the target's class with new weights.

    Args:
        target: target whose class and configuration the layer has.

    Raises:
        ForedraftError: the layer does not run with another attention.
    """

    def __init__(self, target: HFModel) -> None:
        self.name = target.name
        decoder: Any = None if target.has_encoder else target.model.get_decoder()
        last = next(reversed(getattr(decoder, "layers", None) or ()), None)
        rotary = getattr(decoder, "rotary_emb", None)
        if last is None or rotary is None:
            raise self._refuse("has no list of decoder layers with one rotary embedding")
        config = copy.deepcopy(target.model.config.get_text_config(decoder=True))
        config._attn_implementation = LAYER_ATTENTION_NAME
        config._experts_implementation = "eager"
        self.eps = getattr(config, "rms_norm_eps", None)
        dtype = target.embedding.dtype
        try:
            with torch.device(target.device):
                index = _choose_layer(config)
                self.module = type(last)(config, index).to(dtype).eval()
                self.norm_class = _find_norm_class(self.module)
                if self.norm_class is None or self.eps is None:
                    raise self._refuse("has no RMS norm before its attention")
                self.rotary = _make_rotary(type(rotary), config, index)
                self.kv = self._examine(torch.randn(1, 2, target.hidden_size, dtype=dtype))
        except ForedraftError:
            raise
        except Exception as error:  # the model's own code may raise any exception
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise self._refuse(f"has decoder layers that do not run alone ({reason})") from error

    def make_norm(self, width: int) -> nn.Module:
        """Make a norm of the class that the target's layers have."""
        assert self.norm_class is not None, "checked in the constructor"
        norm: nn.Module = self.norm_class(width, eps=self.eps)
        return norm

    def forward(
        self, x: Tensor, positions: Tensor, attend: AttentionFunction, calls: list[LayerKV] | None = None
    ) -> Tensor:
        """Compute the layer's output.

        Args:
            x: residual stream [B, L, H].
            positions: positions [B, L].
            attend: attention function; it gets the layer index 0.
            calls: list to which every call of the attention appends. Default None = no list.

        Returns:
            [B, L, H].
        """
        output = self.module(
            x,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
            attend_in_drafter=attend,
            attention_calls=calls,
        )
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states

    @torch.no_grad()
    def _examine(self, x: Tensor) -> LayerKV:
        """Run the layer once and return what its attention was called with."""
        calls: list[LayerKV] = []
        positions = torch.arange(x.shape[1], device=x.device)[None]
        output = self.forward(x, positions, attend_causal, calls)
        if len(calls) != 1 or output.shape != x.shape:
            raise self._refuse(f"has decoder layers with {len(calls)} attentions, and one is expected")
        return calls[0]

    def _refuse(self, reason: str) -> ForedraftError:
        return ForedraftError(f"{self.name} {reason}, so no layer of its class can be added; use the method eagle")


def _make_rotary(kind: Any, config: Any, index: int) -> Callable[[Tensor, Tensor], Any]:
    """Make the rotary embedding of a layer. It is in no network, so its frequencies stay float32."""
    rotary = kind(config)
    has_kinds = "layer_type" in inspect.signature(kind.forward).parameters
    return partial(rotary, layer_type=config.layer_types[index]) if has_kinds else rotary


def _choose_layer(config: Any) -> int:
    """Return the index whose kind of attention and of experts the new layer has: the last one of full attention.

    Configurations with `mtp_layer_types` name another kind.
    """
    last = int(config.num_hidden_layers) - 1
    kind = (getattr(config, "mtp_layer_types", None) or [FULL_ATTENTION])[0]
    kinds = getattr(config, "layer_types", None) or []
    return next((i for i in range(len(kinds) - 1, -1, -1) if kinds[i] == kind), last)


def _find_norm_class(layer: nn.Module) -> Any:
    """Return the class of a layer's norms over hidden states, which `input_layernorm` has; None if there is none."""
    norm = next((module for name, module in layer.named_modules() if name == "input_layernorm"), None)
    is_plain = norm is not None and "eps" in inspect.signature(type(norm)).parameters
    return type(norm) if is_plain else None


def _attend_in_drafter(
    module: nn.Module,
    query: Tensor,  # [B, Hq, L, D]
    key: Tensor,  # [B, Hkv, L, D]
    value: Tensor,  # [B, Hkv, L, Dv]
    attention_mask: Tensor | None,
    *,
    attend_in_drafter: AttentionFunction | None = None,
    attention_calls: list[LayerKV] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **unused: Any,  # transformers passes dropout, position_ids and more, which differ by model
) -> tuple[Tensor, None]:
    """Attend with the function of the drafter. Returns the output [B, L, Hq, Dv], and None for attention weights."""
    if attend_in_drafter is None:
        raise RuntimeError("this layer runs in a drafter only")
    if softcap is not None or s_aux is not None:
        raise RuntimeError("attention with soft-caps or sinks")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_calls is not None:
        attention_calls.append(LayerKV(k.shape[2], (k.shape[3] + v.shape[3] + 1) // 2, sliding_window))
    if scaling is not None:  # AttentionFunctions scale by D ** -0.5
        q = q * (scaling * q.shape[-1] ** 0.5)
    return attend_in_drafter(0, q, k, v), None


AttentionInterface.register(LAYER_ATTENTION_NAME, _attend_in_drafter)
