"""Compiles the Triton kernels for GPUs that are not there, and prints what each needs, one JSON object per line.

This is a process of its own: in the process of the tests, triton runs kernels in its interpreter and compiles none.
Arguments: "main" or "all", the compute capabilities as in 80,90.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foredraft.kernels.gpu import (
    attention,
    chain_walk,
    layer_norm,
    move,
    norm,
    product,
    row_records,
    store,
    tree_walks,
)  # fmt: skip
from foredraft.kernels.gpu.verify import WalkPlan

WARP = 32
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
INTEGERS = {"slots": "*i64", "sources": "*i64", "targets": "*i64", "addresses": "*i64", "widths": "*i32"}
ROWS = dict.fromkeys(("pages", "page_at", "tails", "tail_at", "starts", "tail", "first_row"), "*i32")
FLOATS = {"parts": "*fp32", "sums": "*fp32", "cos": "*fp32", "sin": "*fp32", "scale": "fp32", "softcap": "fp32",
          "eps": "fp32"}  # fmt: skip

ALIGNED = {"weight_row"}  # numbers that are multiples of 16 for real models
WALKS = {"logits": "*bf16", "q": "*fp32", "table": "*fp32", "request_floats": "*fp32", "request_longs": "*i64",
         "request_doubles": "*fp64", "record_floats": "*fp32", "totals": "*fp64", "draft_sums": "*fp64",
         "scratch": "*fp64", "weights": "*fp64"} | dict.fromkeys(
             ("requests", "rows", "records", "shortlists", "draft_kinds", "out"), "*i32")  # fmt: skip


@dataclass(frozen=True)
class CompiledKernel:
    """Needs of a compiled kernel."""

    name: str
    capability: int
    shared: int  # bytes of shared memory
    registers: int  # of a thread
    spilled: int  # bytes of a thread in local memory
    mma_sync: int  # products of M = 16
    other_products: int  # of larger M, in another order
    fused: int  # additions fused with a product of float32
    async_copies: int  # copies to shared memory that overlap with products


def compile_kernel(
    name: str,
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    capability: int,
    own_types: dict[str, str] | None = None,
    **options: Any,
) -> CompiledKernel:
    """Compile a kernel. Arguments without a type of their own are numbers if the name has a `_`, else of `dtype`."""
    names = kernel.arg_names
    types = FLOATS | ROWS | INTEGERS | (own_types or {})
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg) or ("i32" if is_number(arg) else f"*{dtype}")
        for arg in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(names)
        if signature[arg].startswith("*") or (arg in ALIGNED and arg not in constants)
    }
    values = {(names.index(arg),): value for arg, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False} | options
    made = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    ptx = made.asm["ptx"]
    registers, spilled = read_usage(made.asm["cubin"])
    return CompiledKernel(
        name, capability, made.metadata.shared, registers, spilled, ptx.count("mma.sync"),
        len(re.findall(r"wgmma\.mma|tcgen05\.mma", ptx)), ptx.count("fma.rn.f32"),
        len(re.findall(r"cp\.async\.c[ag]", ptx)),
    )  # fmt: skip


def is_number(arg: str) -> bool:
    return arg in ("window",) or "_" in arg


def read_usage(cubin: bytes) -> tuple[int, int]:
    """Read the registers and the bytes of local memory and stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def compile_attention(
    capability: int, dtype: str, width: int, group: int, is_whole: bool, has_all: bool = False
) -> CompiledKernel:
    """Compile the attention of a layer, as `attend` launches it; with a soft-cap and sinks if `has_all`."""
    plan = attention.AttentionPlan.make(group, width, SIZES[dtype])
    padded = attention.pad_width(width)
    constants = {
        "HEADS": 8 * group, "KV_HEADS": 8, "D": width, "DV": width, "DP": padded, "DVP": padded, "PAGE": 16,
        "M": plan.lines, "ROWS": plan.rows, "TILE": plan.tile, "SPLIT": plan.split, "IS_WHOLE": is_whole,
        "HAS_CAP": has_all, "HAS_SINKS": has_all, "DOT_FP32": False,
    }  # fmt: skip
    name = f"attention {dtype} {width} group {group}" + " whole" * is_whole + " cap sinks" * has_all
    return compile_kernel(
        name, attention.attend_part, dtype, constants, capability, num_warps=plan.num_warps, num_stages=plan.num_stages
    )


