"""Steps whose states and tokens the drafter does not get change no text, and drafts come back as its spec says.

Guards against a drafter that drafts from a gap in its states, one that never drafts again, and states that are left out
for a drafter that has not permitted it. In float64, so that no rounding decides.
"""

from collections.abc import Sequence

import pytest

from foredraft import LLM, Sampling
from foredraft.draft_length.policy import DraftCandidate, FixedLengthPolicy, StepReport
from foredraft.llm import MemoryLimits
from tests.support import tiny_models
from tests.support.method_cases import METHOD_CASES

PROMPTS = [[61, 62, 63, 64, 61, 62, 50, 50, 5, 6, 7, 8], [33, 34, 35], [9, 8, 7, 9, 8, 7, 9, 8]]
SAMPLING = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
GAP = range(4, 9)  # steps without hidden states and tokens


class GapPolicy(FixedLengthPolicy):
    """Policy that drafts in every step, also after a gap, and records which requests are ready and what they draft."""

    def __init__(self) -> None:
        self.step = 0
        self.reports: list[StepReport] = []
        self.is_ready: list[bool] = []

    @property
    def needs_observation(self) -> bool:
        return self.step not in GAP

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        self.is_ready.append(all(candidate.is_ready for candidate in candidates))
        return super().allocate(candidates, num_pass_tokens, attended_tokens)

    def record_step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.step += 1


def make_llm(name: str) -> LLM:
    return tiny_models.limit_memory(tiny_models.plain(), METHOD_CASES[name].make(4), MemoryLimits(kv_tokens=4000))


def find_missed_states(name: str) -> str:
    spec = make_llm(name).engine.drafter.spec
    assert spec.missed_states == "forbidden" or spec.hidden_layers
    return spec.missed_states


def count_drafted(reports: Sequence[StepReport]) -> int:
    return sum(outcome.num_drafted for report in reports for outcome in report.outcomes)


@pytest.mark.parametrize("name", METHOD_CASES)
def test_a_gap_changes_no_text_and_ends_or_pauses_drafts(name: str) -> None:
    expected = [c.token_ids for c in tiny_models.plain().generate(PROMPTS, SAMPLING)]
    llm = make_llm(name)
    llm.engine.length_policy = policy = GapPolicy()
    assert [c.token_ids for c in llm.generate(PROMPTS, SAMPLING)] == expected
    assert not llm.engine.drafter.failures
    missed = find_missed_states(name)
    is_open = [report.is_observed for report in policy.reports[: GAP.stop]]
    spec = llm.engine.drafter.spec
    if missed == "forbidden":
        can_miss = spec.token_steps == "active" and spec.needs_tokens and not spec.hidden_layers
        assert is_open == [not can_miss or step not in GAP for step in range(len(is_open))]
        assert all(policy.is_ready)
        return
    assert is_open == [step not in GAP for step in range(GAP.stop)]
    if llm.engine.drafter.spec.decides_length:
        return  # an ensemble, whose token members draft without states
    assert count_drafted(policy.reports[: GAP.start]) > 0
    in_gap, later = policy.reports[GAP.start + 1 : GAP.stop], policy.reports[GAP.stop + 1 :]
    assert count_drafted(in_gap) == 0
    assert (count_drafted(later) > 0) == (missed == "pause")


@pytest.mark.parametrize("name", [name for name in METHOD_CASES if not name.startswith(("ngram", "suffix"))])
def test_a_request_that_starts_after_the_gap_drafts(name: str) -> None:
    if find_missed_states(name) == "forbidden":
        pytest.skip("this method permits no gap")
    llm = make_llm(name)
    llm.engine.length_policy = policy = GapPolicy()
    [long] = llm.prepare(PROMPTS[0], Sampling(max_tokens=40, temperature=0, ignore_eos=True))
    llm.engine.add(long)
    while policy.step < GAP.stop + 2:
        llm.engine.step()
    [late] = llm.prepare(PROMPTS[1], SAMPLING)
    llm.engine.add(late)
    while llm.engine.has_work:
        llm.engine.step()
    assert late.build_stats().num_drafted > 0
    assert list(late.request.output) == tiny_models.plain().generate(PROMPTS[1:2], SAMPLING)[0].token_ids
