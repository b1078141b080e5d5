"""Two processes give the texts of one, with every drafting method.

Guards against ranks that diverge: a move of KV that one rank misses, a pass through the first layers on one rank alone,
a head that reads a part of the hidden states or of the output matrix, noise that depends on the rank.
"""

from functools import cache
from pathlib import Path

import pytest

from foredraft import LLM, Completion, Sampling
from foredraft.errors import ForedraftError
from foredraft.llm import MemoryLimits
from tests.support import tiny_models
from tests.support.lora_folders import write_adapter
from tests.support.method_cases import METHOD_CASES

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [33], [11, 12] * 8, [44, 45]]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = Sampling(max_tokens=12, temperature=0.6, top_p=0.9, repetition_penalty=1.05, seed=11, ignore_eos=True)
PREFIX = [(7 * i) % 31 + 4 for i in range(24)]
SETTINGS = [GREEDY, GREEDY, SEEDED, SEEDED]
# Assistants read the target's keys of all heads, and a process has those of its own heads.
ON_ALL_HEADS = [name for name in METHOD_CASES if name.startswith("gemma4_assistant")]


@cache
def generate_expected() -> list[list[int]]:
    return get_tokens(tiny_models.plain().generate(PROMPTS, SETTINGS))


def get_tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("name", [name for name in METHOD_CASES if name not in ON_ALL_HEADS])
def test_texts_of_two_processes_are_those_of_one(parallel: LLM, name: str) -> None:
    METHOD_CASES[name].prepare(PROMPTS, parallel)
    llm = parallel.with_drafter(METHOD_CASES[name].make(4, parallel), verify="match")
    done = llm.generate(PROMPTS, SETTINGS)
    assert get_tokens(done) == generate_expected()
    assert sum(c.stats.num_drafted for c in done) > 0
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("name", ON_ALL_HEADS)
def test_a_drafter_on_the_keys_of_all_heads_is_refused(parallel: LLM, name: str) -> None:
    with pytest.raises(ForedraftError, match="several processes share those of target; leave tensor_parallel_size"):
        METHOD_CASES[name].make(4, parallel)


@pytest.mark.parametrize("name", ["draft_model, tree", "early_exit"])
def test_preemption_chunks_and_shared_prefixes_change_no_text(parallel: LLM, name: str) -> None:
    """Pages are shared, freed and written again in the same order on every rank."""
    prompts = [[*PREFIX, 7], [*PREFIX, 8], [*PREFIX, 7], *PROMPTS]
    sampling = Sampling(max_tokens=24, temperature=0.6, seed=3, ignore_eos=True)
    expected = get_tokens(tiny_models.plain().generate(prompts, sampling))
    limits = MemoryLimits(kv_tokens=100, page_size=4, max_batch=8, max_step_tokens=48)
    drafter = METHOD_CASES[name].make(4, parallel)
    llm = tiny_models.limit_memory(parallel, drafter, limits, max_chunk=5)
    for _ in range(2):  # the second time from the prefix cache
        done = llm.generate(prompts, sampling)
        assert get_tokens(done) == expected
    assert llm.engine.scheduler.num_preempted > 0
    assert llm.engine.scheduler.prefix_hits > 0
    assert sum(c.stats.num_accepted for c in done) > 0


def test_adapters_by_request_are_refused(parallel: LLM, tmp_path: Path) -> None:
    write_adapter(tmp_path, tiny_models.target(), ["q_proj"])
    with pytest.raises(ForedraftError, match="cannot have adapters, because it is split over several processes"):
        parallel.add_adapter("x", tmp_path)
