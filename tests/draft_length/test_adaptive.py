"""The promises of docs/controller.md, on engines that exist on paper only (simulated.py). Nothing here is timed."""

from dataclasses import replace

import pytest

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.current_plan import MAX_PROMPT_STEPS
from foredraft.draft_length.intervals import MAX_PLAIN_INTERVAL
from foredraft.draft_length.plain_run import MIN_TRANSITION_STEPS, NUM_MEASURED
from foredraft.draft_length.policy import DraftCandidate, DraftOutcome, FixedLengthPolicy, StepReport
from foredraft.draft_length.probes import PROBE_NODES, PROBE_STEPS
from foredraft.draft_length.warmup import NODES
from foredraft.engine.calibrate import ROW_COUNTS
from tests.support.simulated_engine import (
    CURVES,
    GRAPH_BUCKETS,
    SimulatedEngine,
    SimulationTotals,
    bend,
    find_best_fixed,
    graphs,
    linear,
    run,
    stairs,
    wait_for_memory,
)

PLAIN, BEST = 0.97, 0.95  # of plain decoding's speed, at any load; of the best fixed K's, for few requests


def adaptive(world: SimulatedEngine, has_curve: bool = True) -> AdaptiveLengthPolicy:
    return AdaptiveLengthPolicy(CostCurve(world.points()) if has_curve else None)


def simulate(
    world: SimulatedEngine, steps: int = 3000, has_curve: bool = True
) -> tuple[AdaptiveLengthPolicy, SimulationTotals]:
    lengths = adaptive(world, has_curve)
    return lengths, run(world, lengths, steps)


def constant(chance: float):
    return lambda step, request: chance


