"""Steps of a pause that are recorded together: decisions and estimates are those of single steps."""

import random

import pytest

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.intervals import LONG_SKIPPED_REPORTS, SKIPPED_REPORTS
from foredraft.draft_length.policy import DraftCandidate, DraftOutcome, StepReport
from foredraft.draft_length.quiet_spell import QuietSpell

REPORT = StepReport(2, 2, 2, 100, 0.0, 1.0)


def test_a_spell_is_for_batches_of_one_size_and_kind() -> None:
    spell = QuietSpell()
    assert not spell.take_step(2, {0})
    spell.begin(2, {0}, 3)
    assert not spell.keep(REPORT), "the step that begins it is recorded as usual"
    assert not spell.take_step(3, {0})
    assert not spell.take_step(2, {0, 1})
    kept = []
    for i in range(3):
        assert spell.take_step(2, {0})
        kept.append(REPORT._replace(step_time=float(i)))
        assert spell.keep(kept[-1])
        assert not spell.keep(REPORT), "one report a step"
    assert not spell.take_step(2, {0})
    assert spell.end() == kept
    assert spell.end() == []


def test_a_spell_ends_at_once() -> None:
    spell = QuietSpell()
    spell.begin(1, {0}, 1000)
    assert spell.take_step(1, {0})
    spell.end()
    assert not spell.keep(REPORT)
    assert not spell.take_step(1, {0})


def run_steps(is_quiet: bool, num_requests: int, seed: int) -> tuple[AdaptiveLengthPolicy, list[tuple[int, ...]]]:
    """Run steps whose drafts lose at first and pay from the middle on; `is_quiet`: as an engine asks the policy."""
    lengths, chance, decisions = AdaptiveLengthPolicy(CostCurve([(1, 1.0), (32, 1.5)])), random.Random(seed), []
    for step in range(3000):
        slots = range(num_requests)
        if step % 50 == 0:
            lengths.forget([step // 50 % num_requests])
        if is_quiet and lengths.repeat_none(num_requests, {0}):
            granted = [0] * num_requests
        else:
            granted = lengths.allocate([DraftCandidate(slot, 8) for slot in slots], num_requests)
        decisions.append(tuple(granted))
        rate = 0.9 if step > 1500 else 0.05
        noise, uniforms = chance.uniform(0.95, 1.05), [chance.random() for _ in range(8)]
        accepted = next((i for i, u in enumerate(uniforms) if u > rate), 8)
        outcomes = tuple(
            DraftOutcome(slot, n, n, tuple(range(1, min(n, accepted) + 1)))
            for slot, n in zip(slots, granted, strict=True)
        )
        rows = num_requests + sum(granted)
        drafting = 0.05 * max(granted)
        seconds = (1.0 + 0.5 * (rows - 1) / 31) * noise + drafting
        lengths.record_step(StepReport(num_requests, rows, rows, 50 * rows, drafting, seconds, outcomes))
    lengths.forget([])
    return lengths, decisions


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_decisions_and_estimates_are_those_of_steps_that_are_recorded_one_by_one(num_requests: int, seed: int) -> None:
    (quiet, taken), (single, expected) = (run_steps(is_quiet, num_requests, seed) for is_quiet in (True, False))
    assert taken == expected
    assert any(map(any, expected[2500:])), "the drafts that pay are found"
    assert quiet.counts == single.counts
    assert quiet.observer.step == single.observer.step == 3000
    assert quiet.observer.credit.seconds == single.observer.credit.seconds
    assert quiet.observer.costs.curve.predict(1, 1, 1, 50) == single.observer.costs.curve.predict(1, 1, 1, 50)


def test_spells_of_a_long_pause_are_longer() -> None:
    lengths = AdaptiveLengthPolicy(CostCurve([(1, 1.0), (32, 9.0)]))
    spells, num_quiet = [], 0
    for _ in range(2000):
        is_repeated = lengths.repeat_none(1, {0})
        granted = 0 if is_repeated else lengths.allocate([DraftCandidate(0, 8)], 1)[0]
        if lengths._quiet.is_taken:
            num_quiet += 1
        else:
            spells.append((num_quiet, lengths.is_resting))
            num_quiet = 0
        outcomes = (DraftOutcome(0, granted, granted, ()),)
        lengths.record_step(StepReport(1, 1 + granted, 1 + granted, 50, 0.2 * granted, 1.0 + 0.4 * granted, outcomes))
    assert max(spell for spell, is_resting in spells if not is_resting) <= SKIPPED_REPORTS - 1
    assert max(spell for spell, _ in spells) == LONG_SKIPPED_REPORTS - 1
