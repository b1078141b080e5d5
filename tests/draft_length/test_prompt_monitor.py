"""Steps soon after a prompt: not typical if prompts are rare, typical if they are a part of the load."""

import pytest

from foredraft.draft_length.prompt_monitor import MIN_DISTANCE, NUM_DISTURBED, PromptMonitor


def list_disturbed(has_prompts: list[bool]) -> list[bool]:
    monitor, found = PromptMonitor(), []
    for has_prompt in has_prompts:
        found.append(monitor.is_disturbed)
        monitor.record(has_prompt)
    return found


def test_the_steps_after_a_rare_prompt() -> None:
    period = [True] + [False] * 40
    found = list_disturbed([False] * MIN_DISTANCE + 3 * period)
    after = [False] + [True] * NUM_DISTURBED + [False] * (40 - NUM_DISTURBED)
    assert found == [False] * MIN_DISTANCE + 3 * after


def test_the_first_steps_of_an_engine_count() -> None:
    assert not any(list_disturbed([True] + [False] * 40))


@pytest.mark.parametrize("distance", [1, 2, NUM_DISTURBED, MIN_DISTANCE - 1])
def test_where_prompts_are_frequent_all_steps_are_typical(distance: int) -> None:
    assert not any(list_disturbed(([True] + [False] * distance) * 20))


def test_several_prompts_in_a_row_leave_no_step_out_for_long() -> None:
    found = list_disturbed([False] * MIN_DISTANCE + [True] * 3 + [False] * 20)
    assert sum(found) == 1, "the step with the second prompt"
