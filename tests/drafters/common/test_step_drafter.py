"""Chains of step networks in one native call: the tokens and q of the loop that takes a call per level.

Guards against a row that goes on from another draft's state, noise of another depth, a chain that goes on after an end
token, and drafts that the native call cannot make.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import RequestOptions
from foredraft.drafters.common.step_drafter import StepRunner
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.models.native.draft_plans import DraftTokens
from foredraft.request import Batch
from foredraft.tree import TokenTree
from tests.drafters.common.test_chain_loop import SAMPLING, SAMPLINGS, STOPS
from tests.invariants.test_bits import drafter, plain
from tests.support import tiny_models
from tests.support.library_setups import NATIVE, ThreadSetup, use_library

pytestmark = NATIVE

CASES = ["mlp_speculator", "mlp_speculator, lstm", "hydra", "hydra, prefix", "blockwise"]
STEP_SAMPLINGS = SAMPLINGS | {"greedy": [SAMPLING, replace(SAMPLING, stop_token_ids=STOPS), SAMPLING]}


@dataclass
class LevelRunner:
    """Native steps without the native loop."""

    made: StepRunner

    def begin(self, hidden: Tensor) -> Tensor:
        return self.made.begin(hidden)

    def __call__(self, step: int, states: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
        return self.made(step, states, tokens)


class Counter:
    """Native network that counts its drafts."""

    def __init__(self, made: Any, is_undecided: bool = False) -> None:
        self.made, self.is_undecided, self.num_calls = made, is_undecided, 0

    def can_draft(self, vocab_size: int) -> bool:
        return bool(self.made.can_draft(vocab_size))

    def forward(self, *args: Any) -> Any:
        return self.made.forward(*args)

    def draft(self, *args: Any) -> DraftTokens | None:
        self.num_calls += 1
        found: DraftTokens | None = self.made.draft(*args)
        return None if self.is_undecided else found


class ComparedSteps(DrafterWrapper):
    """Drafts natively and level by level, and compares."""

    def __init__(self, made: Any, is_undecided: bool = False) -> None:
        super().__init__(made)
        self.made, self.longest = made, 0
        self.counter = Counter(made.runner.native, is_undecided)
        self.runners = replace(made.runner, native=self.counter), LevelRunner(made.runner)

    def propose(self, batch: Batch) -> TokenTree:
        self.made.runner = self.runners[0]
        tree: TokenTree = self.made.propose(batch)
        self.made.runner = self.runners[1]
        expected = self.made.propose(batch)
        assert tree.tokens == expected.tokens
        assert tree.parents == expected.parents
        assert (tree.q is None) == (expected.q is None)
        if tree.q is not None:
            assert torch.equal(tree.q.nan_to_num(-1), expected.q.nan_to_num(-1))
        self.longest = max(self.longest, *map(len, tree.tokens))
        return tree


def compare(name: str, dtype: torch.dtype, rule: str, max_tokens: int = 6, is_undecided: bool = False) -> int:
    """Generate with random prompts and draft lengths, and compare every draft. Returns the most nodes of a tree."""
    noise = random.Random(f"{name} {dtype} {rule}")
    made = ComparedSteps(drafter(name, 8, dtype), is_undecided)
    samplings = [replace(s, max_tokens=max_tokens) for s in STEP_SAMPLINGS[rule]]
    prompts = [[noise.randrange(1, tiny_models.VOCAB) for _ in range(noise.randrange(1, 40))] for _ in samplings]
    options = [RequestOptions(num_speculative_tokens=noise.randrange(1, 9)) for _ in samplings]
    llm = plain(dtype).with_drafter(made, verify="match" if rule == "greedy" else rule)
    llm.generate(prompts, samplings, options=options)
    assert llm.engine.drafter.num_failures == 0, llm.engine.drafter.failures
    assert made.counter.num_calls > 1
    return made.longest


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in CASES), ("mlp_speculator", torch.float32)], ids=str
)
def test_tokens_and_q_are_those_of_the_levels(name: str, dtype: torch.dtype) -> None:
    assert max(compare(name, dtype, rule) for rule in STEP_SAMPLINGS) > 3


@pytest.mark.parametrize("name", ["mlp_speculator, lstm", "hydra"])
def test_two_threads_draft_the_same(name: str) -> None:
    with use_library(way=ThreadSetup(2, has_own_pool=False)):
        compare(name, torch.bfloat16, "reject", 4)


def test_what_rounding_decides_is_left_to_the_levels() -> None:
    compare("mlp_speculator", torch.float32, "reject", is_undecided=True)


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_states_that_are_no_numbers_draft_nothing(rule: str) -> None:
    made = drafter("mlp_speculator", 3, torch.float32)
    compared = ComparedSteps(made)
    get = made._states.get
    made._states.get = lambda request: None if (state := get(request)) is None else state * torch.nan
    llm = plain(torch.float32).with_drafter(compared, verify=rule)
    llm.generate([[5, 6], [7]], [SAMPLINGS[rule][0], SAMPLING])
    assert compared.longest == 1
    assert compared.counter.num_calls > 5
    assert llm.engine.drafter.num_failures == 0


def test_penalties_draft_level_by_level() -> None:
    """Every node has other logits."""
    made = ComparedSteps(drafter("hydra", 3, torch.float32))
    llm = plain(torch.float32).with_drafter(made)
    llm.generate([[5, 6, 7]], replace(SAMPLING, repetition_penalty=1.2))
    assert made.counter.num_calls == 0
    assert made.longest > 1
