"""Decoding of blocks of GGUF files to float32, by the published layouts of llama.cpp."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

NIBBLE = 15
K_SCALES = 12  # bytes of the scales and minima of Q4_K and Q5_K
K_QUANTS = 128  # bytes of the lower four bits of 256 weights


def decode_blocks(name: str, blocks: Tensor) -> Tensor:
    """Decode blocks.

    Args:
        name: format, a key of BLOCK_DECODERS.
        blocks: bytes [b, size of a block].

    Returns:
        Weights [b, weights of a block] in float32.
    """
    return BLOCK_DECODERS[name](blocks)


def _decode_floats(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype).float()


def _read_half(blocks: Tensor, start: int) -> Tensor:
    """Read a float16 of each block, [b, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _split_nibbles(quants: Tensor) -> Tensor:
    """Split [b, s] to [b, 2 s]: all lower halves, then all upper ones."""
    return torch.cat([quants & NIBBLE, quants >> 4], 1)


def _decode_q4(blocks: Tensor, has_minimum: bool) -> Tensor:
    codes = _split_nibbles(blocks[:, 4 if has_minimum else 2 :]).float()
    scale = _read_half(blocks, 0)
    return codes * scale + _read_half(blocks, 2) if has_minimum else (codes - 8) * scale


def _decode_q5(blocks: Tensor, has_minimum: bool) -> Tensor:
    start = 4 if has_minimum else 2
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1  # [b, 4, 8]
    codes = (_split_nibbles(blocks[:, start + 4 :]) | bits.flatten(1) << 4).float()
    scale = _read_half(blocks, 0)
    return codes * scale + _read_half(blocks, 2) if has_minimum else (codes - 16) * scale


def _decode_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _read_half(blocks, 0)


def _read_k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 8 scales and 8 minima of 6 bits from [b, 12]."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, high & NIBBLE | low >> 6 << 4], 1)
    return scales.float(), torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], 1).float()


def _decode_k(blocks: Tensor, fifth_bits: int) -> Tensor:
    """Decode Q4_K, or Q5_K with 32 `fifth_bits`: 8 groups of 32 weights, each with a scale and a minimum."""
    scales, minima = _read_k_scales(blocks[:, 4 : 4 + K_SCALES])
    quants = blocks[:, 4 + K_SCALES + fifth_bits :].view(-1, 4, 1, 32)
    codes = torch.cat([quants & NIBBLE, quants >> 4], 2).view(-1, 8, 32)
    if fifth_bits:
        top = blocks[:, None, 4 + K_SCALES : 4 + K_SCALES + fifth_bits]  # bit g belongs to group g
        codes = codes | (top >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    scales, minima = scales * _read_half(blocks, 0), minima * _read_half(blocks, 2)
    return (codes.float() * scales[..., None] - minima[..., None]).flatten(1)


def _split_pairs(quants: Tensor) -> Tensor:
    """Split two halves of 32 bytes to [b, 2, 4, 32] numbers of 2 bits."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return quants.view(-1, 2, 1, 32) >> shifts & 3


def _decode_q2_k(blocks: Tensor) -> Tensor:
    """Decode 16 groups of 16 weights, each with a scale and a minimum of 4 bits."""
    codes = _split_pairs(blocks[:, 16:80]).view(-1, 16, 16).float()
    scales, minima = (blocks[:, :16] & NIBBLE).float(), (blocks[:, :16] >> 4).float()
    scales, minima = scales * _read_half(blocks, 80), minima * _read_half(blocks, 82)
    return (codes * scales[..., None] - minima[..., None]).flatten(1)


def _decode_q3_k(blocks: Tensor) -> Tensor:
    """Decode 16 groups of 16 weights with scales of 6 bits; the third bit of a weight is inverted."""
    top = blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = (_split_pairs(blocks[:, 32:96]).view(-1, 8, 32) | top << 2).float() - 4
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, None, 104:108] >> shifts & 3).flatten(1)
    scales = ((_split_nibbles(blocks[:, 96:104]) | high << 4).float() - 32) * _read_half(blocks, 108)
    return (codes.view(-1, 16, 16) * scales[..., None]).flatten(1)


def _decode_q6_k(blocks: Tensor) -> Tensor:
    """Decode two halves of 128 weights, each with 64 bytes of lower and 32 bytes of upper bits."""
    low = blocks[:, :K_QUANTS].view(-1, 2, 1, 64)
    low = torch.cat([low & NIBBLE, low >> 4], 2).view(-1, 2, 4, 32)
    codes = (low | _split_pairs(blocks[:, K_QUANTS : K_QUANTS + 64]) << 4).float().view(-1, 16, 16) - 32
    scales = blocks[:, K_QUANTS + 64 : -2].view(torch.int8).float() * _read_half(blocks, blocks.shape[1] - 2)
    return (codes * scales[..., None]).flatten(1)


BLOCK_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _decode_floats(torch.float32),
    "F16": _decode_floats(torch.float16),
    "BF16": _decode_floats(torch.bfloat16),
    "Q4_0": lambda blocks: _decode_q4(blocks, False),
    "Q4_1": lambda blocks: _decode_q4(blocks, True),
    "Q5_0": lambda blocks: _decode_q5(blocks, False),
    "Q5_1": lambda blocks: _decode_q5(blocks, True),
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": lambda blocks: _decode_k(blocks, 0),
    "Q5_K": lambda blocks: _decode_k(blocks, 32),
    "Q6_K": _decode_q6_k,
}
