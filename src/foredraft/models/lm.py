"""A transformers causal LM as the engine sees it: windows in, logits and tapped hidden states out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.kv.pool import KVPool
from foredraft.models import attention
from foredraft.models.window import Window

_RECURRENT = ("mamba", "linear_attention", "recurrent", "conv", "rwkv", "ssm")


class LM(Protocol):
    """The target, a draft model, or anything else that turns a window into logits."""

    vocab_size: int
    context_length: int
    pool: KVPool

    def forward(self, window: Window, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of window.logit_rows, and [T, F] hidden states at the tapped boundaries side by side."""


@dataclass
class HFModel:
    """Any transformers causal LM whose class supports the attention interface, unmodified."""

    model: Any  # a PreTrainedModel; its own type is too loose to help
    name: str
    pool: KVPool

    @classmethod
    def adopt(cls, model: Any, name: str) -> "HFModel":
        """Take over a loaded model. Raises ForedraftError for architectures that paged attention cannot serve."""
        refuse_unsupported(model, name)
        model.set_attn_implementation(attention.NAME)
        model.eval()
        return cls(model, name, KVPool())

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 30)

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    def bytes_per_token(self) -> int:
        """KV bytes one token takes, estimated from the configuration; sizes the pools."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * self.num_layers * heads * size * self.model.dtype.itemsize)

    def forward(self, window: Window, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] and tapped states [T, F]; boundary 0 is the embeddings, boundary k the output of layer k."""
        with self._tapped(taps) as captured:
            out = self.model(
                input_ids=window.tokens,
                position_ids=window.positions,
                use_cache=False,
                logits_to_keep=window.logit_rows,
                window=window,
                pool=self.pool,
            )
        features = torch.cat([captured[tap][0] for tap in taps], -1) if taps else None
        return out.logits[0], features

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        layers = decoder_layers(self.model) if taps else nn.ModuleList()
        handles = []
        for tap in taps:
            if not 0 <= tap <= len(layers):
                raise ForedraftError(f"tap {tap} is not a boundary of {self.name}: it has {len(layers)} layers")

            def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], tap: int = tap) -> None:
                captured[tap] = args[0] if args else kwargs["hidden_states"]

            def after(_: nn.Module, __: Any, output: Any, tap: int = tap) -> None:
                captured[tap] = output if isinstance(output, Tensor) else output[0]

            if tap == 0:
                handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
            else:
                handles.append(layers[tap - 1].register_forward_hook(after))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def decoder_layers(model: Any) -> nn.ModuleList:
    """The stack of decoder layers, found by its length."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ForedraftError(f"{type(model).__name__}: no stack of {depth} decoder layers was found to tap")


def refuse_unsupported(model: Any, name: str) -> None:
    """Raise ForedraftError, with the reason, for a model that paged attention cannot serve."""
    kind = type(model).__name__
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ForedraftError(f"{name} ({kind}) is an encoder-decoder model; only causal LMs are supported")
    kinds = [str(k) for k in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()]
    recurrent = [k for k in kinds if any(word in k for word in _RECURRENT)]
    if recurrent or getattr(model, "_is_stateful", False):
        why = f"layers of type {recurrent[0]!r}" if recurrent else "recurrent state"
        raise ForedraftError(f"{name} ({kind}) has {why}, which cannot be rolled back when a draft is rejected")
    if not getattr(model, "_supports_attention_backend", False):
        raise ForedraftError(f"{name} ({kind}) does not route its attention through transformers' attention interface")
    if "chunked_attention" in kinds:
        raise ForedraftError(f"{name} ({kind}) uses chunked attention, which is not supported yet")
