"""Two processes give the texts of one, with every drafting method.

Guards against ranks that diverge: a move of KV that one rank misses, a pass through the first layers on one rank alone,
a head that reads a part of the hidden states or of the output matrix, noise that depends on the rank.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from foredraft import LLM, Completion, Sampling
from foredraft.llm import MemoryLimits
from tests.support import tiny_models
from tests.support.method_cases import METHOD_CASES

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [33], [11, 12] * 8, [44, 45]]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = Sampling(max_tokens=12, temperature=0.6, top_p=0.9, repetition_penalty=1.05, seed=11, ignore_eos=True)
SETTINGS = [GREEDY, GREEDY, SEEDED, SEEDED]


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny target in two processes."""
    folder = str(tmp_path_factory.mktemp("target"))
    tiny_models.target().save_pretrained(folder)
    with LLM(folder, None, is_debug=True, tensor_parallel_size=2) as llm:
        yield llm


@cache
def generate_expected() -> list[list[int]]:
    return get_tokens(tiny_models.plain().generate(PROMPTS, SETTINGS))


def get_tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("name", METHOD_CASES)
def test_texts_of_two_processes_are_those_of_one(parallel: LLM, name: str) -> None:
    METHOD_CASES[name].prepare(PROMPTS, parallel)
    llm = parallel.with_drafter(METHOD_CASES[name].make(4, parallel), verify="match")
    done = llm.generate(PROMPTS, SETTINGS)
    assert get_tokens(done) == generate_expected()
    assert sum(c.stats.num_drafted for c in done) > 0
    assert llm.engine.drafter.num_failures == 0
