"""Changes of requests, trees and commits by a drafter, and faulty specs of a drafter: no step is affected.

Guards against a drafter that is given the live record of a request and changes it: wrong text and no counted failure.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from foredraft import ForedraftError, Sampling
from foredraft.drafters.draft import root_tree
from foredraft.drafters.ensemble.fallback import FallbackDrafter
from foredraft.drafters.failure_backoff import MAX_FAILURES, FailureBackoff
from foredraft.drafters.spec import TOKEN_STEPS, DrafterSpec
from foredraft.engine import sandbox
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.request import Batch, Request, RequestStatus
from foredraft.tree import Commit, TargetArgmax, TokenTree
from tests.engine.test_sandbox import LM, PLAIN, PROMPTS, RULES, SAMPLINGS, V, texts
from tests.support import engine_fakes, tiny_models
from tests.support.engine_fakes import ScriptedDrafter
from tests.support.requests import change_spec, make_request


def good(batch: Batch) -> TokenTree:
    return engine_fakes.draft_greedily(LM, batch)


def _set(name: str, value: Any) -> Callable[[Request], None]:
    return lambda request: setattr(request, name, value)


CHANGES: dict[str, Callable[[Request], None]] = {
    "appends to the output": lambda request: request.output.append(1),
    "changes a token of the output": lambda request: request.output.__setitem__(slice(-1, None), [0]),
    "clears the output": lambda request: request.output.clear(),
    "appends to the pages": lambda request: request.pages.append(1),
    "reverses the pages": lambda request: request.pages.reverse(),
    "marks it as preempted": _set("status", RequestStatus.PREEMPTED),
    "takes its prediction": lambda request: change_spec(request, prediction=(1, 2)),
    "gives it another output": _set("output", [1, 2, 3]),
    "gives it a list that is none": _set("output", "text"),
    "moves computed on": lambda request: setattr(request, "num_computed", request.num_computed + 1),
    "exchanges the sampling": lambda request: change_spec(request, sampling=Sampling(max_tokens=3, temperature=0)),
    "exchanges the prompt": lambda request: change_spec(request, prompt=(0, 0)),
    "gives it an equal spec": lambda request: change_spec(request),
    "removes its spec": lambda request: request.__delattr__("spec"),
    "ends it": _set("status", RequestStatus.FINISHED),
    "removes a field": lambda request: request.__delattr__("pages"),
    "adds a field": _set("note", "mine"),
    "moves it to another slot": lambda request: setattr(request, "slot", request.slot + 1),
}


def _set_below(name: str, value: Any) -> Callable[[Request], None]:
    return lambda request: setattr(request.spec, name, value)


# What a request was given is frozen, so that these raise, and nothing has to be undone.
REFUSED_CHANGES: dict[str, Callable[[Request], None]] = {
    "changes a token of the prompt": lambda request: request.spec.prompt.__setitem__(0, 0),  # type: ignore[attr-defined]
    "clears the prompt": lambda request: request.spec.prompt.clear(),  # type: ignore[attr-defined]
    "changes the sampling of the spec": _set_below("sampling", Sampling(max_tokens=3, temperature=0)),
    "changes the seed of the spec": _set_below("seed", 99),
    "adds a field to the spec": _set_below("note", "mine"),
    "changes the fields of the spec at once": lambda request: vars(request.spec).update(seed=99),
    "removes a field of the spec": lambda request: request.spec.__delattr__("rule"),
    "changes the options": lambda request: setattr(request.spec.options, "prediction", (1, 2)),
    "changes the temperature": lambda request: setattr(request.spec.sampling, "temperature", 0.0),
}


@pytest.mark.parametrize("verb", ["propose", "observe", "forget"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_request_is_restored_and_counted(change: str, verb: str) -> None:
    backoff = _run_with_change(CHANGES[change], verb)
    assert set(backoff.failures) == {"mutated"}
    assert "it changed the request in slot" in backoff.reason


@pytest.mark.parametrize("verb", ["propose", "observe", "forget"])
@pytest.mark.parametrize("change", REFUSED_CHANGES)
def test_a_request_cannot_be_changed_below_its_own_fields(change: str, verb: str) -> None:
    assert set(_run_with_change(REFUSED_CHANGES[change], verb).failures) == {"raised"}


def _run_with_change(change: Callable[[Request], None], verb: str) -> FailureBackoff:
    """Generate with a drafter that changes every request when it is called, and check the text."""
    seen: dict[int, Request] = {}
    done = []

    def spoil() -> None:
        for request in seen.values():
            if request.status is RequestStatus.RUNNING:
                done.append(request)
                change(request)

    def propose(batch: Batch) -> TokenTree:
        seen.update({request.slot: request for request in batch.requests})
        tree = good(batch)
        if verb == "propose":
            spoil()
        return tree

    def observing(batch: Batch, commit: Commit) -> None:
        if verb == "observe":
            spoil()

    def forgetting(slots: Sequence[int]) -> None:
        if verb == "forget":
            spoil()

    drafter = ScriptedDrafter(propose, on_observe=observing, on_forget=forgetting)
    engine = engine_fakes.make_engine(LM, drafter, max_chunk=4)
    transcripts = [
        engine_fakes.make_transcript(list(prompt), sampling, n, verify=rule)
        for n, (prompt, sampling, rule) in enumerate(zip(PROMPTS, SAMPLINGS, RULES, strict=True))
    ]
    assert [completion.token_ids for completion, _ in engine_fakes.run(engine, transcripts)] == PLAIN
    assert done
    return engine.drafter.backoff


def test_an_interrupt_leaves_requests_as_they_were() -> None:
    """`recover` continues from the state that a step left behind."""

    def propose(batch: Batch) -> TokenTree:
        batch.requests[0].output.append(3)
        raise KeyboardInterrupt

    request = make_request(0, [1, 2], SAMPLINGS[0], output=[4])
    with pytest.raises(KeyboardInterrupt):
        SandboxedDrafter(ScriptedDrafter(propose), V).propose(Batch((request,), (1,), (3,)))
    assert request.output == [4]


def test_a_tree_or_commit_that_is_changed_afterwards_changes_nothing() -> None:
    """The drafter keeps the lists it gave and those it was shown, and spoils them in `observe`."""
    given: list[TokenTree] = []

    def propose(batch: Batch) -> TokenTree:
        given.append(good(batch))
        return given[-1]

    def observing(batch: Batch, commit: Commit) -> None:
        for rows in (given[-1].tokens, given[-1].parents, commit.tokens, commit.paths):
            for row in rows:
                row[:] = [0] * 9
        if commit.target_argmax is not None:
            commit.target_argmax.tree.tokens.clear()

    for needs_target_argmax in (False, True):
        drafter = ScriptedDrafter(propose, on_observe=observing)
        drafter.needs_target_argmax = needs_target_argmax
        assert texts(drafter) == PLAIN
        assert len(given) > MAX_FAILURES
    assert max(len(tree.tokens[0]) for tree in given) > 1


# specs


class Odd:
    """Drafter of good drafts with one faulty spec."""

    spec: Any = DrafterSpec(max_nodes=3)

    def propose(self, batch: Batch) -> TokenTree:
        return good(batch)

    def observe(self, batch: Batch, commit: Commit) -> None: ...

    def forget(self, slots: Sequence[int]) -> None: ...


def _raising(self: Odd) -> Any:
    raise RuntimeError("no spec today")


def _spec(max_nodes: Any = 3, **fields: Any) -> DrafterSpec:
    return DrafterSpec(max_nodes, **fields)


SPECS: dict[str, Any] = {
    "spec raises": property(_raising),
    "spec is a dict": {"max_nodes": 3},
    "spec is none": None,
    "spec is a class": DrafterSpec,
    "hidden_layers is no tuple": _spec(hidden_layers=3),
    "hidden_layers of words": _spec(hidden_layers=("last",)),
    "max_nodes is a word": _spec("x"),
    "max_nodes is negative": _spec(-1),
    "max_nodes is a fraction": _spec(2.5),
    "max_nodes is a truth value": _spec(True),
    "needs_target_argmax is a word": _spec(needs_target_argmax="no"),
    "num_target_candidates is negative": _spec(num_target_candidates=-1),
    "num_target_candidates is a truth value": _spec(num_target_candidates=True),
    "decides_length is a number": _spec(decides_length=1),
    "shares_target_kv is none": _spec(shares_target_kv=None),
    "reads_commits is a number": _spec(reads_commits=0),
    "reads_plain_commits is a number": _spec(reads_plain_commits=0),
    "is_token_source is a number": _spec(is_token_source=1),
    "samples_drafts is a number": _spec(samples_drafts=1),
    "token_steps is unknown": _spec(token_steps="some"),
    "draft_kv is none": _spec(draft_kv="all of it"),
}


def odd(which: str) -> Odd:
    made: Odd = type("Broken", (Odd,), {"spec": SPECS[which]})()
    return made


@pytest.mark.parametrize("which", SPECS)
def test_a_spec_that_cannot_be_used_is_a_failure_and_no_error(which: str) -> None:
    engine = engine_fakes.make_engine(LM, odd(which), max_chunk=4)
    done = engine_fakes.run(engine, [engine_fakes.make_transcript(PROMPTS[0], SAMPLINGS[0])])
    assert done[0][0].token_ids == PLAIN[0]
    assert set(engine.drafter.failures) == {"malformed"}
    assert which.split()[0] in engine.drafter.backoff.reason


def test_taps_that_the_target_does_not_have_are_no_taps() -> None:
    drafter = Odd()
    guard = SandboxedDrafter(drafter, V, num_layers=4)
    drafter.spec = DrafterSpec(3, (-1, 0, 4))
    assert guard.spec.hidden_layers == (-1, 0, 4)
    drafter.spec = DrafterSpec(3, (5,))
    assert guard.spec.hidden_layers == ()
    assert guard.failures == {"malformed": 1}


def test_a_spec_is_checked_again_only_if_it_is_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[DrafterSpec] = []
    check = sandbox.validate_spec
    monkeypatch.setattr(sandbox, "validate_spec", lambda spec, layers: (checked.append(spec), check(spec, layers)))
    drafter = Odd()
    guard = SandboxedDrafter(drafter, V, num_layers=4)
    first = drafter.spec
    assert len({id(guard.spec) for _ in range(5)}) == 1, "a wrapper around it would combine the specs again"
    drafter.spec = second = DrafterSpec(2)
    assert [guard.spec.max_nodes for _ in range(5)] == [2] * 5
    assert [id(spec) for spec in checked] == [id(first), id(second)]
    drafter.spec = DrafterSpec(-1)
    assert [guard.spec.max_nodes for _ in range(2)] == [0, 0]
    assert guard.num_failures == 2, "an invalid spec fails at every read"


def test_a_drafter_that_reads_no_commits_rests_and_comes_back_all_the_same() -> None:
    """Fault: `observe`, which ends a quarantine, was left out with the drafter's own."""
    now = 0.0
    drafter = ScriptedDrafter(lambda batch: None, reads_commits=False)  # type: ignore[arg-type,return-value]
    inner = SandboxedDrafter(drafter, V, clock=lambda: now)
    guard = SandboxedDrafter(FallbackDrafter(SandboxedDrafter(Silent(), V), inner), V, clock=lambda: now)
    batch = Batch((make_request(0, [1, 2], SAMPLINGS[0], num_computed=1),), (1,), (3,))
    for _ in range(MAX_FAILURES):
        guard.propose(batch)
        guard.observe(batch, Commit.from_lists([[0]], [[1]]))
    assert not inner.is_active
    now += 1000.0
    guard.observe(batch, Commit.from_lists([[0]], [[1]]))
    assert inner.is_active
    assert drafter.observed == []


