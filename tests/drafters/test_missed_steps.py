"""A drafter that missed a step: its state is stale afterwards, which may cost drafts but no text.

Guards against states of an older position taken for the newest, memory with a hole read as if there were none, and
drafts of a step that failed half-way being counted on in the next.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from foredraft import Completion, Sampling
from foredraft.drafters.interface import Drafter
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.llm import LLM
from tests.support import tiny_models
from tests.support.method_cases import EACH_CASE, METHOD_CASES
from tests.support.requests import change_options

PROMPTS = [[33], [50] * 5, [61, 62, 63, 64, 61, 62]]
GREEDY = Sampling(max_tokens=14, temperature=0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=14, temperature=0.6, top_p=0.9, seed=11, ignore_eos=True)
ONE_STATE = ("medusa", "mlp_speculator", "blockwise", "hydra", "gemma4_assistant")
ON_STATES = [
    name for name in METHOD_CASES if name.split(",")[0] in ("eagle", "eagle3", "dflash", "chimera", *ONE_STATE)
]


class FailsAt:
    """A call that raises when it is made for the nth time, before or after it does its work."""

    def __init__(self, call: Callable[..., Any], nth: int, is_late: bool = False) -> None:
        self.call, self.nth, self.is_late, self.count = call, nth, is_late, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == self.nth and not self.is_late:
            raise RuntimeError("once")
        result = self.call(*args, **options)
        if self.count == self.nth:
            raise RuntimeError("once")
        return result


def drafting(name: str) -> tuple[LLM, Drafter]:
    made = METHOD_CASES[name].make(4)
    return tiny_models.plain().with_drafter(made, verify="match"), made


def find_network(name: str, made: Any) -> Any:
    """Return the object whose `forward` computes the draft."""
    return made.network if name.startswith("dflash") else made.lm


def ids(done: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


@cache
def plain(is_greedy: bool) -> list[list[int]]:
    return ids(tiny_models.plain().generate(PROMPTS, GREEDY if is_greedy else SAMPLED))


@pytest.mark.parametrize(("verb", "is_late"), [("propose", False), ("propose", True), ("observe", False)])
@pytest.mark.parametrize("name", EACH_CASE)
def test_one_failed_call_changes_no_text(name: str, verb: str, is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, made = drafting(name)
    failing = FailsAt(getattr(made, verb), 3, is_late)
    monkeypatch.setattr(made, verb, failing)
    assert ids(llm.generate(PROMPTS, SAMPLED)) == plain(is_greedy=False)
    is_called = verb != "observe" or made.spec.reads_commits
    assert llm.engine.drafter.num_failures == is_called
    assert (failing.count > 0) == is_called, "an `observe` that does nothing is not called"
    [after] = llm.generate(PROMPTS[:1], GREEDY)
    assert after.stats.num_drafted > 0, "texts that come after the failure are drafted for again"


@pytest.mark.parametrize(
    "name",
    [name for name in METHOD_CASES if name.split(",")[0] in ("eagle", "eagle3", "dflash", "chimera", "draft_model")],
)
def test_a_pass_that_fails_while_a_draft_grows_changes_no_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of the draft's memory is written, and the step is verified without it."""
    for nth in (3, 4, 5):
        llm, made = drafting(name)
        network = find_network(name, made)
        monkeypatch.setattr(network, "forward", FailsAt(network.forward, nth))
        done = llm.generate(PROMPTS, GREEDY)
        assert ids(done) == plain(is_greedy=True)
        assert llm.engine.drafter.num_failures == 1
        assert sum(c.stats.num_accepted for c in done) > 0


@pytest.mark.parametrize("name", ON_STATES)
def test_a_text_whose_step_was_missed_is_drafted_for_no_more_or_from_true_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters that keep one state have it again a step later; memory with a gap is never read again."""
    llm, made = drafting(name)
    monkeypatch.setattr(made, "observe", FailsAt(made.observe, 3))
    sizes = []
    propose = made.propose

    def record_sizes(batch: Any) -> Any:
        tree = propose(batch)
        sizes.append(max(tree.sizes) - 1)
        return tree

    monkeypatch.setattr(made, "propose", record_sizes)
    llm.generate([[33]], GREEDY)
    assert sizes[0] == 0, "drafted for a prompt of which no state is known"
    assert min(sizes[1:3]) > 0, "nothing was drafted before the failure"
    assert sizes[3] == 0, "drafted from what was stale"
    has_memory = name.startswith(("eagle", "dflash", "chimera", "hydra, prefix"))
    assert (sum(sizes[4:]) == 0) == has_memory


def count_with_plain_steps(llm: LLM) -> tuple[int, int]:
    """Check texts with three steps in five without drafts. Returns the numbers of drafted and accepted tokens."""
    transcripts = llm._prepare_requests(list(PROMPTS), GREEDY)
    for transcript in transcripts:
        llm.engine.add(transcript)
    step = 0
    while llm.engine.has_work:
        for transcript in transcripts:
            length = 0 if step % 5 in (1, 2, 3) else None
            change_options(transcript.request, num_speculative_tokens=length)
        llm.engine.step()
        step += 1
    assert [t.request.output for t in transcripts] == plain(is_greedy=True)
    assert llm.engine.drafter.num_failures == 0
    stats = [transcript.build_stats() for transcript in transcripts]
    return sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)


@pytest.mark.parametrize("name", EACH_CASE)
def test_steps_without_a_draft_leave_what_the_next_draft_needs(name: str) -> None:
    """Steps without draft nodes change neither the text nor the use of later drafts."""
    _, accepted = count_with_plain_steps(drafting(name)[0])
    assert accepted > 0


def test_observing_plain_commits_that_are_declared_unread_changes_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = [name for name in METHOD_CASES if not drafting(name)[1].spec.reads_plain_commits]
    assert {"draft_model", "early_exit", "lookahead"} <= {name.split(",")[0] for name in unread}
    counts = [count_with_plain_steps(drafting(name)[0]) for name in unread]
    monkeypatch.setattr(SandboxedDrafter, "_reads", lambda sandbox, batch, commit: True)
    assert [count_with_plain_steps(drafting(name)[0]) for name in unread] == counts
