"""The first steps of an engine, on engines that exist on paper only: costs are unknown, and passes still slow."""

from itertools import groupby
from statistics import mean

import pytest

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.probes import PROBE_STEPS
from foredraft.engine.calibrate import ROW_COUNTS
from tests.support.simulated_engine import (
    SimulatedEngine,
    find_best_fixed,
    make_starting_engine,
    run,
    wait_for_memory,
)


def measure_start(accept, steps: int) -> float:
    """Mean speed of the first steps over that of plain decoding."""
    return mean(run(make_starting_engine(seed, accept), AdaptiveLengthPolicy(), steps).speed for seed in range(60))


def test_drafts_whose_first_ones_are_rejected_soon_save_time() -> None:
    """The mean was 1.25 while drafting was paused after the warm-up, and plans lived for 16 steps from the start."""
    assert measure_start(lambda step, request: 0.4 if step < 12 else 0.92, steps=80) >= 1.33


@pytest.mark.parametrize(("late", "least"), [(0.2, 0.84), (0.9, 1.6)])
def test_drafts_that_stay_bad_or_good_are_as_fast_as_without_a_trial(late: float, least: float) -> None:
    """The trial stops early. The means were 0.84 and 1.60 before there was one."""
    assert measure_start(lambda step, request: late, steps=40) >= least


def list_probes(accept) -> list[int]:
    """Lengths of the probes of 20 engines, in steps."""
    lengths = []
    for seed in range(20):
        totals = run(make_starting_engine(seed, accept), AdaptiveLengthPolicy(), 400)
        lengths += [len(list(steps)) for reason, steps in groupby(totals.reasons) if reason == "probe"]
    return lengths


def test_a_probe_that_saves_time_goes_on_and_one_that_loses_time_does_not() -> None:
    assert max(list_probes(lambda step, request: 0.1 if step < 40 else 0.97)) > PROBE_STEPS
    assert max(list_probes(lambda step, request: 0.1)) == PROBE_STEPS


@pytest.mark.parametrize(
    ("slope", "num_requests", "least"), [(0.25, 1, 2.35), (0.25, 2, 1.7), (0.25, 4, 1.3), (0.4, 4, 1.15)]
)
def test_drafting_resumes_once_drafts_are_accepted(slope: float, num_requests: int, least: float) -> None:
    """The first three means were 2.21, 1.21 and 1.02 while a probe had four steps: these did not outweigh what had been
    rejected before, and the next probe came twice as late. The last was 1.13 while the plan stayed in a long probe."""
    speeds = []
    for seed in range(20):
        world = SimulatedEngine(
            lambda rows: 1.0 + slope * rows, draft=0.02, noise=0.05, seed=seed, life=10**8,
            accept=lambda step, request: 0.1 if step < 60 else 0.97, load=lambda step: num_requests,
        )  # fmt: skip
        speeds.append(run(world, AdaptiveLengthPolicy(), 600).speed)
    assert mean(speeds) >= least


def test_a_length_beside_the_plan_is_tried_before_a_steep_rise() -> None:
    """The measured curve hides that nine rows take 1.7 times as long as eight. Drafts half as long again as five have
    nine. The mean was 0.945 while no other length was tried, and plans stayed at five or six of seven."""
    ratios = []
    for seed in range(24):
        world = SimulatedEngine(wait_for_memory(0.7), draft=0.05, accept=lambda step, request: 0.85, seed=seed)
        points = [(rows, wait_for_memory(1.4)(rows)) for rows in ROW_COUNTS]
        ratios.append(run(world, AdaptiveLengthPolicy(CostCurve(points)), 1000).speed / find_best_fixed(world, 500)[1])
    assert mean(ratios) >= 0.955
