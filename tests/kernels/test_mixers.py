"""The native recurrences against their formulas in float64, and the bits of a row in chunks, chains and trees.

Guards against a state taken from another run, an input of the convolution in the wrong place, and sums whose order
depends on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels import mixers
from foredraft.kernels.cpu.library import INSTRUCTION_SETS
from foredraft.kernels.cpu.records import MixerRecord
from foredraft.kernels.mixers import DELTA, MAMBA2, SHORT_CONV, MixerKernel, NativeRuns
from tests.support.library_setups import NATIVE, THREAD_SETUPS, make_normal, use_library

pytestmark = NATIVE
NUM_ROWS, NUM_STATES = 11, 14
MAX_ERROR = 4e-6  # beside three times that of torch's operators in float32


@dataclass(frozen=True)
class Shape:
    """Sizes of a recurrent layer."""

    kind: int
    heads: int = 0
    groups: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 4
    norm_parts: int = 1
    has_bias: bool = False
    conv_channels: int = 0  # of a short convolution

    @property
    def inner(self) -> int:
        return self.conv_channels or self.heads * self.value_dim

    @property
    def norm_width(self) -> int:
        return self.value_dim if self.kind == DELTA else self.inner // self.norm_parts

    @property
    def channels(self) -> int:
        return self.conv_channels or self.inner + 2 * self.groups * self.key_dim

    @property
    def width(self) -> int:
        steps = {DELTA: 2 * self.heads, MAMBA2: self.heads, SHORT_CONV: self.inner}[self.kind]
        return self.channels + self.inner + steps


SHAPES = {
    "delta": Shape(DELTA, heads=4, groups=2, key_dim=16, value_dim=32),
    "delta, as published": Shape(DELTA, heads=2, groups=2, key_dim=128, value_dim=128),
    "delta, odd": Shape(DELTA, heads=3, groups=1, key_dim=5, value_dim=37, taps=2),
    "mamba": Shape(MAMBA2, heads=4, groups=2, key_dim=16, value_dim=32, norm_parts=2, has_bias=True),
    "mamba, as published": Shape(MAMBA2, heads=3, groups=1, key_dim=128, value_dim=64, has_bias=True),
    "mamba, odd": Shape(MAMBA2, heads=5, groups=5, key_dim=3, value_dim=7, taps=5),
    "convolution": Shape(SHORT_CONV, conv_channels=96, taps=3),
    "convolution, odd": Shape(SHORT_CONV, conv_channels=71, taps=4, has_bias=True),
}
EACH = pytest.mark.parametrize("name", SHAPES)


@dataclass(frozen=True)
class Weights:
    """Parameters of a layer; fields that a kind does not have are not read."""

    conv: Tensor  # [taps, channels]
    bias: Tensor | None
    rate: Tensor  # [heads]
    step_bias: Tensor
    skip: Tensor
    norm: Tensor
    eps: float = 1e-5
    min_step: float = 0.05
    max_step: float = 1.5

    def cast(self, dtype: torch.dtype) -> "Weights":
        tensors = {name: value.to(dtype) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


@cache
def make_weights(name: str) -> Weights:
    s = SHAPES[name]
    heads = max(1, s.heads)
    return Weights(
        conv=make_normal(s.taps, s.channels, seed=1) * 0.6,
        bias=make_normal(s.channels, seed=2) * 0.5 if s.has_bias else None,
        rate=-make_normal(heads, seed=3).exp(),
        step_bias=make_normal(heads, seed=4),
        skip=make_normal(heads, seed=5),
        norm=make_normal(s.value_dim if s.kind == DELTA else s.inner, seed=6),
    )


def make_kernel(name: str) -> MixerKernel:
    s, w = SHAPES[name], make_weights(name)
    tensors = (w.conv, w.rate, w.step_bias, w.skip, w.norm)
    places: dict[str, int] = {
        DELTA: {"gate_at": s.channels, "share_at": s.channels + s.inner, "step_at": s.width - s.heads},
        MAMBA2: {"conv_at": s.inner, "step_at": s.width - s.heads},
        SHORT_CONV: {},
    }[s.kind]
    record = MixerRecord(
        kind=s.kind, channels=s.channels, taps=s.taps, heads=s.heads, groups=s.groups, key_dim=s.key_dim,
        value_dim=s.value_dim, norm_width=s.norm_width, width=s.width, inner=s.inner, eps=w.eps,
        min_step=w.min_step, max_step=w.max_step, conv_weight=w.conv.data_ptr(),
        conv_bias=None if w.bias is None else w.bias.data_ptr(), rate=w.rate.data_ptr(),
        step_bias=w.step_bias.data_ptr(), skip=w.skip.data_ptr(), norm=w.norm.data_ptr(), **places,
    )  # fmt: skip
    return MixerKernel(record, tensors if w.bias is None else (*tensors, w.bias))


@dataclass
class States:
    """States of one layer by id; 0 is the null state."""

    conv: Tensor
    recurrent: Tensor | None

    @classmethod
    def make(cls, kernel: MixerKernel, count: int = NUM_STATES) -> "States":
        size = kernel.state_size
        return cls(torch.zeros(count, *kernel.conv_size), None if size is None else torch.zeros(count, *size))


Run = tuple[int, int, int, int]  # first row, number of rows, start state, end state
CHUNK: tuple[Run, ...] = ((0, NUM_ROWS, 0, 1),)
CUT_CHUNK: tuple[Run, ...] = ((0, 4, 0, 1), (4, 1, 1, 2), (5, 6, 2, 3))
CHAIN: tuple[Run, ...] = tuple((row, 1, row, row + 1) for row in range(NUM_ROWS))
# row 4 follows rows 0, 1 and 3; row 5 follows row 0 alone; rows 6 to 8 are of another sequence
TREE: tuple[Run, ...] = (
    (0, 1, 0, 1), (1, 1, 1, 2), (2, 1, 1, 3), (3, 1, 2, 4), (4, 1, 4, 5), (5, 1, 1, 6), (6, 3, 0, 7), (9, 1, 7, 8),
    (10, 1, 7, 9),
)  # fmt: skip


def make_rows(name: str) -> Tensor:
    return make_normal(NUM_ROWS, SHAPES[name].width, seed=7)


def run_kernel(kernel: MixerKernel, rows: Tensor, runs: Sequence[Run], states: States | None = None) -> Tensor:
    states = States.make(kernel) if states is None else states
    return kernel.run(rows.clone(), NativeRuns.pack(*zip(*runs, strict=True)), states.conv, states.recurrent)


def list_rows_before(runs: Sequence[Run], row: int) -> list[int]:
    """List the rows of a row's sequence, itself last."""
    run = next(run for run in runs if run[0] <= row < run[0] + run[1])
    before = list(range(run[0], row + 1))
    while run[2]:
        run = next(other for other in runs if other[3] == run[2])
        before = [*range(run[0], run[0] + run[1]), *before]
    return before


