"""Rounded weights in the published layouts of GPTQ, AWQ and compressed-tensors, unpacked in plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import INT4, INT8, QuantizedWeight

WORD_BITS = 32  # bits of a packed integer
PACKED_BITS = (2, 4, 8)  # divisors of a word; 3-bit weights of GPTQ cross words
AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of 8 consecutive outputs
CODE_LIMITS = {INT8: (-128, 127), INT4: (-8, 7)}
ROW_GROUP = 128  # inputs of a group of the int4 kernel if a row has one scale
GROUP_UNIT, MAX_GROUP = 16, 1024  # as the kernel needs; see `quantise`


@dataclass(frozen=True)
class RoundedGrid:
    """Matrix [n, k] as codes times scales."""

    codes: Tensor  # [n, k] int16, zero points subtracted; or float8
    scale: Tensor  # [n or 1, groups]
    groups: Tensor | None = None  # [k] group of each input; None = one group

    def decode(self) -> Tensor:
        """Return the matrix [n, k] in float32."""
        scale = self.scale.float()
        return self.codes.float() * (scale if self.groups is None else scale[:, self.groups])

    def fit_kernel(self, kind: int) -> QuantizedWeight | None:
        """Express the matrix in the grid of a kernel, INT8 or INT4; None if its values are not exact there."""
        if self.codes.is_floating_point():
            return None
        least, most = self.codes.aminmax()
        if least < CODE_LIMITS[kind][0] or most > CODE_LIMITS[kind][1]:
            return None
        n, k = self.codes.shape
        scale = self.scale.expand(n, -1)
        if kind == INT8:
            is_row = self.groups is None
            return QuantizedWeight(self.codes.to(torch.int8), scale[:, 0].float(), INT8) if is_row else None
        if self.groups is None:
            width, scale = ROW_GROUP, scale.expand(n, -(-k // ROW_GROUP))
        else:
            width = -(-k // scale.shape[1])
            if width % GROUP_UNIT or width > MAX_GROUP or not torch.equal(self.groups, torch.arange(k) // width):
                return None
        rounded = scale.bfloat16()
        is_exact = torch.equal(rounded.double(), scale.double())
        return QuantizedWeight(self.codes.to(torch.int8), rounded.contiguous(), INT4, width) if is_exact else None


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., w] to unsigned numbers [..., w * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2).short()


def unpack_gptq(parts: Mapping[str, Tensor], bits: int, zero_offset: int) -> RoundedGrid:
    """Unpack a matrix of GPTQ.

    Args:
        parts: `qweight` [k * bits / 32, n], `qzeros` [groups, n * bits / 32], `scales` [groups, n], and maybe `g_idx`
            [k], the group of each input.
        bits: bits of a weight.
        zero_offset: number to add to stored zero points: 1 in format "gptq", 0 in "gptq_v2".
    """
    codes = unpack_words(parts["qweight"].T, bits)  # [n, k]
    zeros = unpack_words(parts["qzeros"], bits).T + zero_offset  # [n, groups]
    index = parts.get("g_idx")
    return _make_grid(codes, zeros, parts["scales"].T, None if index is None else index.long())


def unpack_awq(parts: Mapping[str, Tensor]) -> RoundedGrid:
    """Unpack a matrix of AWQ, version "gemm".

    Args:
        parts: `qweight` [k, n / 8], `qzeros` [groups, n / 8] and `scales` [groups, n].
    """
    codes, zeros = _unpack_awq_words(parts["qweight"]), _unpack_awq_words(parts["qzeros"])
    return _make_grid(codes.T.contiguous(), zeros.T, parts["scales"].T)


def _unpack_awq_words(words: Tensor) -> Tensor:
    numbers = unpack_words(words, AWQ_BITS).view(len(words), -1, len(AWQ_ORDER))
    return numbers[..., list(AWQ_ORDER)].flatten(1)


def unpack_compressed(parts: Mapping[str, Tensor], bits: int, block: tuple[int, int] | None = None) -> RoundedGrid:
    """Unpack a matrix of compressed-tensors: pack-quantized, int-quantized, naive-quantized or float-quantized.

    Args:
        parts: `weight` [n, k] in int8 or float8, or `weight_packed` [n, k * bits / 32] with `weight_shape`;
            `weight_scale`; and maybe `weight_zero_point` and `weight_g_idx`.
        bits: bits of a packed weight.
        block: rows and columns that share a scale; the last block may be cut off. Default None = equal parts of the
            matrix, as many as there are scales.
    """
    zeros, index, scale = parts.get("weight_zero_point"), parts.get("weight_g_idx"), parts["weight_scale"]
    if "weight_packed" in parts:
        n, k = (int(size) for size in parts["weight_shape"])
        offset = 1 << bits - 1
        codes = unpack_words(parts["weight_packed"], bits)[:, :k] - offset
        if zeros is not None and zeros.dtype is torch.int32:  # packed along the outputs
            zeros = unpack_words(zeros.T, bits)[:, :n].T - offset
    else:
        codes = parts["weight"]
        codes = codes if codes.is_floating_point() else codes.short()
    rows = scale.numel() if scale.dim() < 2 else len(scale)
    scale = _repeat_rows(scale.reshape(rows, -1), len(codes), block)
    if zeros is not None:
        zeros = _repeat_rows(zeros.reshape(rows, -1), len(codes), block)
    return _make_grid(codes, zeros, scale, None if index is None else index.long(), block and block[1])


def _repeat_rows(values: Tensor, n: int, block: tuple[int, int] | None) -> Tensor:
    """Repeat the values of blocks for each row. Values of the whole matrix stay one row."""
    if len(values) in (1, n):
        return values
    return values[number_groups(n, len(values), block and block[0])]


def _make_grid(
    codes: Tensor, zeros: Tensor | None, scale: Tensor, index: Tensor | None = None, width: int | None = None
) -> RoundedGrid:
    """Make a grid of codes [n, k], zero points and scales [n or 1, groups]. `index` has the group of each input."""
    groups = None
    if scale.shape[1] > 1:
        groups = number_groups(codes.shape[1], scale.shape[1], width) if index is None else index
        if len(groups) != codes.shape[1] or not 0 <= groups.min() <= groups.max() < scale.shape[1]:
            raise ForedraftError(f"{codes.shape[1]} inputs belong to {len(groups)} groups or to missing ones")
    if zeros is not None and zeros.any():
        zeros = zeros if groups is None else zeros[:, groups]
        codes = codes.float() - zeros.float() if codes.is_floating_point() else codes - zeros.short()
    return RoundedGrid(codes, scale, groups)


def number_groups(size: int, groups: int, width: int | None = None) -> Tensor:
    """Return the group of each of `size` inputs or outputs. Groups have `width` members, or equal parts of `size`."""
    if width is None and size % groups:
        raise ForedraftError(f"{size} weights are stored with {groups} scales, which does not divide them")
    if width is not None and -(-size // width) != groups:
        raise ForedraftError(f"{size} weights in blocks of {width} are stored with {groups} scales")
    return torch.arange(size) // (width or size // groups)
