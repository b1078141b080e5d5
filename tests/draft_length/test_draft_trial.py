"""Trial: which steps after the warm-up belong to it, and what ends it."""

import pytest

from foredraft.draft_length.draft_trial import MAX_TRIAL_REQUESTS, MIN_TRIAL_CREDIT, TRIAL_STEPS, DraftTrial


def test_it_has_a_limited_number_of_steps() -> None:
    trial = DraftTrial()
    steps = [trial.take_step(pays=False, num_requests=1, credit=10.0) for _ in range(2 * TRIAL_STEPS)]
    assert steps == [True] * TRIAL_STEPS + [False] * TRIAL_STEPS


@pytest.mark.parametrize(
    ("pays", "num_requests", "credit"),
    [(True, 1, 10.0), (False, MAX_TRIAL_REQUESTS + 1, 10.0), (False, 1, MIN_TRIAL_CREDIT - 0.1)],
)
def test_what_ends_it_ends_it_for_good(pays: bool, num_requests: int, credit: float) -> None:
    trial = DraftTrial()
    assert trial.take_step(pays=False, num_requests=MAX_TRIAL_REQUESTS, credit=MIN_TRIAL_CREDIT)
    assert not trial.take_step(pays, num_requests, credit)
    assert not trial.take_step(pays=False, num_requests=1, credit=10.0)