def compute_sequence(name: str, rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute the outputs [T, inner] of a sequence of rows by the formulas, in a dtype."""
    s, w, x = SHAPES[name], make_weights(name).cast(dtype), rows.to(dtype)
    conv_at = s.inner if s.kind == MAMBA2 else 0
    if s.kind == SHORT_CONV:
        in_gate, out_gate, value = x.split(s.inner, 1)
        return out_gate * convolve(s, w, in_gate * value)
    mixed = F.silu(convolve(s, w, x[:, conv_at : conv_at + s.channels]))
    gate = x[:, : s.inner] if s.kind == MAMBA2 else x[:, s.channels : s.channels + s.inner]
    step = F.softplus(x[:, s.width - s.heads :] + w.step_bias)
    if s.kind == DELTA:
        share = x[:, s.channels + s.inner :][:, : s.heads].sigmoid()
        out = compute_delta(s, mixed, (w.rate * step).exp(), share)
        out = normalise(out, w.eps) * w.norm
        return out.flatten(1) * F.silu(gate)
    step = step.clamp(w.min_step, w.max_step)
    out = compute_mamba(s, mixed, (w.rate * step).exp(), step, w.skip)
    parts = (out.flatten(1) * F.silu(gate)).view(len(x), s.norm_parts, -1)
    return normalise(parts, w.eps).flatten(1) * w.norm


def normalise(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def convolve(s: Shape, w: Weights, x: Tensor) -> Tensor:
    padded = torch.cat([x.new_zeros(s.taps - 1, x.shape[1]), x])
    total = sum(w.conv[i] * padded[i : i + len(x)] for i in range(s.taps))
    return total if w.bias is None else total + w.bias  # type: ignore[return-value,operator]


def compute_delta(s: Shape, mixed: Tensor, decay: Tensor, share: Tensor) -> Tensor:
    sizes = (s.groups * s.key_dim, s.groups * s.key_dim, s.inner)
    query, key, value = (part.view(len(mixed), -1, n) for part, n in zip(
        mixed.split(sizes, 1), (s.key_dim, s.key_dim, s.value_dim), strict=True
    ))  # fmt: skip
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query, key = (x.repeat_interleave(s.heads // s.groups, 1) for x in (query / s.key_dim**0.5, key))
    state, outputs = mixed.new_zeros(s.heads, s.key_dim, s.value_dim), []
    for t in range(len(mixed)):
        state = state * decay[t, :, None, None]
        change = share[t, :, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
        state = state + key[t, :, :, None] * change[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query[t]))
    return torch.stack(outputs)


def compute_mamba(s: Shape, mixed: Tensor, decay: Tensor, step: Tensor, skip: Tensor) -> Tensor:
    sizes = (s.inner, s.groups * s.key_dim, s.groups * s.key_dim)
    value, key, query = (part.view(len(mixed), -1, n) for part, n in zip(
        mixed.split(sizes, 1), (s.value_dim, s.key_dim, s.key_dim), strict=True
    ))  # fmt: skip
    query, key = (x.repeat_interleave(s.heads // s.groups, 1) for x in (query, key))
    state, outputs = mixed.new_zeros(s.heads, s.key_dim, s.value_dim), []
    for t in range(len(mixed)):
        added = key[t, :, :, None] * (step[t, :, None] * value[t])[:, None]
        state = state * decay[t, :, None, None] + added
        outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) + skip[:, None] * value[t])
    return torch.stack(outputs)


def check_close(name: str, ours: Tensor, sequence: Tensor, count: int) -> None:
    """Compare the last outputs of a sequence with the formulas. A norm multiplies the error of a small result."""
    truth, theirs = (compute_sequence(name, sequence, dtype)[-count:] for dtype in (torch.float64, torch.float32))
    assert ours.shape == truth.shape
    assert (ours - truth).abs().max() <= MAX_ERROR + 3 * (theirs - truth).abs().max()


@EACH
def test_a_sequence_is_computed_by_the_formulas(name: str) -> None:
    rows = make_rows(name)
    check_close(name, run_kernel(make_kernel(name), rows, CHUNK), rows, NUM_ROWS)


@EACH
def test_every_node_of_a_tree_continues_its_own_path(name: str) -> None:
    rows = make_rows(name)
    out = run_kernel(make_kernel(name), rows, TREE)
    for row in range(NUM_ROWS):
        check_close(name, out[row : row + 1], rows[list_rows_before(TREE, row)], 1)


@EACH
def test_bits_do_not_depend_on_runs_or_other_rows(name: str) -> None:
    """Chunks, chains, one row per call, and every path of a tree alone."""
    kernel, rows = make_kernel(name), make_rows(name)
    whole = run_kernel(kernel, rows, CHUNK)
    assert torch.equal(run_kernel(kernel, rows, CUT_CHUNK), whole)
    assert torch.equal(run_kernel(kernel, rows, CHAIN), whole)
    states = States.make(kernel)
    single = [run_kernel(kernel, rows[row : row + 1], [(0, 1, row, row + 1)], states) for row in range(NUM_ROWS)]
    assert torch.equal(torch.cat(single), whole)
    tree = run_kernel(kernel, rows, TREE)
    for row in range(NUM_ROWS):
        path = rows[list_rows_before(TREE, row)]
        assert torch.equal(run_kernel(kernel, path, [(0, len(path), 0, 1)])[-1], tree[row])


@pytest.mark.parametrize("name", ["delta, as published", "mamba, as published"])
def test_more_states_than_a_member_keeps_are_read_from_the_pool(name: str) -> None:
    """A level of 40 nodes, each of which has a child in the next one."""
    kernel, width = make_kernel(name), 40
    rows = make_normal(1 + 2 * width, SHAPES[name].width, seed=8)
    level = [(1 + i, 1, 1, 2 + i) for i in range(width)]
    next_level = [(1 + width + i, 1, 2 + i, 2 + width + i) for i in range(width)]
    runs = [(0, 1, 0, 1), *level, *next_level]
    out = run_kernel(kernel, rows, runs, States.make(kernel, 2 + 2 * width))
    for i in range(width):
        path = [0, 1 + i, 1 + width + i]
        assert torch.equal(run_kernel(kernel, rows[path], [(0, 3, 0, 1)]), out[path])


def test_slots_are_used_again_after_their_last_reader() -> None:
    *_, slots, start_slots = NativeRuns.pack(*zip(*CHAIN, strict=True)).numbers.tolist()
    assert slots == [0] * (NUM_ROWS - 1) + [-1]
    assert start_slots == [-1] + [0] * (NUM_ROWS - 1)
    *_, slots, start_slots = NativeRuns.pack(*zip(*TREE, strict=True)).numbers.tolist()
    assert slots == [0, 1, -1, 1, -1, -1, 0, -1, -1]
    assert start_slots == [-1, 0, 0, 1, 1, 0, -1, 0, 0]


@EACH
def test_states_are_written_where_runs_end_and_nowhere_else(name: str) -> None:
    kernel, rows = make_kernel(name), make_rows(name)
    states, alone = States.make(kernel), States.make(kernel)
    run_kernel(kernel, rows, TREE, states)
    written = {run[3] for run in TREE}
    for state in range(NUM_STATES):
        assert states.conv[state].any() == (state in written)
        assert states.recurrent is None or states.recurrent[state].any() == (state in written)
    path = rows[list_rows_before(TREE, 4)]
    run_kernel(kernel, path, [(0, len(path), 0, 1)], alone)
    assert torch.equal(alone.conv[1], states.conv[5])
    assert alone.recurrent is None or torch.equal(alone.recurrent[1], states.recurrent[5])  # type: ignore[index]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@EACH
def test_every_instruction_set_and_team(instruction_set: str, name: str) -> None:
    kernel, rows = make_kernel(name), make_rows(name)
    with use_library(instruction_set):
        out = run_kernel(kernel, rows, TREE)
    for row in range(NUM_ROWS):
        check_close(name, out[row : row + 1], rows[list_rows_before(TREE, row)], 1)
    for team in THREAD_SETUPS[1:]:
        with use_library(instruction_set, team):
            assert torch.equal(run_kernel(kernel, rows, TREE), out)


def test_the_formulas_notice_every_parameter() -> None:
    """A parameter that neither side reads would make the comparison empty."""
    for name in ("delta", "mamba", "convolution, odd"):
        rows, kind = make_rows(name), SHAPES[name].kind
        read = {DELTA: ("conv", "rate", "step_bias", "norm"), SHORT_CONV: ("conv", "bias")}.get(
            kind, ("conv", "bias", "rate", "step_bias", "skip", "norm", "min_step", "max_step")
        )
        before = compute_sequence(name, rows)
        for field in read:
            changed: Any = replace(make_weights(name), **{field: getattr(make_weights(name), field) * 0.9})
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(globals(), "make_weights", lambda _, changed=changed: changed)
                assert not torch.allclose(compute_sequence(name, rows), before, atol=1e-4)


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel("delta")
    monkeypatch.setattr(mixers, "load_library", lambda: None)
    with pytest.raises(ForedraftError, match=r"foredraft\.kernels\.cpu\.build"):
        run_kernel(kernel, make_rows("delta"), CHUNK)
