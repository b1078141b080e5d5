"""The memory of recurrent states: bounded, and no model fails for it that could run one request."""

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.kv.sizing import MemoryLimits
from foredraft.kv.state_sizing import MIN_PAGE_ENDS, StatePlan

MIB = 1 << 20


def test_a_model_without_states_keeps_its_batch() -> None:
    assert StatePlan.make(0, 100 * MIB, 32, 5) == StatePlan(32, 0, 0, 0)


@pytest.mark.parametrize("memory", [100, 1000, 100_000])
def test_states_take_at_most_half_of_the_memory(memory: int) -> None:
    plan = StatePlan.make(MIB, memory * MIB, 32, 5)
    assert plan.num_bytes == (plan.max_page_ends + plan.max_batch * 7) * MIB
    assert plan.num_bytes <= memory * MIB // 2
    assert 1 <= plan.max_batch <= 32
    assert plan.max_page_ends <= 8 * 32


def test_one_request_runs_even_if_its_states_exceed_their_share() -> None:
    plan = StatePlan.make(20 * MIB, 10 * MIB, 8, 5)
    assert (plan.max_batch, plan.max_page_ends) == (1, MIN_PAGE_ENDS)


def test_pages_get_the_memory_that_states_leave() -> None:
    cpu = torch.device("cpu")
    limits = MemoryLimits(kv_memory=160_000, page_size=10)
    assert limits.num_pages(4096, 100, cpu) == 160 + 1
    assert limits.num_pages(4096, 100, cpu, state_bytes=60_000) == 100 + 1
    with pytest.raises(ForedraftError, match="159500 bytes of recurrent states; give at least 160500"):
        limits.num_pages(4096, 100, cpu, state_bytes=159_500)


def test_a_model_without_attention_has_pages_too() -> None:
    assert MemoryLimits(kv_memory=1600, page_size=10).num_pages(1 << 30, 0, torch.device("cpu")) == 11