@pytest.mark.parametrize("has_curve", [True, False])
@pytest.mark.parametrize("draft", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("curve", CURVES)
def test_one_request_is_never_slower_than_plain_and_near_the_best_length(curve, draft, has_curve):
    for chance in (0.05, 0.5, 0.95):
        world = SimulatedEngine(
            CURVES[curve], draft=draft, accept=constant(chance), reading=0.02 * draft, outliers=0.002
        )
        _, totals = simulate(world, has_curve=has_curve)
        assert totals.speed >= PLAIN, chance
        # A shelf or a bend that was not measured is found only by walking over its edge.
        near = BEST if has_curve else {"stairs": 0.85, "bend": 0.93}.get(curve, BEST)
        assert totals.speed >= near * find_best_fixed(world, 800)[1], chance


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("load", [4, 16, 64])
def test_more_requests_are_never_slower_than_plain(curve, load):
    for chance, draft, sampled in ((0.05, 0.2, 0.0), (0.5, 0.0, 0.1), (0.9, 0.05, 0.0)):
        world = SimulatedEngine(CURVES[curve], sampled, draft=draft, accept=constant(chance), load=lambda step: load)
        assert simulate(world, 3000 if load < 64 else 1000)[1].speed >= PLAIN, (chance, draft)


@pytest.mark.parametrize("slope", [0.1, 0.25])
def test_long_drafts_that_fail_in_bursts_are_not_given_up(slope):
    """Copying an input is right for many steps, then wrong for some. A wrong draft of 31 nodes costs up to eight plain
    steps. A time credit of plain steps was used up after a few of them, and drafting rested for hundreds of steps."""
    world = SimulatedEngine(
        lambda rows: 1 + slope * (rows - 1),
        accept=lambda step, _: 0.98 if step % 72 < 60 else 0.02,
        most=31,
        lookup=0.0,
    )
    lengths, totals = simulate(world, 2000)
    assert lengths.counts["guard"] < 100
    assert totals.speed >= 2.2


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_four_requests_are_near_the_best_length(chance):
    world = SimulatedEngine(bend, draft=0.1, accept=constant(chance), load=lambda step: 4)
    assert simulate(world)[1].speed >= BEST * find_best_fixed(world, 1000)[1]


@pytest.mark.parametrize(
    "world",
    [
        SimulatedEngine(per_scored=0.3, draft=0.1, accept=constant(0.4)),
        SimulatedEngine(draft=0.2, accept=constant(0.1), outliers=0.03, noise=0.1, reading=0.02),
        SimulatedEngine(draft=10.0, accept=constant(0.3), reading=0.05),
        SimulatedEngine(draft=0.2, accept=constant(0.1), reading=0.1),
        SimulatedEngine(draft=0.2, accept=constant(0.1), follow=0.1),
        SimulatedEngine(bend, draft=0.1, load=lambda step: 8, life=100, reading=0.002, prompt=300),
        SimulatedEngine(draft=0.2, load=lambda step: 4, life=30, reading=0.01, prompt=500, accept=constant(0.6)),
        SimulatedEngine(bend, draft=0.1, load=lambda step: 1 + abs(step % 126 - 63), reading=0.002),
        SimulatedEngine(bend, draft_row=0.05, load=lambda step: 16, accept=constant(0.8)),
        SimulatedEngine(draft=1.0, accept=lambda step, request: 0.95 if step // 100 % 2 else 0.1, reading=0.02),
        SimulatedEngine(stairs, proposes=0.1, accept=constant(0.6), load=lambda step: 16),
        SimulatedEngine(bend, branches=4, draft=0.05, accept=constant(0.2), load=lambda step: 4),
    ],
    ids="sampled outliers ruinous reading follow churn short-lives load rows drift lookup tree".split(),
)
def test_nothing_makes_it_slower_than_plain(world):
    assert simulate(world)[1].speed >= PLAIN
    assert simulate(replace(world, seed=1), 2000)[1].speed >= PLAIN


@pytest.mark.parametrize("after", [0.3, 0.5])
@pytest.mark.parametrize(("draft", "chance"), [(0.6, 0.5), (0.3, 0.2), (0.5, 0.4)])
def test_plain_steps_that_are_slow_right_after_drafts_do_not_make_drafts_seem_to_pay(after, draft, chance):
    """Fault: a run of four plain steps, of which two counted, was a tenth slower than plain decoding. Drafts that lost
    a tenth went on for as long as the request."""
    for seed in range(4):
        world = SimulatedEngine(draft=draft, accept=constant(chance), after=after, seed=seed)
        assert simulate(world, 2000, has_curve=False)[1].speed >= PLAIN, seed


@pytest.mark.parametrize("load", [1, 2])
@pytest.mark.parametrize(("draft", "chance"), [(0.5, 0.4), (0.6, 0.5), (0.3, 0.2), (0.9, 0.7)])
def test_noise_does_not_make_drafts_that_lose_seem_to_pay(draft, chance, load):
    """Times with a spread of 12 %, a machine that changes its speed, and plain steps that are slow after drafts.

    Fault: the means of four seeds were 0.93 to 0.98, and the lowest seed had 0.87.
    """
    speeds = []
    for seed in range(4):
        world = SimulatedEngine(
            bend, draft=draft, accept=constant(chance), load=lambda step: load, reading=0.01, prompt=64, life=60,
            after=0.35, noise=0.12, outliers=0.003, swing=lambda step: 1.0 + 0.2 * (step // 300 * 7 % 3), seed=seed,
        )  # fmt: skip
        speeds.append(simulate(world, 2000)[1].speed)
    assert sum(speeds) / len(speeds) >= 0.975
    assert min(speeds) >= 0.965


@pytest.mark.parametrize("load", [1, 4])
def test_long_runs_of_plain_steps_cost_little_where_drafts_pay(load):
    for draft, chance in ((0.2, 0.5), (0.2, 0.7), (0.1, 0.8)):
        world = SimulatedEngine(draft=draft, accept=constant(chance), load=lambda step: load, after=0.3)
        speed = simulate(world, 2000, has_curve=False)[1].speed
        assert speed >= 0.97 * find_best_fixed(world, 1000)[1], (draft, chance)


def test_a_curve_that_is_wrong_is_found_out():
    """The measured curve is flat, but every row costs time. The model permits drafts, the time credit stops them."""
    world = SimulatedEngine(linear, accept=constant(0.7))
    totals = run(world, AdaptiveLengthPolicy(CostCurve([(1, 1.0), (64, 1.0)])))
    assert totals.speed >= PLAIN


@pytest.mark.parametrize("proposes", [0.1, 0.5])
def test_a_lookup_that_seldom_finds_anything_is_left_on(proposes):
    world = SimulatedEngine(bend, proposes=proposes, accept=constant(0.8))
    _, totals = simulate(world)
    assert totals.speed >= BEST * find_best_fixed(world, 3000)[1]


def test_drifting_acceptance_is_followed_better_than_by_any_fixed_length():
    world = SimulatedEngine(draft=0.2, accept=lambda step, request: 0.1 if step // 1000 % 2 else 0.9, reading=0.004)
    assert simulate(world)[1].speed >= BEST * find_best_fixed(world, 3000)[1]


def test_drafting_resumes_after_acceptance_recovers():
    world = SimulatedEngine(draft=0.2, accept=lambda step, request: 0.05 if step < 800 else 0.9, reading=0.004)
    lengths, totals = simulate(world, 2500)
    assert sum(budget > 0 for budget in totals.budgets[300:800]) < 50
    assert sum(budget > 0 for budget in totals.budgets[1800:]) > 600
    assert {"start", "does not pay", "probe", "pays", "measure"} <= set(lengths.counts)


def test_a_machine_that_swings_is_followed():
    world = SimulatedEngine(bend, draft=0.2, accept=constant(0.6), swing=lambda step: 1 + step // 400 % 2)
    assert simulate(world)[1].speed >= BEST * find_best_fixed(world, 1500)[1]


def test_what_is_accepted_more_is_drafted_more():
    world = SimulatedEngine(
        stairs, draft=0.02, load=lambda step: 6, accept=lambda step, request: 0.95 if request == 0 else 0.1
    )
    _, totals = simulate(world, 1000)
    assert totals.nodes[0] > 2 * max(totals.nodes[request] for request in range(1, 6))


def test_drawn_texts_that_keep_nothing_do_not_spoil_greedy_ones():
    """Greedy requests have accepted drafts. Sampled requests have rejected drafts, until no request is drafted for.
    The next greedy request is drafted for at once, the next sampled request is not."""
    greedy = SimulatedEngine(curve=lambda rows: 0.9 + 0.1 * rows, draft=0.1, accept=constant(0.9))
    drawn = replace(greedy, accept=constant(0.02), kind=lambda request: 1)
    lengths = adaptive(greedy)
    budgets = []
    for world, steps in ((greedy, 300), (drawn, 1000), (drawn, 20), (greedy, 20)):
        budgets.append(run(world, lengths, steps).budgets)
        lengths.forget([0])
    assert sum(budgets[1][-200:]) <= 3 * PROBE_NODES * PROBE_STEPS
    assert sum(budgets[2]) <= PROBE_NODES * PROBE_STEPS
    assert min(budgets[3]) > 0


def test_what_drawing_costs_is_not_what_guessing_costs():
    """Expensive sampled drafts are stopped; the next greedy request, whose drafts are cheap, drafts at once."""
    greedy = SimulatedEngine(draft=0.05, accept=constant(0.6))
    drawn = replace(greedy, draft=1.5, kind=lambda request: 1)
    lengths = adaptive(greedy)
    budgets = []
    for world, steps in ((greedy, 300), (drawn, 600), (greedy, 20), (drawn, 20)):
        budgets.append(run(world, lengths, steps).budgets)
        lengths.forget([0])
    assert sum(budgets[1][-100:]) <= 2 * PROBE_NODES * PROBE_STEPS
    assert min(budgets[2]) > 0
    assert sum(budgets[3]) <= PROBE_NODES * PROBE_STEPS


def test_it_does_not_flap():
    world = SimulatedEngine(bend, draft=0.2, accept=constant(0.7))
    _, totals = simulate(world, 1500)
    without = [
        i for i, budget in enumerate(totals.budgets) if not budget and totals.reasons[i] not in ("start", "measure")
    ]
    assert not without


def test_a_step_is_the_same_every_time():
    world = SimulatedEngine(bend, draft=0.1, load=lambda step: 5, life=80, accept=constant(0.6), outliers=0.01)
    (_, one), (_, two) = simulate(world, 500), simulate(world, 500)
    assert one == two


def test_a_length_never_depends_on_what_is_drafted_afterwards():
    """Two runs that part in the outcome of one step had the same budgets up to and including that step."""
    for parting in (8, 20, 77):
        runs = []
        for kept in ((), (1, 2)):
            lengths, budgets = AdaptiveLengthPolicy(CostCurve([(1, 1.0), (64, 1.5)])), []
            for step in range(100):
                [budget] = lengths.allocate([DraftCandidate(0, 6)], 1, 100)
                budgets.append(budget)
                accepted = kept[:budget] if step == parting else tuple(range(1, min(budget, step % 4) + 1))
                rows = 1 + budget
                lengths.record_step(
                    StepReport(
                        1,
                        rows,
                        rows,
                        100,
                        0.1 * budget,
                        1.0 + 0.1 * budget,
                        (DraftOutcome(0, budget, budget, accepted),),
                    )
                )
            runs.append(budgets)
        assert runs[0][: parting + 1] == runs[1][: parting + 1]


def test_no_request_exceeds_its_limit_and_a_requested_length_is_a_limit():
    lengths = AdaptiveLengthPolicy()
    for step in range(60):
        asks = [
            DraftCandidate(0, 5, min_nodes=5),
            DraftCandidate(1, step % 4),
            DraftCandidate(2, 1),
            DraftCandidate(3, 0),
        ]
        budgets = lengths.allocate(asks, 4, 400)
        assert budgets[0] == 5
        assert all(0 <= budget <= ask.max_nodes for budget, ask in zip(budgets, asks, strict=True))
        outcomes = tuple(DraftOutcome(a.slot, b, b, tuple(range(1, b + 1))) for a, b in zip(asks, budgets, strict=True))
        rows = 4 + sum(budgets)
        lengths.record_step(StepReport(4, rows, rows, 100 * rows, 0.01, 1.0, outcomes))
        assert lengths.decision.nodes == sum(budgets)
    assert lengths.allocate([DraftCandidate(0, 5, min_nodes=5)], 1) == [5]
    assert lengths.decision.reason == "fixed"


def test_a_drafter_that_never_pays_comes_to_rest_and_a_probe_does_not_end_it():
    world = SimulatedEngine(bend, draft=1.0, load=lambda step: 4, life=40, accept=constant(0.3))
    lengths, resting, drafting = adaptive(world), [], []
    record = lengths.record_step

    def record_step(report: StepReport) -> None:
        record(report)
        resting.append(lengths.is_resting)
        drafting.append(lengths.observer.is_drafting)

    lengths.record_step = record_step  # type: ignore[method-assign]
    totals = run(world, lengths, 5000)
    assert not any(is_resting and is_drafting for is_resting, is_drafting in zip(resting, drafting, strict=True))
    assert all(resting[-4000:])
    assert "probe" in totals.reasons[-4000:]


@pytest.mark.parametrize("follow", [0.01, 0.03])
def test_a_drafter_that_is_costly_to_observe_is_observed_for_probes_alone(follow):
    """Observing costs 4 or 12 % of a plain step, and drafts never pay. The bound is that of no drafter."""
    world = SimulatedEngine(
        bend, draft=0.5, load=lambda step: 4, life=40, accept=constant(0.2), follow=follow, misses=True
    )
    _, totals = simulate(world, 6000)
    assert totals.bare / totals.seconds >= PLAIN
    assert sum(totals.observed[2000:]) < 0.25 * 4000
    assert "probe" in totals.reasons[2000:]


def test_a_drafter_that_is_cheap_to_observe_is_always_observed():
    world = SimulatedEngine(
        bend, draft=0.5, load=lambda step: 4, life=40, accept=constant(0.2), follow=0.001, misses=True
    )
    _, totals = simulate(world, 2000)
    assert all(totals.observed)


def test_drafts_that_begin_to_pay_are_found_though_most_requests_were_not_observed():
    """From step 3,000 on the text is easy. Requests that start from the next probe on draft."""
    world = SimulatedEngine(
        bend, draft=0.05, load=lambda step: 4, life=60, follow=0.01, misses=True,
        accept=lambda step, request: 0.9 if step >= 3000 else 0.05,
    )  # fmt: skip
    _, totals = simulate(world, 6000)
    assert not all(totals.observed[1000:3000])
    assert all(totals.observed[-1500:])
    assert sum(budget > 0 for budget in totals.budgets[-1500:]) > 1200


def test_a_request_that_is_not_ready_is_granted_nothing():
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.9), load=lambda step: 2), 300)
    lengths._held.release()
    lengths.observer.steps_since_plain = 0  # no run of plain steps is due
    candidates = [DraftCandidate(0, 8), DraftCandidate(1, 8, is_ready=False)]
    granted = [lengths.allocate(candidates, 2) for _ in range(20)]
    assert all(row[1] == 0 for row in granted)
    assert any(row[0] > 0 for row in granted)


def test_drafts_that_pay_never_let_it_rest():
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8)), 300)
    assert not lengths.is_resting


