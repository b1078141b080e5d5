"""Products y = x W^T + b whose rows have the same bits in every pass.

A program computes 16 rows and a block of outputs over one split of the inputs. The number of splits is a function of
the shape of W, never of the number of rows or of the GPU, and the splits of an output are joined in order. So the bits
of a row depend on the row and on W alone. cuBLAS chooses tile and splits by the number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.checks import DTYPES

LINES = 16  # rows of a program: the smallest M of tl.dot, and the same for one token, a draft and a prompt
MAX_OUTPUTS, MIN_OUTPUTS = 64, 16  # outputs of a program
TILE_BYTES = 128  # of a row of W in one tile
MIN_INPUTS = 16  # the K of tl.dot
MULTIPROCESSORS = 132  # of an H100 or H200. A constant, so that every GPU has the same splits
MAX_SPLITS = 16
MIN_TILES = 4  # of a split
JOINED_NUMBERS = 1024  # of a program that joins splits


@dataclass(frozen=True)
class ProductPlan:
    """Sizes of the programs. They depend on the weight alone, so all passes of a model add in the same order."""

    outputs: int  # of a program
    inputs: int  # of a tile
    splits: int
    lines: int = LINES
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def make(cls, num_outputs: int, num_inputs: int, itemsize: int) -> "ProductPlan":
        """Choose the sizes: as many splits as occupy the multiprocessors with a program each, if they are long enough.

        Args:
            num_outputs: rows N of W.
            num_inputs: columns K of W.
            itemsize: bytes of a number of W.
        """
        outputs = _limit_power(num_outputs, MIN_OUTPUTS, MAX_OUTPUTS)
        inputs = _limit_power(num_inputs, MIN_INPUTS, TILE_BYTES // itemsize)
        blocks, tiles = -(-num_outputs // outputs), -(-num_inputs // inputs)
        splits = 1
        while splits < MAX_SPLITS and blocks * splits < MULTIPROCESSORS and tiles >= 2 * splits * MIN_TILES:
            splits *= 2
        return cls(outputs, inputs, splits)


def _limit_power(number: int, low: int, high: int) -> int:
    """Return the power of two that holds `number`, within limits."""
    return min(max(1 << (number - 1).bit_length(), low), high)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_part(
    x, weight, bias, out, parts, num_rows, weight_row, weight_column,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply M rows by a block of outputs over one split of the inputs. Grid (blocks of rows, of outputs, splits).

    Blocks of rows come first: programs that run together read the same part of W, which the cache then holds.
    """
    TILES: tl.constexpr = (K + INPUTS * SPLITS - 1) // (INPUTS * SPLITS)  # of a split; the last one may have fewer
    block, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = block * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = row < num_rows, column < N
    begin = split * TILES * INPUTS
    i = begin + tl.arange(0, INPUTS)
    x_at = x + row.to(tl.int64)[:, None] * K + i[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * weight_row + i.to(tl.int64)[None, :] * weight_column
    acc = tl.zeros([M, OUTPUTS], tl.float32)
    for tile in range(TILES):
        is_inside = i + tile * INPUTS < K
        a = tl.load(x_at, mask=is_row[:, None] & is_inside[None, :], other=0.0)
        w = tl.load(weight_at, mask=is_column[:, None] & is_inside[None, :], other=0.0)
        if DOT_FP32:
            acc = tl.dot(a.to(tl.float32), tl.trans(w).to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        x_at += INPUTS
        weight_at += INPUTS * weight_column
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    is_stored = is_row[:, None] & is_column[None, :]
    if SPLITS == 1:
        if HAS_BIAS:
            acc = acc + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_stored)
    else:
        tl.store(parts + (split * num_rows.to(tl.int64) * N + at), acc, mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def join_splits(
    parts, bias, out, num_rows,
    N: tl.constexpr, SPLITS: tl.constexpr, NUMBERS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add the splits of every output in order, then the bias. Grid (blocks of outputs of all rows,)."""
    total = num_rows.to(tl.int64) * N
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = at < total
    acc = tl.load(parts + at, mask=is_inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        acc = acc + tl.load(parts + (split * total + at), mask=is_inside, other=0.0)
    if HAS_BIAS:
        acc = acc + tl.load(bias + at % N, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_inside)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, plan: ProductPlan | None = None) -> Tensor:
    """Compute y = x W^T + b with sums in float32 and one rounding.

    Args:
        x: [..., K].
        weight: [N, K], with any strides.
        bias: [N]. Default None = zero.
        plan: sizes of the programs. Default None = those of the weight.

    Returns:
        [..., N] in the type of x.

    Raises:
        ForedraftError: the kernel does not take these tensors.
    """
    (num_outputs, num_inputs), kind = weight.shape, x.dtype
    if x.shape[-1] != num_inputs or (bias is not None and bias.shape != (num_outputs,)):
        other = "" if bias is None else f" and bias {list(bias.shape)}"
        raise ForedraftError(f"rows {list(x.shape)} do not fit weight {list(weight.shape)}{other}")
    if kind not in DTYPES or weight.dtype != kind or (bias is not None and bias.dtype != kind):
        raise ForedraftError(f"x and weight must be both bfloat16, float16 or float32; got {kind} and {weight.dtype}")
    rows = x.reshape(-1, num_inputs).contiguous()
    num_rows = len(rows)
    out = x.new_empty(*x.shape[:-1], num_outputs)
    if num_rows == 0:
        return out
    plan = plan or ProductPlan.make(num_outputs, num_inputs, weight.element_size())
    has_parts = plan.splits > 1
    parts = x.new_empty((plan.splits, num_rows, num_outputs) if has_parts else (0,), dtype=torch.float32)
    bias_or_none = out if bias is None else bias.contiguous()  # not read without a bias
    with torch.cuda.device_of(x):  # triton launches on the current device
        multiply_part[(triton.cdiv(num_rows, plan.lines), triton.cdiv(num_outputs, plan.outputs), plan.splits)](
            rows, weight, bias_or_none, out, parts, num_rows, weight.stride(0), weight.stride(1),
            N=num_outputs, K=num_inputs, M=plan.lines, OUTPUTS=plan.outputs, INPUTS=plan.inputs, SPLITS=plan.splits,
            HAS_BIAS=bias is not None, DOT_FP32=x.device.type == "cpu",
            num_warps=plan.num_warps, num_stages=plan.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        if has_parts:
            join_splits[(triton.cdiv(num_rows * num_outputs, JOINED_NUMBERS),)](
                parts, bias_or_none, out, num_rows,
                N=num_outputs, SPLITS=plan.splits, NUMBERS=JOINED_NUMBERS, HAS_BIAS=bias is not None,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out
