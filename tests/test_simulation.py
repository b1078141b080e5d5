"""The simulated drafter in an LLM: rate, seeds, the requests that leave the simulation, and refusals."""

import math
from dataclasses import replace
from functools import cache

import pytest

from foredraft import LLM, ForedraftError, Grammar, RequestOptions, Sampling, simulate_acceptance
from foredraft.certify.certificate import CertifyPlan, iterate_checks
from foredraft.certify.subject import Subject
from foredraft.drafters.spec import DrafterSpec
from foredraft.outputs import Completion, sum_stats
from foredraft.request import Batch
from foredraft.simulation import METHOD_PATH, SimulatedDrafter
from tests.support import tiny_models
from tests.support.requests import make_request

RATE, LENGTH = 0.8, 4
PROMPTS = [[5, 6, 7, 8, 9], [33, 3], [11, 12] * 4]
SEEDED = Sampling(max_tokens=120, temperature=1.0, seed=4, ignore_eos=True)


@cache
def make_llm(rate: float = RATE) -> LLM:
    return tiny_models.plain().with_drafter(simulate_acceptance(rate), LENGTH)


@cache
def make_text_llm() -> LLM:
    tokenizer = tiny_models.tokenizer()
    target = tiny_models.llama(len(tokenizer), seed=5)
    return LLM(target, simulate_acceptance(RATE), num_speculative_tokens=2, tokenizer=tokenizer)


def list_tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_drafts_are_accepted_at_the_rate_and_the_completion_says_so():
    done = make_llm().generate(PROMPTS * 2, SEEDED)
    stats = sum_stats(completion.stats for completion in done)
    tried = stats.num_drafts + sum(stats.accepted_at[: LENGTH - 1])
    bound = 4 * math.sqrt(tried * RATE * (1 - RATE)) + len(done) * LENGTH  # the last drafts are shorter
    assert abs(stats.num_accepted - RATE * tried) < bound
    assert stats.acceptance_length > 2.5
    for each in (completion.stats for completion in done):  # the target adds a token to every pass but the last
        assert each.num_accepted + each.target_passes - each.num_tokens in (0, 1)
    assert {completion.verification for completion in done} == {"simulated"}
    assert all(len(completion.token_ids) == SEEDED.max_tokens for completion in done)


def test_a_seed_repeats_the_output_alone_and_in_a_batch():
    short = replace(SEEDED, max_tokens=30)
    together = list_tokens(make_llm().generate(PROMPTS, short))
    assert together == [list_tokens(make_llm().generate([prompt], short))[0] for prompt in PROMPTS]
    assert together != list_tokens(tiny_models.plain().generate(PROMPTS, short))


@pytest.mark.parametrize(
    "options", [RequestOptions(verify="match"), RequestOptions(verify="auto"), RequestOptions(num_speculative_tokens=0)]
)
def test_a_request_can_leave_the_simulation(options: RequestOptions):
    greedy = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
    expected = list_tokens(tiny_models.plain().generate(PROMPTS, greedy))
    assert list_tokens(make_llm().generate(PROMPTS, greedy, options=options)) == expected


def test_the_rule_belongs_to_the_drafter_and_is_not_handed_on():
    simulated = make_llm()
    assert simulated.rule is not None
    assert simulated.rule.simulated_rate == RATE
    assert simulated.with_drafter("ngram").rule is None
    assert tiny_models.plain().with_drafter(simulate_acceptance(RATE), LENGTH, verify="reject").rule.name == "reject"
    assert simulated.drafter_name == "simulated"


def test_the_rates_0_and_1_are_plain_steps_and_whole_drafts():
    sampling = Sampling(max_tokens=25, temperature=0, ignore_eos=True)
    [never], [always] = (make_llm(rate).generate([PROMPTS[0]], sampling) for rate in (0.0, 1.0))
    assert (never.stats.acceptance_length, never.stats.num_accepted) == (1.0, 0)
    assert always.stats.acceptance_length == LENGTH + 1