def test_a_step_without_drafts_is_decided_without_its_candidates_until_something_can_change():
    world = SimulatedEngine(bend, draft=1.0, load=lambda step: 4, accept=constant(0.3))
    lengths, _ = simulate(world, 1000)
    candidates = [DraftCandidate(slot, 4) for slot in range(4)]
    report = StepReport(4, 4, 4, 400, 0.0, 1.0, tuple(DraftOutcome(c.slot, 0, 0) for c in candidates))
    while any(lengths.allocate(candidates, 4)):  # the end of a probe
        lengths.record_step(report)
    counts = lengths.counts.total()
    assert lengths.repeat_none(4, {0})
    lengths.record_step(report)
    assert not lengths.repeat_none(4, {0, 1}), "a new kind of request has no plan"
    assert not lengths.repeat_none(64, {0}), "a new load has a plan of its own"
    assert lengths.counts.total() == counts + 1
    lengths.observer.step = lengths._probes.next_step
    assert not lengths.repeat_none(4, {0}), "a probe is due"


def test_a_pause_that_only_the_credit_prolongs_is_observed_and_planned_when_it_may_end():
    """Fault: the drafter was observed, and every eighth step decided, while the credit could not end the pause."""
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8), load=lambda step: 2), 300)
    candidates = [DraftCandidate(slot, 8) for slot in range(2)]
    report = StepReport(2, 2, 2, 100, 0.0, 1.0, tuple(DraftOutcome(c.slot, 0, 0) for c in candidates))
    lengths.observer.settle()
    credit = lengths.observer.credit
    credit.seconds, credit.observing_share = -0.2 * credit.plain_step_cost, 0.05
    lengths._held.release()
    assert not any(lengths.allocate(candidates, 2))
    assert lengths.decision.reason == "guard"
    needed, num_repeated = [], 0
    for _ in range(200):
        needed.append(lengths.needs_observation)
        lengths.record_step(report)
        if lengths.repeat_none(2, {0}):
            num_repeated += 1
        elif any(lengths.allocate(candidates, 2)):
            break
    assert 110 < len(needed) < 140, "the credit has to earn 1.2 plain steps"
    assert not any(needed[:40])
    assert all(needed[-40:])
    assert num_repeated >= len(needed) - 12