def test_commits_without_drafts_are_passed_on_only_if_they_are_read() -> None:
    batch = Batch((make_request(0, [1, 2], SAMPLINGS[0], num_computed=1),), (1,), (0,))
    commit = Commit.from_lists([[0]], [[1]])
    for reads_plain_commits in (True, False):
        drafter = ScriptedDrafter(root_tree, reads_plain_commits=reads_plain_commits)
        guard = SandboxedDrafter(FallbackDrafter(SandboxedDrafter(Silent(), V), SandboxedDrafter(drafter, V)), V)
        guard.observe(batch, commit)
        assert len(drafter.observed) == reads_plain_commits
        guard.observe(replace(batch, granted_nodes=(3,)), commit)
        assert len(drafter.observed) == reads_plain_commits + 1


def test_commits_without_tokens_are_passed_on_only_to_drafters_that_need_them_in_every_step() -> None:
    batch = Batch((make_request(0, [1, 2], SAMPLINGS[0], num_computed=1),), (1,), (3,))
    commit = Commit.from_lists([[0]], [[1]])
    tree = root_tree(batch)
    for token_steps in TOKEN_STEPS:
        drafter = ScriptedDrafter(root_tree, needs_target_argmax=True, token_steps=token_steps)
        guard = SandboxedDrafter(drafter, V)
        guard.observe(batch, commit)
        assert len(drafter.observed) == (token_steps == "all")
        guard.observe(batch, commit.with_target_outputs(None, TargetArgmax(tree, [1])))
        assert len(drafter.observed) == (token_steps == "all") + 1


