"""Causal LMs of transformers behind the engine's interface: forward batch in, logits and hidden states out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight
from foredraft.kernels.quantize import PackWeight, select_packers
from foredraft.kernels.weight_sharing import WeightIndex
from foredraft.kv.pool import KVPool
from foredraft.kv.state_pool import StatePool
from foredraft.models import attention
from foredraft.models.compatibility import REMEDY, examine_causal_lm
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.native.decoder import NativeDecoder, explain_unsupported
from foredraft.models.packed_linear import check_quantizable, list_packed_weights, pack_linears
from foredraft.models.recurrent.examination import compute_expected_logits, find_continues_chunks, measure_error
from foredraft.models.recurrent.mixers import install_mixers
from foredraft.models.recurrent.state_cache import StateCache
from foredraft.models.recurrent.state_probe import StateProbe
from foredraft.models.truncated_modules import Adapter, truncate_model
from foredraft.source import EncoderSource

MAX_CONTEXT = 1 << 30  # tokens, for a model without a limit of its own


class LM(Protocol):
    """Language model over paged KV: the target, a draft model, or a truncated target."""

    pool: KVPool

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass and write its KV to the pool.

        Args:
            forward_batch: T packed rows.
            hidden_layers: layer boundaries to return. Default () = none.

        Returns:
            Logits [R, V] of forward_batch.logit_rows, and hidden states [T, F] at the boundaries, concatenated, or
            None without boundaries.
        """


