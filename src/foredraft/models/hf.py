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
from foredraft.models.adapters.adapter_set import AdapterSet
from foredraft.models.compatibility import examine_causal_lm
from foredraft.models.exact import make_exact
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.fused_norms import fuse_norms
from foredraft.models.images.reader import ImageReader
from foredraft.models.model_facts import ModelFacts
from foredraft.models.native.decoder import NativeDecoder, explain_unsupported
from foredraft.models.packed_linear import check_quantizable, list_packed_weights, pack_linears
from foredraft.models.packed_pass import ModulePass, PackedPass
from foredraft.models.recorded_pass import RecordedPasses
from foredraft.models.recurrent.installation import prepare_pass
from foredraft.models.text_part import find_other_parts
from foredraft.models.truncated_modules import Adapter, truncate_model
from foredraft.source import EncoderSource


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
            Logits [R, V] of forward_batch.logit_rows, valid until the next pass of this model, and hidden states [T, F]
            at the boundaries, concatenated, or None without boundaries. Drafters keep references to the states, so a
            later pass must not overwrite them.
        """


@dataclass
class HFModel(ImageReader, ModelFacts):
    """A transformers causal LM."""

    model: Any  # a PreTrainedModel, whose own type annotations are too loose for mypy
    name: str
    pool: KVPool
    kv_elements_per_token: int  # numbers in the keys and values of one token, over all layers
    num_parameters: int
    fused: NativeDecoder | None = None  # native version of the whole model; None = transformers' modules run
    # Held during a pass through transformers' modules. Copies with new KV share the modules and their hooks.
    modules_lock: Lock = field(default_factory=Lock)
    module_pass: ModulePass = field(kw_only=True, default_factory=PackedPass)  # for transformers' modules
    recorded: RecordedPasses = field(init=False)
    max_context: int | None = field(kw_only=True, default=None)  # tokens; None = the model's own limit
    has_exact_modules: bool = field(kw_only=True, default=False)  # linear layers and norms of `models/exact_modules.py`
    adapters: AdapterSet = field(kw_only=True, default_factory=AdapterSet)  # shared by copies with new KV

    def __post_init__(self) -> None:
        self.recorded = RecordedPasses(self.name, self.pool, self.module_pass.recording_obstacle)

    @classmethod
    def wrap_model(
        cls, model: Any, name: str, is_fused: bool = False, is_owned: bool = False, quantization: str | None = None,
        sharer: "HFModel | None" = None, is_exact: bool = False,
    ) -> "HFModel":  # fmt: skip
        """Wrap a loaded model.

        Args:
            model: transformers model; its attention implementation is replaced if it runs on paged attention.
            name: name of the model in errors.
            is_fused: whether to use native code, for the whole model if its architecture is supported. Default False.
            is_owned: whether no other code uses the model, so its weights may be freed. Default False.
            quantization: "int8" or "int4". Default None = the weights as stored.
            sharer: loaded model, whose weights are used where this one has equal ones. Default None.
            is_exact: whether the bits of a row must not depend on the other rows of a pass. Default False.

        Raises:
            ForedraftError: paged attention cannot serve the model, or it cannot be quantised or exact.
        """
        model.eval()
        check_quantizable(model, quantization)
        examination = examine_causal_lm(model, name)
        count = sum(p.numel() for p in model.parameters())
        is_native = is_fused and model.device.type == "cpu" and load_library() is not None
        states, module_pass = prepare_pass(model, name, examination, is_native)
        packers, fused = _share_weights(model, sharer, select_packers(quantization)), None
        if is_native and examination.calls and explain_unsupported(model) is None:
            windows = examination.list_windows(model.config.get_text_config().num_hidden_layers)
            fused = NativeDecoder.from_model(model, windows, *packers, is_owned)
            states = StatePool(fused.state_shapes, model.device) if fused.state_shapes else None
        elif is_exact:
            model = make_exact(model, name, is_fused, is_owned, examination.calls)
        elif quantization is not None or (is_native and is_owned and model.dtype in DTYPE_KINDS):
            model = pack_linears(model, quantization, is_owned, examination.probe, packers, find_other_parts(model))
        elif is_fused:
            model = fuse_norms(model, is_owned)
        pool, has_exact_modules = KVPool.for_device(model.device, is_native, states), is_exact and fused is None
        return cls(
            model, name, pool, examination.kv_elements, count, fused, module_pass=module_pass,
            has_exact_modules=has_exact_modules,
        )  # fmt: skip

    def with_context(self, max_tokens: int | None) -> "HFModel":
        """Return a copy with a shorter context.

        Args:
            max_tokens: context in tokens; None = unchanged.

        Raises:
            ForedraftError: `max_tokens` is longer than the model's own context.
        """
        if max_tokens is None:
            return self
        _check_context(max_tokens, self.model_context_length, self.name)
        return replace(self, max_context=max_tokens)

    def with_new_kv(self) -> "HFModel":
        """Return a copy with the same weights and a new KV pool."""
        return replace(self, pool=self.pool.make_empty())

    def close(self) -> None:
        """End what outlives the last reference to this target and its copies with new KV: nothing in one process."""

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        limit = self.model_context_length
        return limit if self.max_context is None else min(limit, self.max_context)

    @property
    def runs_native(self) -> bool:
        """Whether a pass is one native call, instead of transformers' modules."""
        return self.fused is not None

    @property
    def is_exact(self) -> bool:
        """Whether the bits of a row depend on its own request alone, so that drafts change none."""
        return self.runs_native or self.has_exact_modules

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own; None if they can."""
        return None if self.runs_native and self.pool.states is None else self.module_pass.adapter_obstacle

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of rows, rising, that passes are padded to; () = they are not padded."""
        return self.recorded.row_buckets

    @property
    def has_whole_kv(self) -> bool:
        """Whether the pool of this process holds the keys and values of all heads."""
        return True

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
    def head_weight(self) -> Tensor:
        """Matrix [V, H] of the head, unpacked if it was packed."""
        module = self.model.get_output_embeddings()
        packed = getattr(module, "packed", None)
        return module.weight.detach() if packed is None else packed.unpack()  # type: ignore[no-any-return]

    @property
    def head_bias(self) -> Tensor | None:
        """Bias [V] of the head; None = it has none."""
        return self.model.get_output_embeddings().bias  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute scaled, capped logits [.., V] of states [.., H] at AFTER_FINAL_NORM. Only they get gradients."""
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return scale_logits(self._apply_head(hidden), self.model.config.get_text_config())
        bias = None if self.head_bias is None else self.head_bias.detach().to(hidden.dtype)
        logits = F.linear(hidden, self.head_weight, bias)
        return scale_logits(logits, self.model.config.get_text_config())

    def _apply_head(self, hidden: Tensor) -> Tensor:
        """Multiply hidden states by the matrix of the head and add its bias."""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]

    def bytes_per_token(self) -> int:
        """Return the KV bytes of one token. The engine sizes its pool by them."""
        if self.fused is not None:
            return self.fused.kv_bytes_per_token
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
        run = partial(self.module_pass.run, self.model, self.pool)
        with self.modules_lock, self.adapters.changes.apply(forward_batch):
            # A recording has the addresses of its inputs, and the rows of adapters and images have none.
            is_special = forward_batch.has_adapters or forward_batch.images is not None
            recorded = None if is_special else self.recorded.run(forward_batch, hidden_layers, run)
            return run(forward_batch, hidden_layers) if recorded is None else recorded

    def check_boundaries(self, hidden_layers: tuple[int, ...]) -> None:
        """Raise ForedraftError if the model has no such layer boundary."""
        _check_boundaries(hidden_layers, self.num_layers, self.name)

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
            with self.modules_lock, self.adapters.changes.apply(forward_batch):
                return self.module_pass.run(model, self.pool, forward_batch)[0]

        return run


def scale_logits(logits: Tensor, config: Any) -> Tensor:
    """Scale and cap logits as the model of a configuration does."""
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
    scale = getattr(config, "logit_scale", None)
    logits = logits if scale is None else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def get_packed_weights(target: HFModel) -> list[PackedWeight]:
    """Return the packed matrices of a model."""
    return list_packed_weights(target.model) if target.fused is None else target.fused.weights


def _share_weights(
    model: Any, sharer: HFModel | None, packers: tuple[PackWeight, PackWeight]
) -> tuple[PackWeight, PackWeight]:
    """Replace parameters by equal ones of another model, and return packers that use its packed weights.

    The other model may have freed a parameter after it was packed; that one differs in shape. Without another model the
    packers stay as they are.
    """
    if sharer is None:
        return packers
    others = dict(sharer.model.named_parameters())
    for name, parameter in model.named_parameters():
        other = others.get(name)
        if other is None or (other.dtype, other.device) != (parameter.dtype, parameter.device):
            continue
        if torch.equal(parameter, other):
            parameter.data = other.data
    index = WeightIndex.from_weights(get_packed_weights(sharer))
    return index.share(packers[0]), index.share(packers[1])


def _check_boundaries(hidden_layers: tuple[int, ...], num_layers: int, name: str) -> None:
    """Raise ForedraftError if a model has no such layer boundary."""
    for layer in hidden_layers:
        if layer != AFTER_FINAL_NORM and not 0 <= layer <= num_layers:
            raise ForedraftError(f"hidden layer {layer} is not a boundary of {name}: it has {num_layers} layers")


def _check_context(max_tokens: int, limit: int, name: str) -> None:
    """Raise ForedraftError if a context in tokens is longer than a model's own."""
    if not 1 < max_tokens <= limit:
        raise ForedraftError(f"max_model_len must lie in 2..{limit}, the context of {name}; got {max_tokens}")