def test_a_run_of_plain_steps_decides_without_candidates_and_plans_anew_after_it():
    """Fault: its steps decided as those with drafts do, so plain decoding seemed slower than it is."""
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8), load=lambda step: 2), 400)
    candidates = [DraftCandidate(slot, 8) for slot in range(2)]
    lengths.observer.steps_since_plain = MAX_PLAIN_INTERVAL
    lengths._held.release()
    assert not any(lengths.allocate(candidates, 2))
    assert lengths.decision.reason == "measure"
    plan, steps = lengths._plan.plan, 1
    assert not lengths.repeat_none(2, {0, 1}), "a new kind of request has no plan"
    while lengths.repeat_none(2, {0}):
        steps += 1
    assert steps >= MIN_TRANSITION_STEPS + NUM_MEASURED
    assert lengths.counts["measure"] >= steps
    assert any(lengths.allocate(candidates, 2))
    assert lengths._plan.plan is not plan


def test_a_pause_at_a_new_load_has_a_new_plan():
    world = SimulatedEngine(bend, draft=1.0, load=lambda step: 4, accept=constant(0.3))
    lengths, _ = simulate(world, 1000)
    assert not lengths.observer.is_drafting
    for load in (4, 16, 1):
        plan = lengths._plan.plan
        lengths._probes.slots = ()
        lengths.allocate([DraftCandidate(slot, 4) for slot in range(load)], load)
        assert (lengths._plan.plan is plan) == (load == 4)


