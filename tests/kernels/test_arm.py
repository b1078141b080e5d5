"""Kernels compiled for ARM, run in emulation.

Guards against lanes in another order, products of bytes with the signs exchanged, rows whose bits depend on other rows,
and a set that is chosen on a processor without its instructions.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.kernels import quantize
from foredraft.kernels.arena import Arena
from foredraft.kernels.attention import attend_reference
from foredraft.kernels.cpu.records import AttentionRecord, LinearRecord, SamplingRecord, WeightRecord
from foredraft.kernels.linear import PackedWeight, linear, linear_reference
from foredraft.kernels.rows import PackedRows
from foredraft.kernels.sampler import NativeSampler
from foredraft.models.forward_batch import Span
from tests.support.arm_machine import ARM, NO_SET, OLD_PROCESSOR, ArmMachine, build_program
from tests.support.library_setups import NATIVE, make_normal, use_library

pytestmark = [ARM, NATIVE]

SETS = ("neonbf16", "portable")
PACKERS: dict[str, Callable[[Tensor, Tensor | None, Arena], PackedWeight]] = {
    "bfloat16": lambda weight, bias, arena: PackedWeight.pack(weight.bfloat16(), bias, arena),
    "float32": PackedWeight.pack,
    "int8": lambda weight, bias, arena: quantize.pack(weight, bias, arena, quantize.INT8, 32),
    "int4": lambda weight, bias, arena: quantize.pack(weight, bias, arena, quantize.INT4, 32),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program(tmp_path_factory.mktemp("arm"))


@pytest.fixture
def machine(program: Path, tmp_path: Path) -> Iterator[ArmMachine]:
    with ArmMachine(program, tmp_path / "memory").map_memory() as machine:
        yield machine


def multiply(machine: ArmMachine, weight: PackedWeight, x: Tensor, instruction_set: str, threads: int = 1) -> Tensor:
    """Compute the product of activations and a packed matrix on the emulated processor."""
    parts = [None if part is None else machine.place(part) for part in (weight.data, weight.scale, weight.bias)]
    addresses = [None if part is None else part.data_ptr() for part in parts]
    record = machine.place_record(WeightRecord(*addresses, weight.n, weight.k, weight.kind, weight.group))
    inputs, out = machine.place(x), machine.place(torch.full((len(x), weight.n), torch.nan))
    pointer = ctypes.cast(record, ctypes.POINTER(WeightRecord))
    job = LinearRecord(pointer, inputs.data_ptr(), out.data_ptr(), machine.scratch, len(x))
    assert machine.run("linear", machine.place_record(job), instruction_set=instruction_set, threads=threads) == 0
    return out.clone()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", PACKERS)
def test_products_are_right_and_rows_do_not_depend_on_others(
    machine: ArmMachine, kind: str, instruction_set: str
) -> None:
    weight = PACKERS[kind](make_normal(75, 83, seed=0), make_normal(75, seed=1), Arena())
    x = make_normal(13, 83, seed=2)
    ours = multiply(machine, weight, x, instruction_set, threads=2)
    assert torch.equal(ours[5:6], multiply(machine, weight, x[5:6], instruction_set))
    assert torch.equal(ours[3:9], multiply(machine, weight, x[3:9], instruction_set))
    with use_library():
        here = linear(x, weight)
    if kind in ("int8", "int4"):
        assert torch.equal(ours, here)  # the bits of all processors
    elif kind == "float32":
        with use_library("portable"):
            torch.testing.assert_close(ours, linear(x, weight), rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(ours, linear_reference(x, weight).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_a_tree_is_that_of_torch(machine: ArmMachine, dtype: torch.dtype, instruction_set: str) -> None:
    tree = Span([3, 1, 6], 9, [1, 2, 3, 4], [0, 1, 1, 2], [-1, 0, 0, 1])
    packed = PackedRows.pack([tree, Span([5], 2, [7, 8, 9], [0, 1, 2], None)], [], 8)
    rows = PackedRows.from_numbers(machine.place(packed.numbers), packed.counts, 8)
    query = machine.place(make_normal(7, 4, 32, seed=0))
    keys, values = (machine.place(make_normal(64, 2, 32, seed=s).to(dtype)) for s in (1, 2))
    out = machine.place(torch.full((7, 4, 32), torch.nan))
    tensors = [tensor.data_ptr() for tensor in (query, keys, values, out)]
    job = AttentionRecord(*tensors, 4, 2, 32, dtype is torch.bfloat16, 0, 0.2, 0.0, None, 0)
    records = machine.place_record(job), machine.place_record(rows.record)
    assert machine.run("attend", *records, machine.scratch, instruction_set=instruction_set) == 0
    expected = attend_reference(query, keys, values, rows, 0.2)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2  # weights are rounded to bfloat16
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_and_probabilities_have_the_bits_of_other_processors(
    machine: ArmMachine, dtype: torch.dtype, instruction_set: str
) -> None:
    settings = [
        (1.0, 0.0, 1.0, 0.0, 1.0),
        (0.7, 20.0, 0.9, 0.0, 1.0),
        (1.3, 0.0, 0.8, 0.05, 1.0),
        (1.0, 0.0, 1.0, 0.0, 0.9),
    ]
    keys, count, size = [5, -7, 11, 13], 4, 301
    logits = machine.place((3 * make_normal(count, size, seed=3)).to(dtype))
    rows, packed, noise = (
        machine.place(torch.from_numpy(np.array(numbers)))
        for numbers in (range(count), np.array(settings), np.array(keys))
    )
    probs, tokens = (
        machine.place(torch.full((count, size), torch.nan)),
        machine.place(torch.full((count,), -9, dtype=torch.int32)),
    )
    with use_library() as library:
        sampler = NativeSampler(library)
        expected = sampler.compute_probs(logits, settings), sampler.sample_tokens(logits, range(count), settings, keys)
    head = [tensor.data_ptr() for tensor in (logits, rows, packed, noise)]
    tail = logits.stride(0), sampler.margin, count, size, dtype is torch.bfloat16
    for outputs in ((probs.data_ptr(), None), (None, tokens.data_ptr())):
        job = machine.place_record(SamplingRecord(*head, *outputs, None, None, None, *tail))
        assert machine.run("sample", job, instruction_set=instruction_set) == 0
    assert torch.equal(probs, expected[0])
    assert tokens.tolist() == expected[1]


def test_a_processor_without_the_instructions_has_the_portable_set_alone(program: Path, tmp_path: Path) -> None:
    with ArmMachine(program, tmp_path / "memory", OLD_PROCESSOR).map_memory() as machine:
        assert machine.run("linear", instruction_set="neonbf16") == NO_SET
        weight = PACKERS["float32"](make_normal(40, 24, seed=0), None, Arena())
        x = make_normal(3, 24, seed=1)
        assert torch.equal(multiply(machine, weight, x, ""), multiply(machine, weight, x, "portable"))
