"""Decoding of rounded weights in the published layouts of GPTQ, AWQ and compressed-tensors, in plain torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.errors import ForedraftError

WORD_BITS = 32  # bits of a packed integer
PACKED_BITS = (2, 4, 8)  # divisors of a word; 3-bit weights of GPTQ cross words
AWQ_BITS = 4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of 8 consecutive outputs


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., w] to unsigned numbers [..., w * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def decode_gptq(parts: Mapping[str, Tensor], bits: int, zero_offset: int) -> Tensor:
    """Decode a matrix of GPTQ.

    Args:
        parts: `qweight` [k * bits / 32, n], `qzeros` [groups, n * bits / 32], `scales` [groups, n], and maybe `g_idx`
            [k], the group of each input.
        bits: bits of a weight.
        zero_offset: number to add to stored zero points: 1 in format "gptq", 0 in "gptq_v2".

    Returns:
        The matrix [n, k] in float32.
    """
    codes = unpack_words(parts["qweight"].T, bits)  # [n, k]
    zeros = unpack_words(parts["qzeros"], bits) + zero_offset  # [groups, n]
    groups = parts.get("g_idx")
    if groups is None:
        groups = _number_groups(codes.shape[1], len(zeros))
    return (codes - zeros.T[:, groups.long()]).float() * parts["scales"].float().T[:, groups.long()]


def decode_awq(parts: Mapping[str, Tensor]) -> Tensor:
    """Decode a matrix of AWQ, version "gemm".

    Args:
        parts: `qweight` [k, n / 8], `qzeros` [groups, n / 8] and `scales` [groups, n].

    Returns:
        The matrix [n, k] in float32.
    """
    codes, zeros = _unpack_awq(parts["qweight"]), _unpack_awq(parts["qzeros"])
    groups = _number_groups(len(codes), len(zeros))
    return ((codes - zeros[groups]).float() * parts["scales"].float()[groups]).T.contiguous()


def _unpack_awq(words: Tensor) -> Tensor:
    numbers = unpack_words(words, AWQ_BITS).view(len(words), -1, len(AWQ_ORDER))
    return numbers[..., list(AWQ_ORDER)].flatten(1)


def decode_compressed(parts: Mapping[str, Tensor], bits: int, block: tuple[int, int] | None = None) -> Tensor:
    """Decode a matrix of compressed-tensors: pack-quantized, int-quantized, naive-quantized or float-quantized.

    Args:
        parts: `weight` [n, k] in int8 or float8, or `weight_packed` [n, k * bits / 32] with `weight_shape`;
            `weight_scale`; and maybe `weight_zero_point` and `weight_g_idx`.
        bits: bits of a packed weight.
        block: rows and columns that share a scale; the last block may be cut off. Default None = equal parts of the
            matrix, as many as there are scales.

    Returns:
        The matrix [n, k] in float32.
    """
    zeros = parts.get("weight_zero_point")
    if "weight_packed" in parts:
        n, k = (int(size) for size in parts["weight_shape"])
        offset = 1 << bits - 1
        codes = (unpack_words(parts["weight_packed"], bits)[:, :k] - offset).float()
        if zeros is not None and zeros.dtype is torch.int32:  # packed along the outputs
            zeros = unpack_words(zeros.T, bits)[:, :n].T - offset
    else:
        codes = parts["weight"].float()
    groups = parts.get("weight_g_idx")
    if zeros is not None:
        codes = codes - _spread(zeros.float(), codes, groups, block)
    return codes * _spread(parts["weight_scale"].float(), codes, groups, block)


def _spread(values: Tensor, codes: Tensor, groups: Tensor | None, block: tuple[int, int] | None) -> Tensor:
    """Repeat scales or zero points of the tensor, of rows, of groups of inputs or of blocks to the shape [n, k]."""
    n, k = codes.shape
    if values.numel() == 1:
        return values.reshape(1, 1)
    values = values.reshape(len(values), -1)
    if len(values) != n:
        values = values[_number_groups(n, len(values), block and block[0])]
    if groups is not None and values.shape[1] > 1:
        return values[:, groups.long()]
    return values if values.shape[1] == 1 else values[:, _number_groups(k, values.shape[1], block and block[1])]


def _number_groups(size: int, groups: int, width: int | None = None) -> Tensor:
    """Return the group of each of `size` inputs or outputs. Groups have `width` members, or equal parts of `size`."""
    if width is None and size % groups:
        raise ForedraftError(f"{size} weights are stored with {groups} scales, which does not divide them")
    if width is not None and -(-size // width) != groups:
        raise ForedraftError(f"{size} weights in blocks of {width} are stored with {groups} scales")
    return torch.arange(size) // (width or size // groups)
