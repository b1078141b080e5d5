"""The first layers of a model, then its own final norm and head, on its own keys and values.

Nothing is held twice: weights are the model's, and what the layers write lies where its passes write the same. On the
native path a pass stops early; on the plain path a view of the model, whose stack is shorter, stands beside it.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import LayerRecord
from foredraft.kernels.linear import PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.draft_layer import RMSNorm
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel, find_decoder_layers
from foredraft.models.native.decoder import DecoderPacker, LayerSlice

ADAPTER_GAIN = (
    2.0  # of a new adapter's inner products: states are large after some layers, and small changes are slow to show
)


class Adapter(nn.Module):
    """x + down(silu(gate(norm x)) * up(norm x)): in place of the layers that are left out. New, it changes nothing."""

    def __init__(self, hidden: int, rank: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps)
        self.gate_proj = nn.Linear(hidden, rank, bias=False)
        self.up_proj = nn.Linear(hidden, rank, bias=False)
        self.down_proj = nn.Linear(rank, hidden, bias=False)
        for inner in (self.gate_proj, self.up_proj):
            nn.init.normal_(inner.weight, std=ADAPTER_GAIN * hidden**-0.5)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., H]"""
        read = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(read)) * self.up_proj(read))  # type: ignore[no-any-return]


@dataclass
class Truncated:
    """An LM for the lifetime of the target's memory. `adapter`: of the target's type and on its device."""

    target: HFModel
    num_layers: int
    adapter: Adapter | None = None
    _layer_slice: LayerSlice | None = field(init=False, default=None)
    _packer: DecoderPacker | None = field(init=False, default=None)  # keeps alive what the part points to
    _truncated_model: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_exit_layer(self.target, self.num_layers)
        if self.target.fused is not None:
            self._packer = DecoderPacker(PackedWeight.pack, is_owned=False)
            self._layer_slice = LayerSlice(
                self.num_layers, self._pack_adapter(self.target.fused.record.inner, self._packer)
            )
        else:
            self._truncated_model = truncate_model(self.target.model, self.num_layers, self.adapter)

    @property
    def pool(self) -> KVPool:
        return self.target.pool

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def context_length(self) -> int:
        return self.target.context_length

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of window.logit_rows; keys and values of these layers are written. There is nothing to tap."""
        assert not hidden_layers, "a truncated pass has no taps"
        if self.target.fused is not None:
            return self.target.fused.run(forward_batch, self.pool, (), layer_slice=self._layer_slice)
        with self.target.modules_lock:
            out = self._truncated_model(
                input_ids=forward_batch.tokens,
                position_ids=forward_batch.positions,
                use_cache=False,
                logits_to_keep=forward_batch.logit_rows,
                forward_batch=forward_batch,
                pool=self.pool,
            )
        return out.logits[0], None

    def _pack_adapter(self, max_rank: int, packer: DecoderPacker) -> LayerRecord | None:
        if self.adapter is None:
            return None
        rank = self.adapter.gate_proj.out_features
        if rank > max_rank:
            raise ForedraftError(
                f"an adapter of rank {rank} is wider than the {max_rank} of the target's own layers; train a "
                "narrower one"
            )
        return LayerRecord(
            mlp_norm=packer.hold_norm(self.adapter.norm),
            gate_up=packer.pack_interleaved(self.adapter.gate_proj, self.adapter.up_proj),
            down=packer.pack_stacked(self.adapter.down_proj),
        )


def check_exit_layer(target: HFModel, layer: int) -> None:
    """Raises ForedraftError for a number of layers that is not less than all and more than none."""
    if target.num_layers < 2:
        raise ForedraftError(f"{target.name} has one layer, and there is none to leave out")
    if not 1 <= layer < target.num_layers:
        raise ForedraftError(
            f"exit_layer must lie in 1..{target.num_layers - 1} for {target.name}, which has {target.num_layers} "
            f"layers; got {layer}"
        )


def truncate_model(model: Any, count: int, adapter: Adapter | None = None) -> Any:
    """Another object around the same modules, with a shorter stack; the model itself is not touched.

    Raises ForedraftError where modules were replaced by hooks that would call the whole model.
    """
    layers = find_decoder_layers(model)
    kept = list(layers[:count])
    if adapter is not None:
        kept[-1] = _attach_adapter(kept[-1], adapter)
    *owners, name = next(path for path, module in model.named_modules() if module is layers).split(".")
    view = at = _copy_module(model)
    for owner in owners:
        below = _copy_module(getattr(at, owner))
        setattr(at, owner, below)
        at = below
    setattr(at, name, nn.ModuleList(kept))
    return view


def find_final_norm(model: Any) -> nn.Module | None:
    """Return the norm between the last layer and the head; None if it is not recognised."""
    layers = find_decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    children: list[nn.Module] = list(model.get_submodule(path.rpartition(".")[0]).children())
    norms: list[nn.Module] = [child for child in children if getattr(getattr(child, "weight", None), "ndim", 0) == 1]
    later = [child for child in norms if children.index(child) > children.index(layers)]
    for found in (norms, later):
        if len(found) == 1:
            return found[0]
    return None


def _copy_module(module: Any) -> Any:
    """A module of its own that holds the same parameters and children."""
    if "forward" in vars(module):
        raise ForedraftError(
            f"{type(module).__name__} was wrapped from outside (device_map does so), and no part of it runs alone; "
            "load the model on one device"
        )
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view


def _attach_adapter(layer: Any, adapter: Adapter) -> Any:
    """The layer with the adapter behind it, for this view alone."""
    view = _copy_module(layer)
    view._forward_hooks = OrderedDict(layer._forward_hooks)

    def behind(module: nn.Module, args: Any, output: Any) -> Any:
        return adapter(output) if isinstance(output, Tensor) else (adapter(output[0]), *output[1:])

    _: RemovableHandle = view.register_forward_hook(behind)
    return view


def count_weights(target: HFModel) -> tuple[float, float]:
    """Numbers in one layer and in the head: what a pass of few rows has to read of each."""
    vocabulary = target.embedding.numel()
    head = target.vocab_size * target.hidden_size
    is_tied = bool(getattr(target.model.config.get_text_config(), "tie_word_embeddings", False))
    rest = target.num_parameters - vocabulary - (0 if is_tied else head)
    return max(rest, 0) / target.num_layers, float(head)


def read_norm_eps(target: HFModel) -> float:
    """Read the epsilon of the target's norms; the native pass has one for all."""
    return float(getattr(target.model.config.get_text_config(), "rms_norm_eps", None) or 1e-6)
