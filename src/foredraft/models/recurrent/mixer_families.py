"""Classes of recurrent layers with native code: their projections and the parameters between them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.cpu.records import MixerRecord
from foredraft.kernels.mixers import DELTA, MAMBA2, MAX_TAPS, SHORT_CONV

HoldTensor = Callable[[Tensor], int]  # converts a tensor to float32, keeps it alive and returns its address
SILU = ("silu", "swish")


def _keep_order(module: Any) -> Tensor | None:
    return None


def _keep_scale(module: Any) -> Tensor | None:
    return None


@dataclass(frozen=True)
class MixerFamily:
    """Recurrent layers of one kind. A projected row is the outputs of `inputs`, concatenated."""

    inputs: tuple[str, ...]  # linear children that act on the input rows
    output: str  # linear child that yields the output rows
    is_supported: Callable[[Any], bool]  # of a layer of a known class
    build: Callable[[Any, HoldTensor], MixerRecord]  # record without projections
    num_small: int = 0  # last ones of `inputs`, with few outputs, which are not rounded to the grids of quantisation
    order: Callable[[Any], Tensor | None] = _keep_order  # [width] which output stands where; None = as stored
    factors: Callable[[Any], Tensor | None] = _keep_scale  # [width] of a projected row, in the stored order


def find_mixer_family(module: nn.Module) -> MixerFamily | None:
    """Find the native code of a recurrent layer; None if there is none.

    A layer that was prepared for packed rows has the name and the module of its original class among its bases.
    """
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("transformers.models.")}
    family = next((MIXERS[name] for name in sorted(names) if name in MIXERS), None)
    return family if family is not None and family.is_supported(module) else None


def list_projection_names(module: nn.Module) -> tuple[str, ...]:
    """List the names of the projections of a recurrent layer with native code."""
    family = find_mixer_family(module)
    return () if family is None else (*family.inputs, family.output)


def _has_taps(conv: nn.Conv1d) -> bool:
    return 2 <= conv.kernel_size[0] <= MAX_TAPS


def _hold_conv(conv: nn.Conv1d, hold: HoldTensor) -> dict[str, Any]:
    """Return the fields of a depthwise convolution."""
    return {
        "channels": conv.in_channels,
        "taps": conv.kernel_size[0],
        "conv_weight": hold(conv.weight.squeeze(1).T),
        "conv_bias": None if conv.bias is None else hold(conv.bias),
    }


# -- gated delta net: Qwen3.5 and Qwen3-Next


def _is_plain_delta(module: Any) -> bool:
    return module.activation in SILU and _has_taps(module.conv1d) and module.num_v_heads % module.num_k_heads == 0


def _build_delta(module: Any, hold: HoldTensor) -> MixerRecord:
    gate_at, inner = module.conv_dim, module.value_dim
    return MixerRecord(
        kind=DELTA,
        heads=module.num_v_heads,
        groups=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        norm_width=module.head_v_dim,
        width=gate_at + inner + 2 * module.num_v_heads,
        inner=inner,
        gate_at=gate_at,
        share_at=gate_at + inner,
        step_at=gate_at + inner + module.num_v_heads,
        eps=module.norm.variance_epsilon,
        rate=hold(-module.A_log.float().exp()),
        step_bias=hold(module.dt_bias),
        norm=hold(module.norm.weight),
        **_hold_conv(module.conv1d, hold),
    )


def _order_by_kind(module: Any) -> Tensor:
    """Order the outputs of Qwen3-Next, stored by group of heads, as queries, keys, values, gates, shares and steps."""
    groups, heads = module.num_k_heads, module.num_v_heads // module.num_k_heads
    sizes = (module.head_k_dim, module.head_k_dim, heads * module.head_v_dim, heads * module.head_v_dim)
    stored = torch.arange(groups * sum(sizes)).view(groups, -1)
    small = torch.arange(stored.numel(), stored.numel() + 2 * module.num_v_heads).view(groups, -1)
    parts = [*torch.split(stored, list(sizes), 1), *torch.split(small, heads, 1)]
    return torch.cat([part.flatten() for part in parts])


# -- Mamba-2: Granite 4, Bamba, Nemotron-H, Zamba-2, Falcon-H1


def _is_plain_mamba(module: Any) -> bool:
    has_whole_groups = module.num_heads % module.n_groups == 0
    return module.activation in SILU and _has_taps(module.conv1d) and has_whole_groups


def _build_mamba(module: Any, hold: HoldTensor) -> MixerRecord:
    return _describe_mamba(module, hold, module.norm, module.norm.group_size)


def _describe_mamba(module: Any, hold: HoldTensor, norm: Any, norm_width: int) -> MixerRecord:
    inner = module.intermediate_size
    least, most = module.time_step_limit
    return MixerRecord(
        kind=MAMBA2,
        heads=module.num_heads,
        groups=module.n_groups,
        key_dim=module.ssm_state_size,
        value_dim=module.head_dim,
        norm_width=norm_width,
        width=inner + module.conv_dim + module.num_heads,
        inner=inner,
        conv_at=inner,
        step_at=inner + module.conv_dim,
        eps=0.0 if norm is None else norm.variance_epsilon,
        min_step=least,
        max_step=most,
        rate=hold(-module.A_log.float().exp()),
        step_bias=hold(module.dt_bias),
        skip=hold(module.D),
        norm=None if norm is None else hold(norm.weight),
        **_hold_conv(module.conv1d, hold),
    )


def _is_plain_falcon(module: Any) -> bool:
    has_late_norm = not module.mamba_rms_norm or not module.norm.norm_before_gate
    return _is_plain_mamba(module) and has_late_norm and module.in_proj.bias is None


def _build_falcon(module: Any, hold: HoldTensor) -> MixerRecord:
    norm = module.norm if module.mamba_rms_norm else None
    return _describe_mamba(module, hold, norm, module.intermediate_size // (1 if norm is None else norm.n_groups))


def _scale_falcon(module: Any) -> Tensor:
    return module.mup_vector.flatten().float() * module.ssm_in_multiplier  # type: ignore[no-any-return]


# -- short convolution: LFM2


def _is_plain_conv(module: Any) -> bool:
    return _has_taps(module.conv)


def _build_conv(module: Any, hold: HoldTensor) -> MixerRecord:
    channels = module.conv.in_channels
    return MixerRecord(kind=SHORT_CONV, width=3 * channels, inner=channels, **_hold_conv(module.conv, hold))


QWEN3_5 = MixerFamily(
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj", _is_plain_delta, _build_delta, num_small=2
)
QWEN3_NEXT = MixerFamily(
    ("in_proj_qkvz", "in_proj_ba"), "out_proj", _is_plain_delta, _build_delta, num_small=1, order=_order_by_kind
)
MAMBA = MixerFamily(("in_proj",), "out_proj", _is_plain_mamba, _build_mamba)
FALCON_H1 = MixerFamily(("in_proj",), "out_proj", _is_plain_falcon, _build_falcon, factors=_scale_falcon)
LFM2 = MixerFamily(("in_proj",), "out_proj", _is_plain_conv, _build_conv)

# By transformers' name of the class.
MIXERS = {
    "Qwen3_5GatedDeltaNet": QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": QWEN3_5,
    "Qwen3NextGatedDeltaNet": QWEN3_NEXT,
    "GraniteMoeHybridMambaLayer": MAMBA,
    "BambaMixer": MAMBA,
    "Mamba2Mixer": MAMBA,
    "NemotronHMamba2Mixer": MAMBA,
    "Zamba2MambaMixer": MAMBA,
    "FalconH1Mixer": FALCON_H1,
    "Lfm2ShortConv": LFM2,
    "Lfm2MoeShortConv": LFM2,
    "Lfm3ShortConv": LFM2,
}