def test_the_next_request_of_a_slot_has_a_plan_of_its_own_at_once():
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8), load=lambda step: 2), 300)
    candidates = [DraftCandidate(slot, 8) for slot in range(2)]
    lengths.forget([1])
    assert 1 not in lengths._plan.plan.nodes_by_slot
    assert all(lengths.allocate(candidates, 2))


def test_a_request_like_the_one_that_ended_drafts_at_once():
    """Fault: with an encoder-decoder model it has the same slot and size, so the plan without nodes was kept."""
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8), load=lambda step: 1), 300)
    granted = []
    for _ in range(3):
        granted += lengths.allocate([DraftCandidate(0, 8)], 1)
        lengths.forget([0])
    assert min(granted) > PROBE_NODES


@pytest.mark.parametrize(("load", "is_planned_anew"), [(1, True), (4, True), (8, False)])
def test_a_pause_for_what_few_requests_accepted_ends_with_a_request(load, is_planned_anew):
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8), load=lambda step: load), 300)
    candidates = [DraftCandidate(slot, 8) for slot in range(load)]
    while lengths.observer.is_drafting:
        granted = lengths.allocate(candidates, load)
        outcomes = tuple(DraftOutcome(slot, nodes, nodes) for slot, nodes in enumerate(granted))
        rows = load + sum(granted)
        lengths.record_step(StepReport(load, rows, rows, 50 * rows, 0.1, 1.3, outcomes))
    assert lengths.repeat_none(load, {0})
    lengths.forget([0])
    assert lengths.repeat_none(load, {0}) != is_planned_anew