def test_the_adaptive_length_drafts_too():
    llm = tiny_models.plain().with_drafter(simulate_acceptance(1.0))
    assert llm.is_adaptive
    [done] = llm.generate([PROMPTS[0]], Sampling(max_tokens=60, temperature=0, ignore_eos=True))
    assert len(done.token_ids) == 60


def test_a_certificate_fails():
    subject = Subject.make(make_text_llm(), ("the end",))
    checks = iterate_checks(subject, CertifyPlan((), max_tokens=8, num_samples=100), lambda _: None)
    failed = next(check for check in checks if not check.is_passed)
    assert failed.name == "greedy outputs"


def make_batch(*prompts: list[int], granted: int = LENGTH, **spec: object) -> Batch:
    sampling = Sampling(max_tokens=50)
    requests = tuple(make_request(slot, prompt, sampling, **spec) for slot, prompt in enumerate(prompts))
    return Batch(requests, tuple(map(len, prompts)), (granted,) * len(prompts))


def test_one_pass_of_a_drafter_costs_its_time_for_the_whole_batch():
    waits: list[float] = []
    drafter = SimulatedDrafter(LENGTH, 0.002, wait=waits.append)
    drafter.propose(make_batch([5, 6], [7, 8]))
    drafter.propose(make_batch([5, 6], granted=3))
    assert waits == [0.002 * LENGTH, 0.002 * 3]
    SimulatedDrafter(LENGTH, wait=waits.append).propose(make_batch([5, 6]))
    assert len(waits) == 2
    assert isinstance(drafter.spec, DrafterSpec)


def test_a_draft_repeats_the_prompt_without_control_tokens_and_end_ids():
    """An accepted token that ends the output would make load tests shorter than asked."""
    drafter = SimulatedDrafter(LENGTH, control_ids=frozenset({1, 2}))
    batch = make_batch([1, 5, 3, 6, 2], [3], eos_ids=frozenset({3}))
    tree = drafter.propose(batch)
    assert set(tree.tokens[0][1:]) == {5, 6}
    assert set(tree.tokens[1][1:]) == {0}
    assert all(len(tokens) == LENGTH + 1 for tokens in tree.tokens)
    drafter.forget([0, 1])
    assert drafter.propose(make_batch([9])).tokens[0][1:] == [9] * LENGTH


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"method": METHOD_PATH}, "needs acceptance_rate, from 0 to 1"),
        ({"method": METHOD_PATH, "acceptance_rate": 2}, r"acceptance_rate must lie in \[0, 1\]"),
        ({"method": METHOD_PATH, "acceptance_rate": "0.8"}, "takes a number"),
        ({"method": METHOD_PATH, "acceptance_rate": 0.8, "cost_ms": -1}, "cost_ms must lie in 0..10000"),
        ({"method": METHOD_PATH, "acceptance_rate": 0.8, "cost": 1}, "unknown drafter option 'cost'"),
        ({"method": METHOD_PATH, "acceptance_rate": 0.8, "model": "x"}, "leave its model 'x' out"),
        ({"method": f"ngram+{METHOD_PATH}", "acceptance_rate": 0.8}, "a verification rule of their own; name it alone"),
    ],
)
def test_options_that_cannot_be_are_refused(spec: dict, words: str):
    with pytest.raises(ForedraftError, match=words):
        tiny_models.plain().with_drafter(spec, LENGTH)


def test_a_rate_out_of_range_is_refused_before_a_model_is_loaded():
    with pytest.raises(ForedraftError, match=r"such as 0\.8, got 1\.5"):
        simulate_acceptance(1.5)


def test_a_grammar_is_refused_with_the_ways_out():
    pytest.importorskip("llguidance")
    llm = make_text_llm()
    digits = Sampling(max_tokens=8, grammar=Grammar.regex("[0-9]{4}"))
    with pytest.raises(ForedraftError, match="the grammar cannot be followed: acceptance is simulated"):
        llm.generate(["the"], digits)
    for options in (RequestOptions(verify="match"), RequestOptions(num_speculative_tokens=0)):
        assert llm.generate(["the"], digits, options=options)[0].text.isdigit()
