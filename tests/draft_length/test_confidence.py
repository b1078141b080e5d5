"""Predicted acceptance in the draft-length policy: what it follows, what it ignores, and that output stays equal."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from foredraft import LLM, Sampling
from foredraft.draft_length.acceptance import SurvivalEstimator
from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.policy import DraftCandidate, DraftOutcome, StepReport
from foredraft.drafters.interface import Drafter
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.request import Batch
from foredraft.tree import TokenTree
from tests.support import tiny_models
from tests.support.simulated_engine import SimulatedEngine, run, stairs

NODES, GOOD, BAD = 4, 0.9, 0.2
Predictor = Callable[[float, random.Random], float]  # predicted acceptance of a node from the true one


def exact(rate: float, chance: random.Random) -> float:
    return rate


def guess_blindly(rate: float, chance: random.Random) -> float:
    return chance.random()


def record(
    survival: SurvivalEstimator, rate: float, drafts: int, predict: Predictor | None, seed: int = 0, slot: int = 0
) -> None:
    """Record drafts with a rate of acceptance, and their predictions."""
    chance, foresight = random.Random(seed), random.Random(seed + 1)
    for _ in range(drafts):
        kept = 0
        while kept < NODES and chance.random() < rate:
            kept += 1
        predicted = () if predict is None else tuple(predict(rate, foresight) for _ in range(NODES))
        survival.record_draft(slot, NODES, NODES, tuple(range(1, kept + 1)), predicted)


def learn(predict: Predictor | None) -> SurvivalEstimator:
    """Estimate a request whose text was good and bad in turn, and has just become good."""
    survival = SurvivalEstimator()
    for turn in range(12):
        record(survival, (GOOD, BAD)[turn % 2], 20, predict, seed=turn)
    record(survival, GOOD, 3, predict, seed=99)
    return survival


def estimate(survival: SurvivalEstimator, slot: int = 0) -> float:
    return survival.estimate_survival([slot], NODES)[0][0]


def test_predictions_show_a_change_after_three_drafts() -> None:
    without, found = estimate(learn(None)), estimate(learn(exact))
    assert without < 0.7
    assert found > without + 0.1
    survival = learn(exact)
    record(survival, BAD, 4, exact)
    assert estimate(survival) < without - 0.1


def test_predictions_of_another_scale_are_calibrated() -> None:
    """They say 0.3 and 0.7 for 0.2 and 0.9."""
    assert estimate(learn(lambda rate, chance: 0.3 if rate == BAD else 0.7)) > estimate(learn(None)) + 0.1


def test_unrelated_predictions_change_little() -> None:
    assert estimate(learn(guess_blindly)) == pytest.approx(estimate(learn(None)), abs=0.03)
    assert estimate(learn(lambda rate, chance: 0.99)) == pytest.approx(estimate(learn(None)), abs=1e-9)


def test_predictions_behind_a_rejected_token_are_not_read() -> None:
    """They assume a text that is not that of the request."""
    found = []
    for later in (0.1, 0.9):
        survival = learn(exact)
        for _ in range(5):
            survival.record_draft(0, NODES, NODES, (1,), (0.9, 0.5, later, later))
        found.append(survival.estimate_survival([0], NODES))
    assert found[0] == found[1]


def test_predictions_set_a_new_request_apart_from_others() -> None:
    survival = SurvivalEstimator()
    for turn in range(40):
        record(survival, (GOOD, BAD)[turn % 2], 3, exact, seed=turn, slot=turn % 2)
    for slot, rate in ((7, GOOD), (8, BAD)):
        survival.record_draft(slot, NODES, NODES, (1,), (rate,) * NODES)  # equal outcomes
    assert estimate(survival, 7) > estimate(survival, 8) + 0.1
    survival.forget([7, 8])
    assert estimate(survival, 7) == estimate(survival, 9)
    assert not {7, 8} & set(survival._confidence_factors._means_by_slot)


def test_the_plan_follows_predictions_at_once() -> None:
    """A plan holds for 16 steps, but not beyond a change of the predictions."""
    engine = SimulatedEngine(
        stairs, draft=0.1, accept=lambda step, request: (GOOD, BAD)[step // 40 % 2], predict=lambda rate, z: rate
    )
    policies = {}
    for name, world in (("with", engine), ("without", replace(engine, predict=None))):
        policy = AdaptiveLengthPolicy(CostCurve(world.points()))
        totals = run(world, policy, 1200)
        granted = [sum(totals.budgets[first + 6 : first + 16]) / 10 for first in range(400, 1200, 40)]
        policies[name] = (sum(granted[::2]) - sum(granted[1::2])) / 10, totals.speed
    assert policies["with"][0] > policies["without"][0] + 1.0, policies
    assert policies["with"][1] > 1.03 * policies["without"][1], policies


def test_the_length_of_a_step_is_chosen_before_its_predictions() -> None:
    policies = [AdaptiveLengthPolicy(CostCurve(SimulatedEngine(stairs).points())) for _ in range(2)]
    candidates = [DraftCandidate(0, 8)]
    for step in range(60):
        granted = [policy.allocate(candidates, 1) for policy in policies]
        assert granted[0] == granted[1], "only the reports of later steps differ"
        count, is_good = granted[0][0], step % 3 > 0
        kept = tuple(range(1, count + 1)) if is_good else ()
        for policy, last in zip(policies, (GOOD, BAD), strict=True):
            predicted = (last if step == 59 else GOOD if is_good else BAD,) * count
            outcome = DraftOutcome(0, count, count, kept, predicted)
            policy.record_step(StepReport(1, 1 + count, 1 + count, 100, 0.1 * count, 1.0 + 0.1 * count, (outcome,)))
    good, bad = (policy.observer.survival.estimate_survival([0], 1) for policy in policies)
    assert good > bad, "the next length may differ"


class Prophet(DrafterWrapper):
    """Drafter that predicts acceptance from its own draft tokens, wrongly."""

    def propose(self, batch: Batch) -> TokenTree:
        tree = self.drafter.propose(batch)
        found = {b: tuple(token % 7 / 7 for token in row[1:]) for b, row in enumerate(tree.tokens) if len(row) > 1}
        return replace(tree, confidences=found)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_that_of_plain_decoding(temperature: float) -> None:
    plain = tiny_models.plain()
    drafter: Drafter = Prophet(tiny_models.draft_model(4))
    llm: LLM = plain.with_drafter(drafter, verify="match")
    policy = llm.engine.length_policy = AdaptiveLengthPolicy()
    prompts = [[33], [44, 45], [5, 6, 7, 8]]
    samplings = [Sampling(max_tokens=60, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]
    found = [c.token_ids for c in llm.generate(prompts, samplings)]
    assert found == [c.token_ids for c in plain.generate(prompts, samplings)]
    assert policy.observer.survival._confidence_factors._calibrations, "no prediction has reached the policy"