class Silent(Odd):
    """Drafter without drafts that reads nothing."""

    spec = DrafterSpec(0, reads_commits=False)


@pytest.mark.parametrize("which", SPECS)
def test_a_drafter_handed_to_an_llm_is_looked_at_first(which: str) -> None:
    with pytest.raises(ForedraftError, match="the drafter Broken cannot be used: "):
        tiny_models.plain().with_drafter(odd(which))


class Unfinished:
    """Someone's first attempt at a drafter."""

    spec = DrafterSpec(4)

    def propose(self, batch: Batch) -> TokenTree:
        raise NotImplementedError


class Outdated(Odd):
    """A drafter that was written for Foredraft without specs."""

    hidden_layers: tuple[int, ...] = ()
    max_nodes = 4

    @property
    def spec(self) -> Any:
        raise AttributeError("spec")


@pytest.mark.parametrize(
    ("drafter", "missing"),
    [
        (Unfinished(), "it has no observe, forget; give the name"),
        (3, "it has no spec, propose, observe, forget; give the name"),
        (Outdated(), r"it has no spec; write `self.spec = DrafterSpec\(max_nodes=4\)` in its __init__"),
    ],
)
def test_a_drafter_that_lacks_members_is_refused_with_those_it_needs(drafter: Any, missing: str) -> None:
    """Fault: an object without `observe` and `forget` was taken."""
    with pytest.raises(ForedraftError, match=missing) as caught:
        tiny_models.plain().with_drafter(drafter)
    assert "\n" not in str(caught.value)