@pytest.mark.parametrize("load", [2, 4])
def test_a_step_with_a_prompt_pauses_no_drafts_of_other_steps(load):
    """Fault: drafts cost more in a pass with a prompt. The plan of such a step was kept, and could begin a pause."""
    world = SimulatedEngine(
        bend, draft=0.15, accept=constant(0.7), load=lambda step: load, life=60, chunk=64, lookup=0.02, noise=0.1
    )
    lengths, totals = simulate(world, 2000)
    assert lengths.counts["pays"] >= 0.85 * lengths.counts.total()
    assert totals.speed >= 0.98 * find_best_fixed(world, 2000)[1]


def test_the_plan_of_a_step_with_a_prompt_holds_for_that_step_alone():
    lengths, _ = simulate(SimulatedEngine(wait_for_memory(1.0), accept=constant(0.8), load=lambda step: 2), 300)
    candidates = [DraftCandidate(slot, 8) for slot in range(2)]
    plan = lengths._plan.plan
    for has_expired in (False, True):
        if has_expired:
            lengths._plan.expire()
        lengths._plan.update(candidates, candidates, 100, 0)
        assert lengths._plan.is_passing
        assert lengths._plan.plan is plan
    for _ in range(MAX_PROMPT_STEPS):  # a long run of them is a batch like any other
        lengths._plan.update(candidates, candidates, 100, 0)
    assert not lengths._plan.is_passing
    assert lengths._plan.plan is not plan
    plan = lengths._plan.plan
    lengths._plan.update(candidates, candidates, 2, 0)
    assert lengths._plan.plan is not plan, "the plan for prompts does not hold without them"


