"""Truncated target: the first layers of a model, then its final norm and head, in the target's KV pool.

Weights and KV are shared with the target. Its first layers write the same keys and values to the same slots as a full
pass. The native decoder stops after these layers. Without it, a shallow copy of the model has a shorter layer stack.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import LayerRecord
from foredraft.kernels.linear import PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel
from foredraft.models.native.decoder import LayerSlice
from foredraft.models.native.packing import DecoderPacker
from foredraft.models.truncated_modules import Adapter

DEFAULT_NORM_EPS = 1e-6  # epsilon of norms, for a target whose config has none


@dataclass
class Truncated:
    """First layers of a target as an LM in the target's pool. It is valid as long as the target."""

    target: HFModel
    num_layers: int  # layers that run, from the first one on; less than all
    adapter: Adapter | None = None  # runs before the final norm; has the target's dtype and device
    _layer_slice: LayerSlice | None = field(init=False, default=None)  # for the native decoder
    _packer: DecoderPacker | None = field(init=False, default=None)  # owns the memory to which the layer slice points
    _run_modules: Callable[[ForwardBatch], Tensor] | None = field(init=False, default=None)  # without native code

    def __post_init__(self) -> None:
        check_exit_layer(self.target, self.num_layers)
        if self.target.fused is not None:
            self._packer = DecoderPacker(PackedWeight.pack, is_owned=False)
            self._layer_slice = LayerSlice(
                self.num_layers, self._pack_adapter(self.target.fused.record.inner, self._packer)
            )
        else:
            self._run_modules = self.target.truncate_modules(self.num_layers, self.adapter)

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
        if self._run_modules is not None:
            return self._run_modules(forward_batch), None
        assert self.target.fused is not None
        return self.target.fused.run(forward_batch, self.pool, (), layer_slice=self._layer_slice)

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


def count_weights(target: HFModel) -> tuple[float, float]:
    """Count the weights of one layer and of the head. A pass of few rows reads each of them once."""
    embedding = target.embedding.numel()
    head = target.vocab_size * target.hidden_size
    is_tied = bool(getattr(target.model.config.get_text_config(), "tie_word_embeddings", False))
    rest = target.num_parameters - embedding - (0 if is_tied else head)
    return max(rest, 0) / target.num_layers, float(head)


def read_norm_eps(target: HFModel) -> float:
    """Read the epsilon of the target's norms. The native decoder uses it for the adapter's norm too."""
    config = target.model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_eps"))
    return float(next((eps for eps in found if eps), DEFAULT_NORM_EPS))