def test_a_drafter_with_taps_beyond_the_target_is_refused_with_the_boundaries_there_are() -> None:
    drafter = Odd()
    drafter.spec = DrafterSpec(3, (99,))
    with pytest.raises(ForedraftError, match=r"must be boundaries of the target, -1 or 0 to \d+, got \(99,\)"):
        tiny_models.plain().with_drafter(drafter)


# rests


def test_a_drafter_that_failed_is_tried_again_and_used_again() -> None:
    """It used to be off for the rest of the process."""
    now = 0.0

    def propose(batch: Batch) -> TokenTree:
        if drafter.num_proposed <= MAX_FAILURES:
            raise RuntimeError("no draft today")
        return good(batch)

    drafter = ScriptedDrafter(propose)
    guard = SandboxedDrafter(drafter, V, clock=lambda: now)
    engine = engine_fakes.make_engine(LM, guard, max_chunk=4)
    sampling = Sampling(max_tokens=14, temperature=0)
    assert engine_fakes.run(engine, [engine_fakes.make_transcript(PROMPTS[0], sampling)])[0][0].token_ids == PLAIN[0]
    assert drafter.num_proposed == MAX_FAILURES
    assert not guard.is_active
    now += 1000.0
    [(done, _)] = engine_fakes.run(engine, [engine_fakes.make_transcript(PROMPTS[0], sampling)])
    assert done.token_ids == PLAIN[0]
    assert done.stats.num_accepted > 0
    assert guard.is_active


def test_a_rest_ends_between_two_steps_and_not_within_one() -> None:
    """Else the target would compute without the states that the drafter is then shown to lack."""
    now = 0.0
    guard = SandboxedDrafter(ScriptedDrafter(lambda batch: None, hidden_layers=(1,)), V, clock=lambda: now)  # type: ignore[arg-type,return-value]
    batch = Batch((make_request(0, [1, 2], SAMPLINGS[0], num_computed=1),), (1,), (3,))
    for _ in range(MAX_FAILURES):
        guard.propose(batch)
    assert guard.spec.hidden_layers == ()
    now += 1000.0
    assert (guard.spec.max_nodes, guard.spec.hidden_layers) == (0, ())
    guard.propose(batch)
    assert guard.spec.hidden_layers == ()
    guard.observe(batch, Commit.from_lists([[0]], [[1]]))
    assert (guard.spec.max_nodes, guard.spec.hidden_layers) == (4, (1,))
