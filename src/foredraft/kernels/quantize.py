"""Weights of 8 and 4 bits: rounding, packing, and the product in plain torch.

int8 has one scale per output, int4 one per output and group of inputs. Activations are rounded to 8 bits with one scale
per group of a row, so the product of a group is exact in integers. Groups are added in float32 in order. So the native
kernel gives the same bits as the torch code below, on every instruction set.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PANEL, PackedWeight

GROUP_SIZE = 32  # inputs that share a scale
INT8, INT4 = 2, 3  # as in foredraft.h
QUANTIZED_KINDS = {"int8": INT8, "int4": INT4}
STEP_INPUTS = {INT8: 4, INT4: 8}  # adjacent inputs in a panel
# multiples of the scale that fits the largest weight of a group; a smaller one clips it but rounds the others better
SCALE_FACTORS = (0.9, 0.95, 1.0, 1.06, 1.12)
CHUNK_WEIGHTS = 1 << 20  # weights quantised or packed at a time
MAX_CHUNK_ELEMENTS = 1 << 25  # numbers in a temporary of the slow product

PackWeight = Callable[[Tensor, Tensor | None, Arena], PackedWeight]


def check_quantization(name: str | None) -> None:
    """Raise ForedraftError for an unknown quantization; None is valid."""
    if name is not None and name not in QUANTIZED_KINDS:
        raise ForedraftError(f"unknown quantization {name!r}; use {' or '.join(QUANTIZED_KINDS)}")


def select_packers(name: str | None) -> tuple[PackWeight, PackWeight]:
    """Return the functions that pack a model's matrices and its lm_head. The lm_head has 8 bits or more."""
    check_quantization(name)
    if name is None:
        return PackedWeight.pack, PackedWeight.pack

    def pack_as(kind: int) -> PackWeight:
        return lambda weight, bias, arena: pack(weight, bias, arena, kind)

    return pack_as(QUANTIZED_KINDS[name]), pack_as(INT8)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [n, k] as integers times scales."""

    codes: Tensor  # [n, k] int8; -127..127, or -8..7 in int4
    scale: Tensor  # int8: [n] float32; int4: [n, groups] bfloat16
    kind: int
    group: int = GROUP_SIZE

    def dequantise(self) -> Tensor:
        """Return the exact product of codes and scales, [n, k] float64."""
        scale = self.scale.double()
        if self.kind == INT8:
            return self.codes * scale[:, None]
        return self.codes * scale.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


def quantise(weight: Tensor, kind: int, group: int = GROUP_SIZE) -> QuantizedWeight:
    """Round [n, k] of any floating type to the nearest codes. Raises ForedraftError if it is not finite."""
    assert group % 16 == 0, "whole vectors"
    assert group <= 1024, "float32 holds the sums of a group exactly"
    n, k = weight.shape
    groups = -(-k // group)
    codes = torch.empty(n, k, dtype=torch.int8)
    scale = torch.empty(n, dtype=torch.float32) if kind == INT8 else torch.empty(n, groups, dtype=torch.bfloat16)
    rows = max(CHUNK_WEIGHTS // max(k, 1), 1)
    for start in range(0, n, rows):
        part = weight.detach()[start : start + rows].float()
        if kind == INT8:
            found, scale[start : start + rows] = _round_int8(part)
        else:
            cut = F.pad(part, (0, groups * group - k)).view(len(part), groups, group)
            found, scale[start : start + rows] = _round_int4(cut)
        codes[start : start + rows] = found.view(len(part), -1)[:, :k]
    if not scale.isfinite().all():
        raise ForedraftError("a weight that is not finite cannot be quantised; load the model without quantization")
    return QuantizedWeight(codes, scale, kind, group)


def _round_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(-1) / 127
    inverse = torch.where(scale > 1e-30, 1 / scale, 0)
    # a non-finite scale must stay, so that the caller detects it
    return (rows * inverse[:, None]).round_(), torch.where(scale <= 1e-30, 0, scale)


def _round_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., g] to codes [..., g] and scales [...]. The scale's sign gives the largest weight the code -8."""
    low, high = groups.amin(-1), groups.amax(-1)
    fitting = torch.where(high > -low, high, low) / -8
    best_codes, best_scale, least = torch.zeros_like(groups), torch.zeros_like(fitting), None
    for share in SCALE_FACTORS:
        scale = (fitting * share).bfloat16().float()
        inverse = torch.where(scale.abs() > 1e-30, 1 / scale, 0)
        codes = (groups * inverse[..., None]).round_().clamp_(-8, 7)
        error = (codes * scale[..., None]).sub_(groups).square_().sum(-1)
        is_better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        least = error if least is None else torch.where(is_better, error, least)
        best_codes = torch.where(is_better[..., None], codes, best_codes)
        best_scale = torch.where(is_better, scale, best_scale)
    return best_codes, torch.where(best_scale.abs() <= 1e-30, 0, best_scale)


def pack(weight: Tensor, bias: Tensor | None, arena: Arena, kind: int, group: int = GROUP_SIZE) -> PackedWeight:
    """Quantise [n, k] and pack it for the native kernel."""
    return pack_codes(quantise(weight, kind, group), bias, arena)


