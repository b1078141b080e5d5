"""A transformers causal LM as the engine sees it: windows in, logits and tapped hidden states out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.kernels.quantize import select_packers
from foredraft.kv.pool import KVPool
from foredraft.models import attention
from foredraft.models.compatibility import examine_causal_lm, probe_attention
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.native.decoder import NativeDecoder, get_obstacle
from foredraft.models.packed_linear import check_quantizable, pack_linears
from foredraft.source import EncoderSource


class LM(Protocol):
    """The target, a draft model, or anything else that turns a window into logits."""

    pool: KVPool

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of window.logit_rows, and [T, F] hidden states at the tapped boundaries side by side."""


@dataclass
class HFModel:
    """Any transformers causal LM whose class supports the attention interface, unmodified."""

    model: Any  # a PreTrainedModel; its own type is too loose to help
    name: str
    pool: KVPool
    kv_elements_per_token: int  # in the keys and values of one token
    num_parameters: int
    fused: NativeDecoder | None = None
    modules_lock: Lock = field(
        default_factory=Lock
    )  # of the model's own, whose hooks are every pass's: siblings share them
    max_context: int | None = field(kw_only=True, default=None)  # tokens; None = the model's own limit

    @classmethod
    def wrap_model(
        cls, model: Any, name: str, is_fused: bool = False, is_owned: bool = False, quantization: str | None = None
    ) -> "HFModel":
        """Take over a loaded model. Raises ForedraftError for architectures that paged attention cannot serve.

        is_fused: run natively what can be, the whole model if it is recognised. is_owned: no other code uses it, so
        that
        its weights may go. quantization: int8 or int4, None = the weights as they are.
        """
        model.eval()
        check_quantizable(model, quantization)
        calls = examine_causal_lm(model, name)
        count = sum(p.numel() for p in model.parameters())
        model.set_attn_implementation(attention.ATTENTION_NAME)
        is_native = is_fused and model.device.type == "cpu" and load_library() is not None
        fused = None
        if is_native and get_obstacle(model) is None:
            sliding = [call.sliding_window for call in sorted(calls, key=lambda call: call.layer)]
            fused = NativeDecoder.from_model(model, sliding, *select_packers(quantization), is_owned)
        elif quantization is not None or (is_native and is_owned and model.dtype in DTYPE_KINDS):
            model = pack_linears(model, quantization, is_owned, probe_attention)
        pool = KVPool(is_native)
        return cls(model, name, pool, sum(call.kv_elements for call in calls), count, fused)

    def with_context(self, max_tokens: int | None) -> "HFModel":
        """The same model with a shorter context. Raises ForedraftError if it is longer than the model's own."""
        if max_tokens is None:
            return self
        if not 1 < max_tokens <= self.model_context_length:
            raise ForedraftError(
                f"max_model_len must lie in 2..{self.model_context_length}, the context of {self.name}; got "
                f"{max_tokens}"
            )
        return replace(self, max_context=max_tokens)

    def with_new_kv(self) -> "HFModel":
        """The same weights with KV memory of their own."""
        return replace(self, pool=KVPool(self.pool.is_native))

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        own = self.model_context_length
        return own if self.max_context is None else min(own, self.max_context)

    @property
    def model_context_length(self) -> int:
        """The model's own limit. Rotary factors that switch with the longest text of a batch end it at the switch."""
        config = self.model.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 30
        rope = getattr(config, "rope_parameters", None) or {}
        by_kind = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
        switches = [kind["original_max_position_embeddings"] for kind in by_kind if kind.get("rope_type") == "longrope"]
        return int(min([most, *switches]))

    @property
    def has_encoder(self) -> bool:
        """Whether every request needs a source."""
        return False

    @property
    def source_length(self) -> int | None:
        """Tokens a source may have; None for a model that reads none."""
        return None

    @property
    def calibration_source(self) -> EncoderSource | None:
        """A source of ordinary length, for passes that measure; None for a model that reads none."""
        return None

    @cached_property
    def num_layers(self) -> int:  # a configuration is slow to ask
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    @cached_property
    def hidden_size(self) -> int:  # a configuration is slow to ask
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def embedding(self) -> Tensor:
        """[V, H] the rows that token ids stand for, unscaled."""
        return self.model.get_input_embeddings().weight.detach()  # type: ignore[no-any-return]

    @cached_property
    def head_weight(self) -> Tensor:
        """[V, H] the matrix behind `head`, unpacked where it was packed."""
        module = self.model.get_output_embeddings()
        packed = getattr(module, "packed", None)
        return module.weight.detach() if packed is None else packed.unpack()  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] of states [.., H] taken at NORMED, scaled and capped as the model does."""
        module = self.model.get_output_embeddings()
        is_learning = torch.is_grad_enabled() and hidden.requires_grad  # not the head, which is only borrowed
        bias = None if module.bias is None else module.bias.to(hidden.dtype)
        logits = F.linear(hidden, self.head_weight, bias) if is_learning else module(hidden)
        config = self.model.config.get_text_config()
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        scale = getattr(config, "logit_scale", None)
        logits = logits if scale is None else logits * scale
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def bytes_per_token(self) -> int:
        """KV bytes one token takes; sizes the pools."""
        return self.kv_elements_per_token * int(self.model.dtype.itemsize)

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] and tapped states [T, F] side by side.

        Boundary 0 is the embeddings, boundary k the residual stream after k layers, NORMED the last one normalised.
        """
        for tap in hidden_layers:
            if tap != AFTER_FINAL_NORM and not 0 <= tap <= self.num_layers:
                raise ForedraftError(f"tap {tap} is not a boundary of {self.name}: it has {self.num_layers} layers")
        if self.fused is not None:
            return self.fused.forward(forward_batch, self.pool, hidden_layers)
        with self.modules_lock, self._capture_hidden_states(hidden_layers) as captured:
            out = self.model(
                input_ids=forward_batch.tokens,
                position_ids=forward_batch.positions,
                use_cache=False,
                logits_to_keep=forward_batch.logit_rows,
                forward_batch=forward_batch,
                pool=self.pool,
            )
        features = torch.cat([captured[tap][0] for tap in hidden_layers], -1) if hidden_layers else None
        return out.logits[0], features

    @contextmanager
    def _capture_hidden_states(self, hidden_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        layers = find_decoder_layers(self.model) if hidden_layers else nn.ModuleList()
        handles = []
        for tap in hidden_layers:

            def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], tap: int = tap) -> None:
                captured[tap] = args[0] if args else kwargs["hidden_states"]

            def after(_: nn.Module, __: Any, output: Any, tap: int = tap) -> None:
                captured[tap] = output if isinstance(output, Tensor) else output[0]

            if tap == AFTER_FINAL_NORM:
                handles.append(self.model.get_decoder().register_forward_hook(after))
            elif tap == 0:
                handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
            else:
                handles.append(layers[tap - 1].register_forward_hook(after))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def find_decoder_layers(model: Any) -> nn.ModuleList:
    """The stack of decoder layers, found by its length."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ForedraftError(f"{type(model).__name__}: no stack of {depth} decoder layers was found to tap")
