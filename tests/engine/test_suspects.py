"""Who runs after a failed step: the rules by themselves, without an engine."""

from collections.abc import Callable

import pytest

from foredraft import Sampling
from foredraft.engine.suspects import MAX_RESETS, RELIEF, Suspects
from foredraft.request import Request

Fails = Callable[[list[Request]], bool]


def requests(num: int) -> list[Request]:
    return [Request(-1, [1], Sampling(max_tokens=9), n) for n in range(num)]


def play(live: list[Request], fails: Fails, num_steps: int = 400) -> tuple[Suspects, list[Request], bool]:
    """Steps of an engine of which `fails` says whether a set of requests can be run; (.., culprits, is it hopeless)."""
    suspects, culprits, live = Suspects(), [], list(live)
    for _ in range(num_steps):
        only = suspects.choose(live)
        tried = [request for request in live if only is None or request in only]
        if fails(tried):
            culprit = suspects.failed(tried)
            if suspects.is_hopeless(tried, live):
                return suspects, culprits, True
            if culprit is not None:
                live.remove(culprit)
                culprits.append(culprit)
        else:
            suspects.passed(tried, tried)
    return suspects, culprits, False


@pytest.mark.parametrize("bad", [{0}, {7}, {0, 1}, {0, 1, 2, 3, 4, 5, 6}, {1, 3, 5, 7}, {0, 7}])
def test_every_culprit_is_found_and_nobody_else(bad: set[int]) -> None:
    """As long as one request is sound, however many stand before it."""
    made = requests(8)
    evil = {made[n] for n in bad}
    _, culprits, is_hopeless = play(made, lambda tried: bool(evil.intersection(tried)))
    assert set(culprits) == evil
    assert not is_hopeless


@pytest.mark.parametrize("num", [1, 2, 8])
def test_where_everybody_fails_it_is_the_engine(num: int) -> None:
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

    _, culprits, is_hopeless = play(requests(8), fails, 4 * RELIEF)
    assert not culprits
    assert not is_hopeless
    assert 0 < sum(failures) <= 12


def test_relief_ends() -> None:
    """After one bad step in a long life all run together again."""
    suspects, made = Suspects(), requests(8)
    suspects.failed(made)
    for _ in range(8):
        suspects.passed(tried := list(suspects.choose(made) or made), tried)
    assert len(suspects.choose(made) or made) == 4
    for _ in range(RELIEF):
        suspects.passed(tried := list(suspects.choose(made) or made), tried)
    assert suspects.choose(made) is None


def test_those_who_wait_for_each_other_run_together() -> None:
    """A suspect that the scheduler does not run is no reason to stand still."""
    suspects, made = Suspects(), requests(3)
    suspects.failed(made)
    for _ in range(4):
        assert suspects.choose(made) is not None
        suspects.passed([], [])
    assert suspects.choose(made) is None