def pack_codes(q: QuantizedWeight, bias: Tensor | None, arena: Arena) -> PackedWeight:
    """Pack a quantised weight in the layout of kernels/cpu/quant.h."""
    n, k = q.codes.shape
    panels = -(-n // PANEL)
    steps, groups = -(-k // STEP_INPUTS[q.kind]), -(-k // q.group)
    size = steps * PANEL * 4 + (PANEL * 4 if q.kind == INT8 else groups * PANEL * 2)
    data = arena.allocate(panels, size, dtype=torch.uint8)
    at_once = max(CHUNK_WEIGHTS // max(k * PANEL, 1), 1)
    for first in range(0, panels, at_once):
        last = min(first + at_once, panels)
        rows = slice(first * PANEL, min(last * PANEL, n))
        data[first:last] = _build_panels(q, q.codes[rows], q.scale[rows], last - first)[:, :size]
    return PackedWeight(data, n, k, q.kind, None if bias is None else bias.detach().float().clone(), None, q.group)


def _build_panels(q: QuantizedWeight, codes: Tensor, scale: Tensor, panels: int) -> Tensor:
    """Lay out panels as [panels, bytes]; in int4 the last group is padded to a whole one."""
    k, step = codes.shape[1], STEP_INPUTS[q.kind]
    missing = panels * PANEL - len(codes)
    width = -(-k // step) * step if q.kind == INT8 else -(-k // q.group) * q.group
    offset = 128 if q.kind == INT8 else 8
    codes = F.pad(codes, (0, width - k, 0, missing)).to(torch.int16).add_(offset).to(torch.uint8)
    if q.kind == INT8:
        lanes = codes.view(panels, PANEL, width // 4, 4).transpose(1, 2).reshape(panels, -1)
        scales = F.pad(scale, (0, missing)).view(panels, PANEL).view(torch.uint8)
        return torch.cat([scales, lanes], 1)
    pairs = codes.view(panels, PANEL, width // 8, 2, 4)
    lanes = (pairs[..., 0, :] | pairs[..., 1, :] << 4).transpose(1, 2)  # [panels, steps, 32, 4]
    groups = width // q.group
    lanes = lanes.reshape(panels, groups, -1)
    scales = F.pad(scale, (0, 0, 0, missing)).view(panels, PANEL, groups).transpose(1, 2).contiguous()
    return torch.cat([scales.view(torch.uint8), lanes], 2).flatten(1)


def unpack(weight: PackedWeight) -> QuantizedWeight:
    """Return the quantised weight that was packed, exactly."""
    n, k, panels = weight.n, weight.k, len(weight.data)
    if weight.kind == INT8:
        scale = weight.data[:, : PANEL * 4].contiguous().view(torch.float32).flatten()[:n]
        lanes = weight.data[:, PANEL * 4 :].reshape(panels, -1, PANEL, 4).transpose(1, 2).reshape(panels * PANEL, -1)
        return QuantizedWeight((lanes[:n, :k].to(torch.int16) - 128).to(torch.int8), scale, INT8, weight.group)
    groups = -(-k // weight.group)
    whole = PANEL * 2 + weight.group // 8 * PANEL * 4
    blocks = F.pad(weight.data, (0, groups * whole - weight.data.shape[1])).view(panels, groups, whole)
    scale = blocks[..., : PANEL * 2].contiguous().view(torch.bfloat16).transpose(1, 2).reshape(-1, groups)[:n]
    lanes = blocks[..., PANEL * 2 :].reshape(panels, -1, PANEL, 1, 4)
    halves = torch.cat([lanes & 15, lanes >> 4], 3).transpose(1, 2).reshape(panels * PANEL, -1)
    return QuantizedWeight((halves[:n, :k].to(torch.int16) - 8).to(torch.int8), scale.contiguous(), INT4, weight.group)


def round_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round [T, k] float32 to integers [T, groups, g], as float32, and scales [T, groups], as in the kernel."""
    cut = F.pad(x, (0, -x.shape[1] % group)).view(len(x), -1, group)
    top = cut.abs().amax(-1)
    is_used = top > 1e-30
    # a tensor of 127, because torch computes 127 / top by the reciprocal, which rounds twice
    inverse = torch.where(is_used, torch.full_like(top, 127) / top, 0)
    codes = (cut * inverse[..., None]).round()
    scale = torch.where(is_used, top / 127, 0)
    return codes.nan_to_num(0, 0, 0), torch.where(cut.isfinite().all(-1), scale, torch.nan)


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply [T, k] -> [T, n] float32 in plain torch, with the bits of the native kernel; slow."""
    q = unpack(weight)
    codes, scale = round_activations(x.float(), weight.group)  # [T, G, g], [T, G]
    groups = codes.shape[1]
    grid = F.pad(q.codes.float(), (0, groups * weight.group - weight.k)).view(weight.n, groups, weight.group)
    out = torch.zeros(len(x), weight.n, dtype=torch.float32)
    rows = max(MAX_CHUNK_ELEMENTS // max(weight.n * groups, 1), 1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        # integers below 2^24 are exact in float32 in any order
        sums = torch.bmm(codes[part].transpose(0, 1), grid.permute(1, 2, 0))  # [G, rows, n]
        for g in range(groups):
            product = sums[g] * scale[part, g, None]
            if q.kind == INT4:
                product *= q.scale[:, g].float()
            out[part] += product
    if q.kind == INT8:
        out *= q.scale
    return out if weight.bias is None else out + weight.bias
