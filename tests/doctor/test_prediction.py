"""Predictions follow from acceptance and costs: the right length, the right speed, and the reason of a loss."""

import pytest

from foredraft.doctor.acceptance import MeasuredAcceptance, estimate_acceptance
from foredraft.doctor.cost_fit import drop_outliers, fit_costs
from foredraft.doctor.prediction import StreamCosts, predict_streams
from foredraft.doctor.step_runs import StreamRuns, Wave
from foredraft.draft_length.policy import DraftOutcome, StepReport

PASS, PER_ROW, PER_LEVEL, HOST = 10e-3, 0.5e-3, 1e-3, 2e-3  # seconds
POINTS = [(rows, PASS + PER_ROW * rows) for rows in (1, 2, 4, 8, 16, 32)]
RATE = 0.7


def make_report(streams: int, length: int, accepted: int = 0, factor: float = 1.0) -> StepReport:
    """Make the report of a step on a machine with known costs."""
    rows = streams * (1 + length)
    draft = PER_LEVEL * length
    step = PASS + PER_ROW * rows + HOST + draft
    outcome = [DraftOutcome(slot, length, length, tuple(range(1, accepted + 1))) for slot in range(streams)]
    return StepReport(streams, rows, rows, 100 * rows, factor * draft, factor * step, tuple(outcome))


def make_runs(streams: int, lengths: tuple[int, ...]) -> StreamRuns:
    start = StepReport(streams, 50 * streams, streams, 0, 0.0, 0.1, ())
    steps = [make_report(streams, length) for _ in range(40) for length in lengths]
    return StreamRuns([Wave([start, *steps])])


def make_acceptance(rate: float, longest: int = 8) -> dict[int, MeasuredAcceptance]:
    return {
        n: MeasuredAcceptance(tuple(rate ** (j + 1) for j in range(n)), (1.0,) * n, 200, int(200 * rate), 200)
        for n in range(1, longest + 1)
    }


def make_costs(streams: int, start: float = 0.0) -> StreamCosts:
    plain, drafting = make_runs(streams, (0,)), make_runs(streams, (8, 1, 4, 2, 8, 3, 6))
    return StreamCosts(streams, fit_costs(POINTS, plain), fit_costs(POINTS, drafting), start, start)


def compute_speed_up(streams: int, length: int, rate: float) -> float:
    """Compute the true speed-up of the machine of `make_report`."""
    tokens = sum(rate**j for j in range(length + 1))
    plain = PASS + PER_ROW * streams + HOST
    return tokens * plain / (PASS + PER_ROW * streams * (1 + length) + HOST + PER_LEVEL * length)


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_length_and_speed_are_those_of_a_machine_with_known_costs(streams, rate):
    found = predict_streams(make_costs(streams), make_acceptance(rate), 100)
    true = [compute_speed_up(streams, n, rate) for n in range(1, 9)]
    assert list(found.by_length.values()) == pytest.approx(true, rel=0.02)
    assert true[found.length - 1] == pytest.approx(max(true), rel=0.01)
    assert found.speed_up == pytest.approx(max(true), rel=0.02)


def test_the_prediction_includes_what_a_step_costs_beside_the_passes():
    """Fault: a prediction from the two passes alone, without the engine's own work."""
    found = predict_streams(make_costs(1), make_acceptance(RATE), 100)
    tokens = sum(RATE**j for j in range(5))
    without_host = tokens * (PASS + PER_ROW) / (PASS + PER_ROW * 5 + PER_LEVEL * 4)
    assert found.by_length[4] != pytest.approx(without_host, rel=0.02)
    assert found.by_length[4] == pytest.approx(compute_speed_up(1, 4, RATE), rel=0.02)


def test_the_time_until_the_first_token_lowers_the_speed_up():
    usual = predict_streams(make_costs(1), make_acceptance(RATE), 100).speed_up
    late = predict_streams(make_costs(1, start=1.0), make_acceptance(RATE), 100).speed_up
    assert 1.0 < late < usual - 0.1
    longer = predict_streams(make_costs(1, start=1.0), make_acceptance(RATE), 1000).speed_up
    assert late < longer < usual


def test_a_free_draft_is_predicted_beside_the_real_one():
    found = predict_streams(make_costs(1), make_acceptance(RATE), 100)
    tokens = [sum(RATE**j for j in range(n + 1)) for n in range(1, 9)]
    free = [t * (PASS + PER_ROW + HOST) / (PASS + PER_ROW * (n + 2) + HOST) for n, t in enumerate(tokens)]
    assert found.undrafted_speed_up == pytest.approx(max(free), rel=0.02)


def test_interrupted_steps_do_not_count():
    """Fault: a step during which another program ran made drafts of its length look slow."""
    reports = [make_report(1, 4) for _ in range(20)] + [make_report(1, 1) for _ in range(20)]
    slow = make_report(1, 1, factor=5.0)
    assert drop_outliers([*reports, slow]) == reports


def test_acceptance_is_the_mean_over_all_drafts():
    """The estimate forgets nothing, unlike that of a running engine: the first half counts like the second."""
    reports = [make_report(1, 2, accepted=2)] * 1000 + [make_report(1, 2, accepted=0)] * 1000
    found = estimate_acceptance(reports, 2, kind=0)
    assert found.survival == pytest.approx((0.5, 0.5), abs=0.01)
    assert (found.num_drafts, found.num_first_accepted) == (2000, 1000)
    assert found.tokens_per_pass(2) == pytest.approx(2.0, abs=0.02)
    assert not found.is_near_chance
    assert estimate_acceptance([make_report(1, 2)] * 50, 2, kind=0).is_near_chance


def test_drafts_that_are_not_made_cost_no_rows():
    reports = [
        StepReport(1, 1 + n, 1 + n, 100, 0.0, 0.01, (DraftOutcome(0, 4, n, (1,) if n else ()),)) for n in (4, 0) * 200
    ]
    found = estimate_acceptance(reports, 4, kind=0)
    assert found.nodes_per_pass(4) == pytest.approx(2.0, abs=0.05)
    assert found.survival[0] == pytest.approx(0.5, abs=0.02)
    assert found.num_drafts == 200


def test_every_length_has_its_own_acceptance_and_only_choices_are_chosen():
    """Fault: drafts of mixed lengths made long ones look 16 % better than they are on their own."""
    acceptance = make_acceptance(RATE)
    acceptance[8] = make_acceptance(0.1)[8]
    found = predict_streams(make_costs(1), acceptance, 100)
    assert found.by_length[8] < 1.0 < found.by_length[5]
    chosen = predict_streams(make_costs(1), acceptance, 100, choices=(2, 8))
    assert chosen.length == 2
    assert chosen.by_length == pytest.approx(found.by_length)
