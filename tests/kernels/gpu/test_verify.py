"""Verification on the GPU: the commit of the rules on the CPU, for the same logits, trees and random numbers.

Guards against another key, position or stream of the noise; siblings in another order; residuals without the rejected
draft; filters that keep one token more or less; rows and nodes of other requests.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.sampling.params import Sampling
from foredraft.verification.registry import RULES
from foredraft.verification.rules import BLOCK, MATCH, REJECT, TYPICAL
from tests.support.gpu_cases import DEVICE, TRITON
from tests.support.walk_cases import WalkCase, add_further_samples, count_outcomes, make_case

pytestmark = TRITON
BATCH = (MATCH, REJECT, BLOCK, REJECT, BLOCK, MATCH, REJECT, BLOCK)
SIZES = (100, 7, 131, 64, 33, 257)


@pytest.fixture(autouse=True, scope="module")
def fast_interpreter() -> Iterator[None]:
    from tests.support.fast_interpreter import patch_language_once

    with patch_language_once():
        yield


def check(case: WalkCase, **plan: int) -> Counter[str]:
    expected, got = case.reference(), case.run(**plan)
    for b in range(len(case.rules)):
        assert got.paths[b] == expected.paths[b], case.describe(b)
        assert got.tokens[b] == expected.tokens[b], case.describe(b)
    assert got.failed == expected.failed
    return count_outcomes(case, got)


def test_commits_are_those_of_the_rules() -> None:
    seen: Counter[str] = Counter()
    for seed, size in enumerate(SIZES):
        dtype = (torch.float32, torch.float32, torch.bfloat16)[seed % 3]
        case = make_case(BATCH, size, seed, dtype)
        assert case.list_on_device() == list(range(len(BATCH)))
        seen += check(case)
    print(seen)
    for kind in ("match", "reject", "block"):
        for outcome in ("accepted", "deep", "rejected"):
            assert seen[f"{kind} {outcome}"] > 0, outcome


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_commits_are_those_of_the_rules_in_many_steps(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    check(make_case(BATCH, (5, 40, 64, 129, 300, 1000)[seed % 6], seed, dtype), tile=128, shortlist=24 + seed % 50)