def test_a_step_with_a_prompt_or_a_last_token_begins_no_run_of_plain_steps():
    """Fault: the time of a plain step for fewer requests is not known, so a run began whenever one could not draft."""
    lengths, _ = simulate(SimulatedEngine(accept=constant(0.8), load=lambda step: 2), 400)
    candidates = [DraftCandidate(slot, 8) for slot in range(2)]
    lengths.observer.steps_since_plain = MAX_PLAIN_INTERVAL - 1
    for batch, pass_tokens in ((candidates, 65), (candidates[:1], 2)):
        lengths._held.release()
        assert any(lengths.allocate(batch, pass_tokens))
    lengths._held.release()
    assert not any(lengths.allocate(candidates, 2))


def test_forgotten_slots_leave_nothing():
    world = SimulatedEngine(bend, draft=0.1, load=lambda step: 4, life=40, accept=constant(0.6))
    lengths, _ = simulate(world, 400)
    lengths.forget(range(16))
    assert not lengths.observer.unread._first_unread_step
    assert not lengths._probes.slots
    assert not lengths.observer.survival._accepted_rates._tally_by_slot
    assert not lengths.observer.survival._drafted_rates._tally_by_slot


def test_steps_without_a_scored_row_are_harmless():
    lengths = AdaptiveLengthPolicy(CostCurve([(1, 1.0), (512, 8.0)]))
    for _ in range(5):
        lengths.record_step(StepReport(1, 512, 0, 512 * 256, 0.0, 8.0))
    assert lengths.allocate([DraftCandidate(0, 4)], 1) == [NODES[0]]


def test_the_decision_says_what_it_expects():
    world = SimulatedEngine(draft=0.1, accept=constant(0.8))
    lengths, totals = simulate(world, 1000)
    decision = lengths.decision
    assert sum(lengths.counts.values()) == 1000
    assert decision.plain_rate == pytest.approx(1.0, rel=0.1)
    assert decision.rate / decision.plain_rate == pytest.approx(totals.speed, rel=0.15)
    assert 0.3 < decision.acceptance < 1.0


def test_fixed_gives_what_is_asked_for():
    assert FixedLengthPolicy().allocate([DraftCandidate(0, 3), DraftCandidate(1, 7, min_nodes=7)], 2) == [3, 7]


def test_a_dear_drafter_that_reads_slowly_is_given_up_although_it_would_pay():
    """A known shortfall: the time credit ends before a gain of 10% is found. It must at least cost nothing."""
    world = SimulatedEngine(stairs, draft=1.0, reading=0.02, accept=constant(0.95), load=lambda step: 4)
    assert simulate(world)[1].speed >= 0.98


@pytest.mark.parametrize("load", [1, 4])
@pytest.mark.parametrize(("least", "most"), [(2, 4), (3, 3), (0, 2)])
def test_the_policy_chooses_within_the_bounds_of_operator_and_request(least, most, load):
    """Drafts pay, lose, are probed and measured: the bounds hold in every step, also if the best length is outside."""
    for chance, draft in ((0.95, 0.0), (0.05, 0.5)):
        world = SimulatedEngine(
            draft=draft, accept=constant(chance), load=lambda step: load, least=least, most=most, life=10**8
        )
        lengths, totals = simulate(world, 700)
        assert all(load * least <= granted <= load * most for granted in totals.budgets)
        # the best length outside the bounds: the nearest inside it
        assert totals.budgets[-1] == load * (most if chance > 0.5 else least)
        if least == most:
            assert set(lengths.counts) == {"fixed"}