def compile_others(capability: int, dtype: str = "bf16") -> Iterator[CompiledKernel]:
    """Compile the other kernels for a layer of Llama-3-8B."""
    yield compile_kernel(
        "join", attention.attend_join, dtype,
        {"HEADS": 32, "DV": 128, "DVP": 128, "SPLIT": attention.SPLIT, "HAS_SINKS": True}, capability, num_warps=1,
    )  # fmt: skip
    yield compile_kernel(
        "store", store.store_rows, dtype, {"D": 128, "DV": 128, "HEADS": 8, "KP": 1024, "VP": 1024}, capability
    )
    yield compile_kernel(
        "rotate and store", store.rotate_and_store_rows, dtype,
        {"HEADS": 32, "KV_HEADS": 8, "D": 128, "DV": 128, "HALF": 64, "HALF_PAD": 64, "PAD": 128, "VALUE_PAD": 128},
        capability, num_warps=1,
    )  # fmt: skip
    yield compile_kernel("move", move.move_slots, dtype, {"MOVES": 16, "COLUMNS": 256}, capability)
    yield compile_kernel(
        "norm", norm.normalize_row, dtype,
        {"WIDTH": 4096, "PAD": 4096, "HAS_RESIDUAL": True, "IS_OFFSET": False, "IS_LATE": False},
        capability, num_warps=8,
    )  # fmt: skip
    yield compile_kernel(
        "layer norm", layer_norm.normalize_layer_row, dtype,
        {"WIDTH": 4096, "PAD": 4096, "HAS_WEIGHT": True, "HAS_BIAS": True}, capability, num_warps=8,
    )  # fmt: skip


def compile_product(
    capability: int, dtype: str, outputs: int, inputs: int, has_bias: bool = False
) -> Iterator[CompiledKernel]:
    """Compile the product with a weight, and the join of its splits if it has several, as `multiply` launches them."""
    plan = product.ProductPlan.make(outputs, inputs, SIZES[dtype])
    shape = {"N": outputs, "SPLITS": plan.splits, "HAS_BIAS": has_bias}
    constants = shape | {
        "K": inputs, "M": plan.lines, "OUTPUTS": plan.outputs, "INPUTS": plan.inputs, "DOT_FP32": False,
        "weight_column": 1,
    }  # fmt: skip
    name = f"{dtype} {outputs} x {inputs}, splits {plan.splits}" + " bias" * has_bias
    yield compile_kernel(
        f"product {name}", product.multiply_part, dtype, constants, capability,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if plan.splits > 1:
        constants = shape | {"NUMBERS": product.JOINED_NUMBERS}
        yield compile_kernel(f"join of splits {name}", product.join_splits, dtype, constants, capability)


def compile_walks(capability: int, logits: str = "bf16", q: str = "fp32") -> Iterator[CompiledKernel]:
    """Compile the kernels of a verification."""
    plan = WalkPlan()
    types, sizes = WALKS | {"logits": f"*{logits}", "q": f"*{q}"}, {"TILE": plan.tile}
    for name, kernel, constants, num_warps in (
        ("rows", row_records.describe_rows, sizes | {"LIST": plan.shortlist}, plan.num_warps),
        ("drafts", row_records.describe_drafts, sizes, plan.num_warps),
        ("samples", tree_walks.walk_samples, {}, 1),
        ("trials", tree_walks.walk_trials, sizes | {"HAS_Q": True}, plan.num_warps),
        ("trials without q", tree_walks.walk_trials, sizes | {"HAS_Q": False}, plan.num_warps),
        ("chain", chain_walk.walk_chain, sizes | {"HAS_Q": True}, plan.num_warps),
    ):
        yield compile_kernel(
            f"verify {name} {logits} {q}", kernel, logits, constants, capability, types, num_warps=num_warps
        )  # fmt: skip


def compile_all(capability: int) -> Iterator[CompiledKernel]:
    """Compile every kernel for every type, width and group."""
    yield from compile_others(capability)
    yield from compile_others(capability, "fp32")
    for dtype in ("bf16", "fp16", "fp32"):
        for outputs, inputs in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (97, 40)):
            yield from compile_product(capability, dtype, outputs, inputs, has_bias=outputs == inputs)
    yield from compile_walks(capability)
    yield from compile_walks(capability, "fp16", "fp64")
    for dtype, width, group in (
        ("bf16", 64, 1), ("bf16", 64, 8), ("bf16", 128, 4), ("bf16", 128, 20), ("bf16", 80, 4), ("bf16", 256, 2),
        ("fp16", 128, 8), ("fp32", 64, 4), ("fp32", 128, 4), ("fp32", 256, 8),
    ):  # fmt: skip
        for is_whole in (False, True):
            yield compile_attention(capability, dtype, width, group, is_whole, has_all=is_whole)


def main(selection: str, capabilities: str) -> None:
    targets = [int(capability) for capability in capabilities.split(",")]
    for capability in targets:
        if selection == "all":
            found = compile_all(capability)
        else:
            found = iter(
                [
                    compile_attention(capability, "bf16", 128, 4, False),
                    *compile_product(capability, "bf16", 4096, 14336),
                ]
            )
        for kernel in found:
            print(json.dumps(asdict(kernel)), flush=True)
    if selection == "main":
        for kernel in chain(compile_others(targets[0]), compile_walks(targets[0])):
            print(json.dumps(asdict(kernel)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