@dataclass
class HFModel:
    """A transformers causal LM whose class supports the attention interface."""

    model: Any  # a PreTrainedModel, whose own type annotations are too loose for mypy
    name: str
    pool: KVPool
    kv_elements_per_token: int  # numbers in the keys and values of one token, over all layers
    num_parameters: int
    fused: NativeDecoder | None = None  # native version of the whole model; None = transformers' modules run
    # Held during a pass through transformers' modules. Copies with new KV share the modules and their hooks.
    modules_lock: Lock = field(default_factory=Lock)
    max_context: int | None = field(kw_only=True, default=None)  # tokens; None = the model's own limit

    @classmethod
    def wrap_model(
        cls, model: Any, name: str, is_fused: bool = False, is_owned: bool = False, quantization: str | None = None,
        sharer: "HFModel | None" = None,
    ) -> "HFModel":  # fmt: skip
        """Wrap a loaded model.

        Args:
            model: transformers model; its attention implementation is replaced.
            name: name of the model in errors.
            is_fused: whether to use native code, for the whole model if its architecture is supported. Default False.
            is_owned: whether no other code uses the model, so its weights may be freed. Default False.
            quantization: "int8" or "int4". Default None = the weights as stored.
            sharer: loaded model, whose weights are used where this one has equal ones. Default None.

        Raises:
            ForedraftError: paged attention cannot serve the model, or it cannot be quantised.
        """
        model.eval()
        check_quantizable(model, quantization)
        record = examine_causal_lm(model, name)
        count = sum(p.numel() for p in model.parameters())
        states = None if record.states is None else _install_states(model, name, record.states)
        model.set_attn_implementation(attention.ATTENTION_NAME)
        is_native = is_fused and model.device.type == "cpu" and load_library() is not None
        packers, fused = select_packers(quantization), None
        if sharer is not None:
            packers = _share_weights(model, sharer, packers)
        if is_native and explain_unsupported(model) is None:
            windows = [call.sliding_window for call in sorted(record.calls, key=lambda call: call.layer)]
            fused = NativeDecoder.from_model(model, windows, *packers, is_owned)
        elif quantization is not None or (is_native and is_owned and model.dtype in DTYPE_KINDS):
            model = pack_linears(model, quantization, is_owned, record.repeat, packers)
        pool = KVPool.for_device(model.device, is_native, states)
        return cls(model, name, pool, sum(call.kv_elements for call in record.calls), count, fused)

    def with_context(self, max_tokens: int | None) -> "HFModel":
        """Return a copy with a shorter context.

        Args:
            max_tokens: context in tokens; None = unchanged.

        Raises:
            ForedraftError: `max_tokens` is longer than the model's own context.
        """
        if max_tokens is None:
            return self
        if not 1 < max_tokens <= self.model_context_length:
            raise ForedraftError(
                f"max_model_len must lie in 2..{self.model_context_length}, the context of {self.name}; got "
                f"{max_tokens}"
            )
        return replace(self, max_context=max_tokens)

    def with_new_kv(self) -> "HFModel":
        """Return a copy with the same weights and a new KV pool."""
        return replace(self, pool=self.pool.make_empty())

    def close(self) -> None:
        """End what outlives the last reference to this target and its copies with new KV: nothing in one process."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens V of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        limit = self.model_context_length
        return limit if self.max_context is None else min(limit, self.max_context)

    @property
    def model_context_length(self) -> int:
        """Context limit of the model in tokens."""
        return _find_context_limit(self.model.config.get_text_config())

    @property
    def runs_native(self) -> bool:
        """Whether a pass is one native call, instead of transformers' modules."""
        return self.fused is not None

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder, so every request needs a source."""
        return False

    @property
    def source_length(self) -> int | None:
        """Maximum number of tokens of a source; None without an encoder."""
        return None

    @property
    def calibration_source(self) -> EncoderSource | None:
        """Source of ordinary length for measuring passes; None without an encoder."""
        return None

    @cached_property
    def num_layers(self) -> int:
        """Number of decoder layers. Cached, since transformers reads its configuration slowly."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    @cached_property
    def hidden_size(self) -> int:
        """Width H of the hidden states. Cached, since transformers reads its configuration slowly."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def embedding(self) -> Tensor:
        """Input embedding matrix [V, H], unscaled."""
        return self.model.get_input_embeddings().weight.detach()  # type: ignore[no-any-return]

    @cached_property
    def head_weight(self) -> Tensor:
        """Matrix [V, H] of the head, unpacked if it was packed."""
        module = self.model.get_output_embeddings()
        packed = getattr(module, "packed", None)
        return module.weight.detach() if packed is None else packed.unpack()  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [.., V] from hidden states [.., H] at AFTER_FINAL_NORM, scaled and capped as in the model."""
        module = self.model.get_output_embeddings()
        # Gradients flow to the states, not to the matrix and bias of the head.
        has_gradient = torch.is_grad_enabled() and hidden.requires_grad
        bias = None if module.bias is None else module.bias.detach().to(hidden.dtype)
        logits = F.linear(hidden, self.head_weight, bias) if has_gradient else self._apply_head(hidden)
        config = self.model.config.get_text_config()
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        scale = getattr(config, "logit_scale", None)
        logits = logits if scale is None else logits * scale
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _apply_head(self, hidden: Tensor) -> Tensor:
        """Multiply hidden states by the matrix of the head and add its bias."""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]

    def bytes_per_token(self) -> int:
        """Return the KV bytes of one token. The engine sizes its pool by them."""
        return self.kv_elements_per_token * int(self.model.dtype.itemsize)

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass; see LM.forward.

        Boundary 0 is the embeddings, boundary k the residual stream after k layers, AFTER_FINAL_NORM the input of the
        head.

        Raises:
            ForedraftError: the model has no such boundary.
        """
        self.check_boundaries(hidden_layers)
        if self.fused is not None:
            return self.fused.forward(forward_batch, self.pool, hidden_layers)
        with self.modules_lock, capture_hidden_states(self.model, hidden_layers) as captured:
            logits = _run_modules(self.model, forward_batch, self.pool)
        features = torch.cat([captured[layer][0] for layer in hidden_layers], -1) if hidden_layers else None
        return logits, features

    def check_boundaries(self, hidden_layers: tuple[int, ...]) -> None:
        """Raise ForedraftError if the model has no such layer boundary."""
        for layer in hidden_layers:
            if layer != AFTER_FINAL_NORM and not 0 <= layer <= self.num_layers:
                raise ForedraftError(
                    f"hidden layer {layer} is not a boundary of {self.name}: it has {self.num_layers} layers"
                )

    def truncate_modules(self, num_layers: int, adapter: Adapter | None) -> Callable[[ForwardBatch], Tensor]:
        """Make the pass of transformers' modules through the first layers, the adapter, the final norm and the head.

        Args:
            num_layers: number of layers.
            adapter: runs after the last of these layers; None = no adapter.

        Returns:
            Function from a forward batch to its logits [R, V].
        """
        model = truncate_model(self.model, num_layers, adapter)

        def run(forward_batch: ForwardBatch) -> Tensor:
            with self.modules_lock:
                return _run_modules(model, forward_batch, self.pool)

        return run


def get_packed_weights(target: HFModel) -> list[PackedWeight]:
    """Return the packed matrices of a model."""
    return list_packed_weights(target.model) if target.fused is None else target.fused.weights


def _share_weights(
    model: Any, sharer: HFModel, packers: tuple[PackWeight, PackWeight]
) -> tuple[PackWeight, PackWeight]:
    """Replace parameters by equal ones of another model, and return packers that use its packed weights.

    The other model may have freed a parameter after it was packed; that one differs in shape.
    """
    others = dict(sharer.model.named_parameters())
    for name, parameter in model.named_parameters():
        other = others.get(name)
        if other is None or (other.dtype, other.device) != (parameter.dtype, parameter.device):
            continue
        if torch.equal(parameter, other):
            parameter.data = other.data
    index = WeightIndex.from_weights(get_packed_weights(sharer))
    return index.share(packers[0]), index.share(packers[1])


def _install_states(model: Any, name: str, probe: StateProbe) -> StatePool | None:
    """Let the recurrent layers of a model run on packed rows, and check that they compute the same.

    Returns:
        An empty pool; None if the model has attention alone, as some of a family with recurrent layers.

    Raises:
        ForedraftError: they do not, because a layer keeps a state that was not found, or mixes rows.
    """
    implementations = attention.read_implementations(model)
    install_mixers(probe.list_mixers())
    states = StatePool(probe.shapes, model.device) if probe.shapes else None
    pool = KVPool.for_device(model.device, states=states)
    run = partial(_run_modules, model, pool=pool)
    try:
        model.set_attn_implementation("eager")  # the model may have been wrapped before
        expected = compute_expected_logits(model)
        model.set_attn_implementation(attention.ATTENTION_NAME)
        if states is not None:
            states.continues_chunks = find_continues_chunks(model, probe, states, run)
        pool.clear()
        error = measure_error(model, expected, run)
    finally:
        model.set_attn_implementation(implementations)
    if not error <= 1:
        raise ForedraftError(
            f"{name} ({type(model).__name__}) is not computed right from recurrent states: its logits differ by "
            f"{error:.2g} times the error that rounding explains{REMEDY}"
        )
    return states and states.make_empty()


def _run_modules(model: Any, forward_batch: ForwardBatch, pool: KVPool) -> Tensor:
    """Run the modules of a model and return the logits [R, V]."""
    inputs = {
        "input_ids": forward_batch.tokens,
        "position_ids": forward_batch.positions,
        "logits_to_keep": forward_batch.logit_rows,
        "forward_batch": forward_batch,
        "pool": pool,
    }
    if pool.states is None:
        return model(**inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]
    cache = StateCache.start_pass(pool.states, forward_batch)
    return model(**inputs, use_cache=False, cache=cache, attention_cache=cache).logits[0]  # type: ignore[no-any-return]


def _find_context_limit(config: Any) -> int:
    """Find the context limit of a configuration in tokens.

    LongRoPE switches its factors at the original context length, by the longest sequence of a batch. Requests of
    one batch would then influence each other, so the context ends at the switch.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or MAX_CONTEXT
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    switches = [kind["original_max_position_embeddings"] for kind in by_kind if kind.get("rope_type") == "longrope"]
    return int(min([limit, *switches]))
