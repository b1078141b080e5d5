"""Truncated target: the first layers of a model, then its final norm and head, in the target's KV pool.

Weights and KV are shared with the target. Its first layers write the same keys and values to the same slots as a full
pass. The native decoder stops after these layers. Without it, a shallow copy of the model has a shorter layer stack.
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
from foredraft.models.hf import HFModel
from foredraft.models.hidden_states import find_decoder_layers
from foredraft.models.native.decoder import DecoderPacker, LayerSlice

# Standard deviation of the outputs of a new adapter's input projections, for inputs with variance 1. Hidden states are
# large after some layers, so an adapter with a small gain learns slowly.
ADAPTER_GAIN = 2.0
DEFAULT_NORM_EPS = 1e-6  # epsilon of norms, for a target without rms_norm_eps


class Adapter(nn.Module):
    """Gated residual MLP in place of the skipped layers: x + down(silu(gate(norm x)) * up(norm x)).

    A new adapter is the identity.

    Args:
        hidden: width of the hidden states.
        rank: width inside the MLP.
        eps: epsilon of the norm.
    """

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
        """Adapt hidden states [.., H]."""
        normed = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))  # type: ignore[no-any-return]


@dataclass
class Truncated:
    """First layers of a target as an LM in the target's pool. It is valid as long as the target."""

    target: HFModel
    num_layers: int  # layers that run, from the first one on; less than all
    adapter: Adapter | None = None  # runs before the final norm; has the target's dtype and device
    _layer_slice: LayerSlice | None = field(init=False, default=None)  # for the native decoder
    _packer: DecoderPacker | None = field(init=False, default=None)  # owns the memory to which the layer slice points
    _truncated_model: Any = field(init=False, default=None)  # for transformers' modules

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
        """Run one forward pass and write the KV of these layers; see LM.forward. `hidden_layers` must be empty."""
        assert not hidden_layers, "a truncated pass has no hidden layers"
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
                f"an adapter of rank {rank} is wider than the {max_rank} of the target's own layers; "
                "train a narrower one"
            )
        return LayerRecord(
            mlp_norm=packer.hold_norm(self.adapter.norm),
            gate_up=packer.pack_interleaved(self.adapter.gate_proj, self.adapter.up_proj),
            down=packer.pack_stacked(self.adapter.down_proj),
        )


def check_exit_layer(target: HFModel, layer: int) -> None:
    """Check that a truncated target has at least one layer and fewer than all.

    Args:
        target: target model.
        layer: number of layers of the truncated target.

    Raises:
        ForedraftError: the number is out of range.
    """
    if target.num_layers < 2:
        raise ForedraftError(f"{target.name} has one layer, and there is none to leave out")
    if not 1 <= layer < target.num_layers:
        raise ForedraftError(
            f"exit_layer must lie in 1..{target.num_layers - 1} for {target.name}, which has {target.num_layers} "
            f"layers; got {layer}"
        )


def truncate_model(model: Any, count: int, adapter: Adapter | None = None) -> Any:
    """Copy a model around the same modules with a shorter layer stack. The model itself is not changed.

    Args:
        model: transformers model.
        count: number of layers of the copy.
        adapter: runs after the last of these layers. Default None = no adapter.

    Raises:
        ForedraftError: hooks replaced the forward of a module, so a copy would call the whole model.
    """
    layers = find_decoder_layers(model)
    first_layers = list(layers[:count])
    if adapter is not None:
        first_layers[-1] = _attach_adapter(first_layers[-1], adapter)
    *owners, name = next(path for path, module in model.named_modules() if module is layers).split(".")
    view = parent = _copy_module(model)
    for owner in owners:
        child = _copy_module(getattr(parent, owner))
        setattr(parent, owner, child)
        parent = child
    setattr(parent, name, nn.ModuleList(first_layers))
    return view


def find_final_norm(model: Any) -> nn.Module | None:
    """Find the norm between the last layer and the head; None if it is ambiguous.

    It is the only norm beside the layer stack, or the only one after it.
    """
    layers = find_decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    children: list[nn.Module] = list(model.get_submodule(path.rpartition(".")[0]).children())
    norms: list[nn.Module] = [child for child in children if getattr(getattr(child, "weight", None), "ndim", 0) == 1]
    later = [child for child in norms if children.index(child) > children.index(layers)]
    for candidates in (norms, later):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _copy_module(module: Any) -> Any:
    """Copy a module with the same parameters and children."""
    if "forward" in vars(module):
        raise ForedraftError(
            f"the forward of {type(module).__name__} was replaced (device_map does so), so a part of it cannot run "
            "alone; load the model on one device"
        )
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view


def _attach_adapter(layer: Any, adapter: Adapter) -> Any:
    """Copy a layer with the adapter after it."""
    view = _copy_module(layer)
    view._forward_hooks = OrderedDict(layer._forward_hooks)

    def apply_adapter(module: nn.Module, args: Any, output: Any) -> Any:
        return adapter(output) if isinstance(output, Tensor) else (adapter(output[0]), *output[1:])

    _: RemovableHandle = view.register_forward_hook(apply_adapter)
    return view


def count_weights(target: HFModel) -> tuple[float, float]:
    """Count the weights of one layer and of the head. A pass of few rows reads each of them once."""
    embedding = target.embedding.numel()
    head = target.vocab_size * target.hidden_size
    is_tied = bool(getattr(target.model.config.get_text_config(), "tie_word_embeddings", False))
    rest = target.num_parameters - embedding - (0 if is_tied else head)
    return max(rest, 0) / target.num_layers, float(head)


def read_norm_eps(target: HFModel) -> float:
    """Read the epsilon of the target's norms. The native decoder uses it for the adapter's norm too."""
    return float(getattr(target.model.config.get_text_config(), "rms_norm_eps", None) or DEFAULT_NORM_EPS)
