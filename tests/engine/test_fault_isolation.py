"""Requests that run after a failed step: the rules by themselves, without an engine."""

from collections.abc import Callable

import pytest

from foredraft import Sampling
from foredraft.engine.fault_isolation import MAX_RESETS, RELAX_AFTER_STEPS, FaultIsolator
from foredraft.request import Request
from tests.support.requests import make_request

Fails = Callable[[list[Request]], bool]


def requests(num: int) -> list[Request]:
    return [make_request(-1, [1], Sampling(max_tokens=9), n) for n in range(num)]


def play(live: list[Request], fails: Fails, num_steps: int = 400) -> tuple[FaultIsolator, list[Request], bool]:
    """Simulate engine steps that fail if `fails` is true of their requests: (isolator, culprits, is it hopeless)."""
    suspects, culprits, live = FaultIsolator(), [], list(live)
    for _ in range(num_steps):
        only = suspects.select(live)
        tried = [request for request in live if only is None or request in only]
        if fails(tried):
            culprit = suspects.on_failure(tried)
            if suspects.is_engine_fault(tried, live):
                return suspects, culprits, True
            if culprit is not None:
                live.remove(culprit)
                culprits.append(culprit)
        else:
            suspects.on_success(tried, tried)
    return suspects, culprits, False


@pytest.mark.parametrize("bad", [{0}, {7}, {0, 1}, {0, 1, 2, 3, 4, 5, 6}, {1, 3, 5, 7}, {0, 7}])
def test_every_culprit_is_found_and_no_other_request(bad: set[int]) -> None:
    """All culprits are found if one request is sound, at any index."""
    made = requests(8)
    evil = {made[n] for n in bad}
    _, culprits, is_hopeless = play(made, lambda tried: bool(evil.intersection(tried)))
    assert set(culprits) == evil
    assert not is_hopeless


@pytest.mark.parametrize("num", [1, 2, 8])
def test_if_all_requests_fail_the_engine_is_at_fault(num: int) -> None:
    suspects, culprits, is_hopeless = play(requests(num), lambda tried: True)
    assert is_hopeless or (num == 1 and len(culprits) == 1)
    assert suspects.num_resets >= min(MAX_RESETS, num + 1)


@pytest.mark.parametrize("most", [1, 3, 5])
def test_a_number_that_is_too_large_is_no_culprit(most: int) -> None:
    """Half as many until that works; now and then more again, which at times is one too many."""
    failures = []

    def fails(tried: list[Request]) -> bool:
        failures.append(len(tried) > most)
        return failures[-1]

    _, culprits, is_hopeless = play(requests(8), fails, 4 * RELAX_AFTER_STEPS)
    assert not culprits
    assert not is_hopeless
    assert 0 < sum(failures) <= 12


def test_relief_ends() -> None:
    """After one bad step, all run together again."""
    suspects, made = FaultIsolator(), requests(8)
    suspects.on_failure(made)
    for _ in range(8):
        suspects.on_success(tried := list(suspects.select(made) or made), tried)
    assert len(suspects.select(made) or made) == 4
    for _ in range(RELAX_AFTER_STEPS):
        suspects.on_success(tried := list(suspects.select(made) or made), tried)
    assert suspects.select(made) is None


def test_those_who_wait_for_each_other_run_together() -> None:
    """A suspect that the scheduler does not run is no reason to stand still."""
    suspects, made = FaultIsolator(), requests(3)
    suspects.on_failure(made)
    for _ in range(4):
        assert suspects.select(made) is not None
        suspects.on_success([], [])
    assert suspects.select(made) is None
