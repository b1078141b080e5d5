"""Blocks of GGUF files against formulas for one weight, written from the structs of llama.cpp."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from foredraft.files.gguf import BLOCK_FORMATS
from foredraft.models.gguf_blocks import BLOCK_DECODERS, decode_blocks

Formula = Callable[[bytes, int], float]  # block, number of a weight -> weight


def read_half(block: bytes, start: int) -> float:
    return float(struct.unpack_from("<e", block, start)[0])


def read_signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def read_nibble(quants: bytes, i: int, count: int) -> int:
    """Weight i of 2 * count, whose lower halves come first."""
    return quants[i % count] >> (4 if i >= count else 0) & 15


def compute_q4_0(b: bytes, i: int) -> float:
    return read_half(b, 0) * (read_nibble(b[2:], i, 16) - 8)


def compute_q4_1(b: bytes, i: int) -> float:
    return read_half(b, 0) * read_nibble(b[4:], i, 16) + read_half(b, 2)


def compute_q5_0(b: bytes, i: int) -> float:
    fifth = int.from_bytes(b[2:6], "little") >> i & 1
    return read_half(b, 0) * (read_nibble(b[6:], i, 16) + 16 * fifth - 16)


def compute_q5_1(b: bytes, i: int) -> float:
    fifth = int.from_bytes(b[4:8], "little") >> i & 1
    return read_half(b, 0) * (read_nibble(b[8:], i, 16) + 16 * fifth) + read_half(b, 2)


def compute_q8_0(b: bytes, i: int) -> float:
    return read_half(b, 0) * read_signed(b[2 + i])


def read_scale_and_minimum(s: bytes, g: int) -> tuple[int, int]:
    if g < 4:
        return s[g] & 63, s[g + 4] & 63
    return s[g + 4] & 15 | s[g - 4] >> 6 << 4, s[g + 4] >> 4 | s[g] >> 6 << 4


def compute_q4_k(b: bytes, i: int) -> float:
    scale, minimum = read_scale_and_minimum(b[4:16], i // 32)
    quant = read_nibble(b[16 + i // 64 * 32 :], i % 64, 32)
    return read_half(b, 0) * scale * quant - read_half(b, 2) * minimum


def compute_q5_k(b: bytes, i: int) -> float:
    scale, minimum = read_scale_and_minimum(b[4:16], i // 32)
    quant = read_nibble(b[48 + i // 64 * 32 :], i % 64, 32) + 16 * (b[16 + i % 32] >> i // 32 & 1)
    return read_half(b, 0) * scale * quant - read_half(b, 2) * minimum


def compute_q2_k(b: bytes, i: int) -> float:
    quant = b[16 + i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3
    return read_half(b, 80) * (b[i // 16] & 15) * quant - read_half(b, 82) * (b[i // 16] >> 4)


def compute_q3_k(b: bytes, i: int) -> float:
    g = i // 16
    scale = (b[96 + g % 8] >> (4 if g >= 8 else 0) & 15) | (b[104 + g % 4] >> 2 * (g // 4) & 3) << 4
    quant = (b[32 + i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3) - (0 if b[i % 32] >> i // 32 & 1 else 4)
    return read_half(b, 108) * (scale - 32) * quant


def compute_q6_k(b: bytes, i: int) -> float:
    part, j = i // 128, i % 128
    low = read_nibble(b[part * 64 :], j, 64)
    high = b[128 + part * 32 + j % 32] >> j // 32 * 2 & 3
    return read_half(b, 208) * read_signed(b[192 + i // 16]) * (low + 16 * high - 32)


FORMULAS: dict[str, Formula] = {
    "F32": lambda b, i: float(struct.unpack("<f", b)[0]),
    "F16": lambda b, i: read_half(b, 0),
    "BF16": lambda b, i: float(struct.unpack("<f", b"\0\0" + b)[0]),
    "Q4_0": compute_q4_0,
    "Q4_1": compute_q4_1,
    "Q5_0": compute_q5_0,
    "Q5_1": compute_q5_1,
    "Q8_0": compute_q8_0,
    "Q2_K": compute_q2_k,
    "Q3_K": compute_q3_k,
    "Q4_K": compute_q4_k,
    "Q5_K": compute_q5_k,
    "Q6_K": compute_q6_k,
}


@pytest.mark.parametrize("form", BLOCK_FORMATS.values(), ids=lambda form: str(form.name))
def test_weights_of_a_block_are_those_of_its_formula(form) -> None:
    data = np.random.default_rng(form.size).integers(0, 256, (6, form.size), dtype=np.uint8)
    decoded = decode_blocks(form.name, torch.from_numpy(data)).double()
    expected = torch.tensor([[FORMULAS[form.name](row.tobytes(), i) for i in range(form.weights)] for row in data])
    assert decoded.shape == (6, form.weights)
    torch.testing.assert_close(decoded, expected.double(), rtol=1e-6, atol=1e-4, equal_nan=True)


def test_every_format_has_a_decoder() -> None:
    assert {form.name for form in BLOCK_FORMATS.values()} == set(BLOCK_DECODERS)