def test_the_plan_adds_nodes_to_the_least_length_if_they_pay():
    """Nodes up to the least length are granted in any case: those beyond it are compared with them, not with none."""
    world = SimulatedEngine(stairs, accept=constant(0.7), load=lambda step: 2, least=2, most=8)
    _, totals = simulate(world, 1500)
    assert max(set(totals.budgets[-200:]), key=totals.budgets[-200:].count) == 6  # 2 requests, 8 rows: end of the stair


@pytest.mark.parametrize("load", [1, 3, 9, 20])
def test_the_chosen_length_sits_at_the_end_of_a_stair(load):
    """A pass costs what its graph costs, so the rows up to the next bucket are free and the first beyond it is dear."""
    shares = []
    for seed in range(5):
        world = SimulatedEngine(graphs, draft_row=0.001, accept=constant(0.8), load=lambda step: load, seed=seed)
        lengths = AdaptiveLengthPolicy(CostCurve(world.points(GRAPH_BUCKETS), GRAPH_BUCKETS))
        totals = run(world, lengths, 1500)
        ends = [budget + load in GRAPH_BUCKETS for budget, reason in zip(totals.budgets, totals.reasons, strict=True)
                if reason == "pays"]  # fmt: skip
        assert len(ends) > 1000
        shares.append(sum(ends) / len(ends))
        assert totals.speed >= BEST * find_best_fixed(world, 800)[1]
    assert sum(shares) > 0.92 * len(shares), "all but the lengthened and shortened drafts"


def test_no_draft_leaves_the_last_graph():
    """Drafts that pay, probes, long drafts and the start: rows beyond the last graph cost three passes."""
    world = SimulatedEngine(graphs, accept=constant(0.95), load=lambda step: 60)
    lengths = AdaptiveLengthPolicy(CostCurve(world.points(GRAPH_BUCKETS), GRAPH_BUCKETS))
    totals = run(world, lengths, 500)
    assert max(totals.budgets) + 60 == GRAPH_BUCKETS[-1]


FAST, SLOW = wait_for_memory(0.7), wait_for_memory(1.4)


@pytest.mark.parametrize(
    ("measured", "real", "load", "chance"),
    [(SLOW, FAST, 1, 0.85), (SLOW, FAST, 2, 0.85), (SLOW, FAST, 4, 0.7), (FAST, SLOW, 8, 0.85)],
)
def test_memory_and_arithmetic_that_move_apart_have_their_own_prices(measured, real, load, chance):
    """Slow memory hides stairs of the arithmetic while the curve is measured. These four were 0.80, 0.66, 0.79 and 0.84
    of the best length with one slowdown for all sizes: the size in use set it, so the other sizes kept their prices.
    The mean counts, because single runs differ by 0.02."""
    ratios = []
    for seed in range(6):
        world = SimulatedEngine(real, draft=0.05, accept=constant(chance), load=lambda step: load, seed=seed)
        lengths = AdaptiveLengthPolicy(CostCurve(replace(world, curve=measured).points(ROW_COUNTS)))
        ratios.append(run(world, lengths, 1000).speed / find_best_fixed(world, 500)[1])
    assert sum(ratios) / len(ratios) >= 0.94


def test_what_observing_costs_counts_towards_the_promise():
    """A drafter that takes 2% of a step to observe leaves less time for probes: plain decoding has no drafter."""
    world = SimulatedEngine(linear, draft=0.3, reading=0.02, follow=0.02, accept=constant(0.1), load=lambda step: 8)
    totals = simulate(world, 2000)[1]
    pass_time, observing = linear(8), 0.02 * 8
    assert totals.speed * pass_time / (pass_time + observing) >= PLAIN
