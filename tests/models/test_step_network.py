"""Native step networks: odd widths, rows that share a call, instruction sets, threads, quantised products, wrong input.

`tests/drafters/*/test_*.py` compare the numbers with the formulas, on torch's operators and here.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import INSTRUCTION_SETS
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.kernels.quantize import select_packers
from foredraft.models.native.draft_plans import DraftPlan
from foredraft.models.native.step_network import NativeStepNetwork, StepKind, StepWeights
from tests.support.library_setups import NATIVE, ThreadSetup, make_normal, use_library

pytestmark = NATIVE

HIDDEN, INNER, RANK, V, DEPTH = 37, 29, 11, 75, 3
GREEDY = (0.0, 0.0, 1.0, 0.0, 1.0)
ROOTS = [3, 74, 0, 9, 51]


@dataclass
class Weights:
    """Random weights, each of another seed."""

    dtype: torch.dtype
    quantization: str | None = None
    seed: int = 0

    def make(self, *shape: int) -> Tensor:
        self.seed += 1
        return make_normal(*shape, seed=self.seed, dtype=self.dtype)

    def pack(self, n: int, k: int, has_bias: bool = False) -> PackedWeight:
        pack, _ = select_packers(self.quantization)
        return pack(self.make(n, k) * k**-0.5, self.make(n) if has_bias else None, Arena())

    def make_norm(self, width: int) -> tuple[Tensor, Tensor]:
        return 1 + 0.1 * self.make(width).float(), 0.1 * self.make(width).float()


def build(kind: StepKind, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None) -> NativeStepNetwork:
    """Build a network of three steps; the heads have a rank and later layers, the cells a normed input."""
    w = Weights(dtype, quantization)
    if kind is StepKind.PARALLEL:
        step = StepWeights(w.pack(V, HIDDEN), w.pack(INNER, HIDDEN, True), (w.pack(DEPTH * HIDDEN, INNER, True),))
        return NativeStepNetwork.from_steps(kind, [step], HIDDEN, num_heads=DEPTH)
    steps = []
    for i in range(DEPTH):
        if kind is StepKind.HEADS:
            blocks = w.pack(2 * HIDDEN, RANK, True), w.pack(HIDDEN, HIDDEN, True)
            reduce = w.pack(RANK, (i + 2) * HIDDEN)
            steps.append(StepWeights(w.pack(V, HIDDEN, True), reduce, blocks, embedding=w.make(V, HIDDEN)))
            continue
        gates = 4 if kind is StepKind.LSTM else 1
        product, norms = w.pack(gates * INNER, INNER if i else HIDDEN), (w.make_norm(INNER), w.make_norm(INNER))
        steps.append(StepWeights(w.pack(V, INNER), product, (), *norms, embedding=w.make(V, INNER)))
    if kind is StepKind.HEADS:
        return NativeStepNetwork.from_steps(kind, steps, HIDDEN)
    return NativeStepNetwork.from_steps(
        kind, steps, HIDDEN, INNER, input_weight=torch.full((HIDDEN,), 0.7), token_share=0.6, eps=1e-6
    )


def run_levels(network: NativeStepNetwork, states: Tensor, tokens: list[int]) -> tuple[list[list[int]], Tensor]:
    """Draft the likeliest tokens step by step. Returns them and the logits [R, D, V]."""
    if network.kind is StepKind.PARALLEL:
        logits = network.forward(0, states, ())[1]
    else:
        rows = []
        for step in range(DEPTH):
            states, made = network.forward(step, states, tokens)
            tokens = made.argmax(-1).tolist()
            rows.append(made)
        logits = torch.stack(rows, 1)
    return logits.argmax(-1).tolist(), logits


@pytest.mark.parametrize("kind", list(StepKind))
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_row_has_the_bits_of_a_call_of_its_own(kind: StepKind, instruction_set: str) -> None:
    with use_library(instruction_set):
        network, states = build(kind), make_normal(len(ROOTS), HIDDEN, seed=0)
        tokens, logits = run_levels(network, states, ROOTS)
        for row, root in enumerate(ROOTS):
            alone = run_levels(network, states[row : row + 1], [root])
            assert alone[0][0] == tokens[row]
            assert torch.equal(alone[1][0], logits[row])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", list(StepKind))
def test_a_chain_has_the_tokens_of_single_steps(kind: StepKind, dtype: torch.dtype, quantization: str | None) -> None:
    """With target states of both dtypes, drafts of several depths, and one that ends by its own token."""
    network, states = build(kind, dtype, quantization), make_normal(len(ROOTS), HIDDEN, seed=0, dtype=dtype)
    expected = run_levels(network, states.float(), ROOTS)[0]
    depths, ends = [3, 1, 2, 3, 3], [frozenset[int]()] * 4 + [frozenset({1, expected[4][1]})]
    plans = [DraftPlan(depth, GREEDY, (), end, False) for depth, end in zip(depths, ends, strict=True)]
    found = network.draft(plans, list(states), ROOTS, V)
    assert found is not None
    last = 1 + expected[4].index(expected[4][1])
    assert found.tokens == [row[:n] for row, n in zip(expected, [3, 1, 2, 3, last], strict=True)]
    assert found.q is None


def test_two_threads_have_the_bits_of_one() -> None:
    for kind in StepKind:
        network, states = build(kind), make_normal(len(ROOTS), HIDDEN, seed=0)
        alone = run_levels(network, states, ROOTS)[1]
        with use_library(way=ThreadSetup(2, has_own_pool=False)):
            assert torch.equal(run_levels(network, states, ROOTS)[1], alone)


def test_the_widest_activation_is_that_of_the_formula() -> None:
    """Numbers far out: the exponential saturates, and must not turn into infinity times zero."""
    w = Weights(torch.float32)
    first = PackedWeight.pack(
        torch.cat([torch.eye(HIDDEN) * 60, torch.zeros(HIDDEN, HIDDEN)], 1).repeat(2, 1), None, Arena()
    )
    step = StepWeights(w.pack(V, HIDDEN), None, (first,), embedding=w.make(V, HIDDEN))
    states = make_normal(2, HIDDEN, seed=5) * 10
    logits = NativeStepNetwork.from_steps(StepKind.HEADS, [step], HIDDEN).forward(0, states, [1, 2])[1]
    x = states * 60
    expected = linear((x.double() + torch.nn.functional.silu(x.double())).float(), step.head)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-3)


def test_tokens_without_an_embedding_are_refused() -> None:
    network, states = build(StepKind.MLP), make_normal(1, HIDDEN, seed=0)
    plan = DraftPlan(2, GREEDY, (), frozenset(), False)
    for token in (-1, V):
        with pytest.raises(IndexError, match="outside the vocabulary of 75"):
            network.forward(0, states, [token])
        with pytest.raises(IndexError, match="outside the vocabulary of 75"):
            network.draft([plan], [states[0]], [token], V)


def test_states_of_another_step_are_refused() -> None:
    with pytest.raises(ValueError, match="states of width 29"):
        build(StepKind.MLP).forward(1, make_normal(1, HIDDEN, seed=0), [1])
