"""Two drafters as one: the same text, the distribution of the target, and each member as if it were alone.

Guards against rows of q that belong to another request, a main drafter that takes another's draft for its own, budgets
larger than a member's limit, and a failure of one member that stops the other.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foredraft import ForedraftError, Sampling
from foredraft.drafters.aggressive.predicted_outputs import PredictedOutputDrafter
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.ensemble.fallback import FallbackDrafter
from foredraft.drafters.interface import Drafter
from foredraft.engine.sandbox import MAX_FAILURES, SandboxedDrafter
from foredraft.engine.tree_validation import find_tree_fault
from foredraft.request import Batch, Request
from foredraft.sampling.distribution import distribution
from foredraft.tree import Commit, TokenTree
from tests.drafters.aggressive.test_predicted_outputs import generate
from tests.support import tiny_models
from tests.support.engine_fakes import ScriptedDrafter, TableLM, make_drafter, make_engine, make_transcript, run
from tests.support.method_cases import EACH_CASE, METHOD_CASES
from tests.support.requests import change_spec, make_request
from tests.support.statistical_checks import ALPHA, chi_square

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [33], [11, 12] * 6, [44, 45]]
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.7, seed=5, repetition_penalty=1.05)
V = 5


def requests(count: int, **more: Any) -> list[Request]:
    return [make_request(i, [i + 1], replace(GREEDY, temperature=1.0), seed=i, **more) for i in range(count)]


def make_scripted(tokens: dict[int, list[int]], q: bool = False, num_nodes: int = 4, **more: Any) -> ScriptedDrafter:
    """Make a drafter of chains by slot, cut to the budget. With q, row n of slot s is one-hot in (s + n) % V."""

    def propose(batch: Batch) -> TokenTree:
        drafts = []
        for request, budget in zip(batch.requests, batch.granted_nodes, strict=True):
            chain = tokens.get(request.slot, [])[:budget]
            probs = None
            if q and chain:
                probs = torch.eye(V)[[(request.slot + n) % V for n in range(len(chain) + 1)]]
            drafts.append(Draft.from_chain(chain, probs))
        return to_token_tree(batch, dict(enumerate(drafts)))

    return ScriptedDrafter(propose, max_nodes=num_nodes, **more)


def test_the_first_serves_whom_it_can_and_the_main_all_others():
    batch = Batch(tuple(requests(4)), (1,) * 4, (4,) * 4)
    tree = FallbackDrafter(make_scripted({0: [1, 2], 2: [3]}), make_scripted({0: [4], 1: [4, 4, 4], 2: [4]})).propose(
        batch
    )
    assert tree.tokens == [[1, 1, 2], [2, 4, 4, 4], [3, 3], [4]]
    assert tree.parents == [[-1, 0, 1], [-1, 0, 1, 2], [-1, 0], [-1]]
    assert tree.q is None


@pytest.mark.parametrize("who", ["main", "first", "both"])
def test_rows_of_q_stay_with_their_requests(who):
    """One request in the middle has no row of q; a row of zeros stands for a deterministic draft token."""
    some = requests(4)
    change_spec(some[1], prompt=(1, 2, 3))
    batch = Batch(tuple(some), (1, 2, 1, 1), (4, 0, 4, 4))
    first = make_scripted({0: [1, 2]}, q=who != "main")
    tree = FallbackDrafter(first, make_scripted({0: [4], 2: [3], 3: [1, 1]}, q=who != "first")).propose(batch)
    assert tree.sizes == [3, 1, 2, 3]
    assert tree.q is not None
    argmax = [int(row.argmax()) if row.sum() else None for row in tree.q]
    hot_tokens = {0: [0, 1, 2], 2: [2, 3], 3: [3, 4, 0]}
    has_q = {0: who != "main", 2: who != "first", 3: who != "first"}
    assert argmax == [token if has_q[slot] else None for slot, found in hot_tokens.items() for token in found]
    assert find_tree_fault(batch, tree, V) is None


def test_budgets_are_those_each_part_asked_for():
    """The budget is zero for a request that has a draft already."""
    seen: dict[str, list[tuple[int, ...]]] = {"first": [], "main": []}

    def noting(name: str, inner: ScriptedDrafter) -> ScriptedDrafter:
        def propose(batch: Batch) -> TokenTree:
            seen[name].append(batch.granted_nodes)
            return inner.proposal(batch)

        return ScriptedDrafter(propose, max_nodes=inner.max_nodes)

    fallback = FallbackDrafter(
        noting("first", make_scripted({0: [1]}, num_nodes=6)),
        noting("main", make_scripted({1: [1, 1, 1]}, num_nodes=2)),
    )
    assert fallback.spec.max_nodes == 6
    tree = fallback.propose(Batch(tuple(requests(3)), (1,) * 3, (6, 6, 1)))
    assert seen == {"first": [(6, 6, 1)], "main": [(0, 2, 1)]}
    assert tree.sizes == [2, 3, 1]
    fallback.propose(Batch(tuple(requests(1)), (1,), (6,)))
    assert len(seen["main"]) == 1, "no request was left to draft for"


def test_both_observe_and_forget_everything():
    first, main = make_scripted({0: [1]}), make_scripted({}, hidden_layers=(3,))
    fallback = FallbackDrafter(first, main)
    commit = Commit.from_lists([[0]], [[1]])
    fallback.observe(Batch(tuple(requests(1)), (1,), (1,)), commit)
    fallback.forget([4, 5])
    assert first.observed == main.observed == [commit]
    assert first.forgotten == main.forgotten == [4, 5]
    assert fallback.spec.hidden_layers == (3,)
    assert FallbackDrafter(first).spec.hidden_layers == ()
    with pytest.raises(ForedraftError, match="target's hidden states"):
        FallbackDrafter(main, first)


def test_a_batch_that_does_not_concern_the_first_is_observed_by_the_main_alone():
    first, main = make_scripted({}), make_scripted({})
    drafter = FallbackDrafter(first, main, lambda batch: len(batch) > 1)
    for count in (1, 2, 1):
        batch = Batch(tuple(requests(count)), (1,) * count, (0,) * count)
        drafter.observe(batch, Commit.from_lists([[0]] * count, [[1]] * count))
    assert len(first.observed) == 1
    assert len(main.observed) == 3


def test_memory_is_that_of_the_main_drafter():
    draft = tiny_models.draft_model(3)
    assert FallbackDrafter(PredictedOutputDrafter(3), draft).spec.draft_kv is draft.draft_kv
    assert FallbackDrafter(PredictedOutputDrafter(3), SandboxedDrafter(draft, 97)).spec.draft_kv is draft.draft_kv
    assert FallbackDrafter(PredictedOutputDrafter(3)).spec.draft_kv is None


# failures


@pytest.mark.parametrize("broken", ["first", "main"])
@pytest.mark.parametrize("how", ["raises", "malformed"])
def test_a_part_that_fails_leaves_the_other_alone(broken, how):
    def fail(batch: Batch) -> TokenTree:
        if how == "raises":
            raise RuntimeError("broken")
        return TokenTree.from_lists([[7]] * len(batch), [[-1]] * len(batch))

    good, bad = make_scripted({0: [1, 2], 1: [1]}), ScriptedDrafter(fail)
    parts = (bad, good) if broken == "first" else (make_scripted({0: [1, 2]}), bad)
    fallback = FallbackDrafter(*(SandboxedDrafter(part, V) for part in parts))
    outer = SandboxedDrafter(fallback, V)
    for _ in range(3 * MAX_FAILURES):
        tree = outer.propose(Batch(tuple(requests(2)), (1, 1), (4, 4)))
        assert tree.tokens[0] == [1, 1, 2]
    assert outer.is_active
    assert outer.num_failures == MAX_FAILURES, "failures of the parts are seen from outside"
    assert sum(outer.failures.values()) == MAX_FAILURES


@pytest.mark.parametrize("slow", [0, 1], ids=["first", "main"])
def test_a_part_that_is_slow_rests_alone_and_comes_back(slow):
    """The sandbox around both used to count the time of one against the other."""
    now = 0.0

    def dawdle(batch: Batch) -> TokenTree:
        nonlocal now
        now += 6.0
        return make_scripted({0: [3], 1: [3]}).proposal(batch)

    parts = [make_scripted({0: [1, 2]}), make_scripted({1: [1, 2]})]
    parts[slow] = ScriptedDrafter(dawdle)
    guards = [
        SandboxedDrafter(part, V, clock=lambda: now, name=name)
        for part, name in zip(parts, ("first", "main"), strict=True)
    ]
    outer = SandboxedDrafter(FallbackDrafter(*guards), V, clock=lambda: now)
    batch, commit = Batch(tuple(requests(2)), (1, 1), (4, 4)), Commit.from_lists([[0], [0]], [[1], [1]])
    for _ in range(2 * MAX_FAILURES):
        tree = outer.propose(batch)
        outer.observe(batch, commit)
    assert [guard.is_active for guard in guards] == [slow != 0, slow != 1]
    assert outer.is_active
    assert tree.sizes == ([1, 3] if slow == 0 else [3, 1])
    assert outer.failures == {"slow": MAX_FAILURES}
    assert [one.name for one in outer.backoffs if one.failures] == [("first", "main")[slow]]
    now += 1000.0
    outer.observe(batch, commit)
    assert all(guard.is_active for guard in guards)
    assert outer.spec.max_nodes == 4


def test_a_timeout_set_from_outside_holds_for_every_part():
    guards = [SandboxedDrafter(make_scripted({}), V), SandboxedDrafter(make_scripted({}), V)]
    SandboxedDrafter(FallbackDrafter(*guards), V).timeout = 0.5
    assert [guard.timeout for guard in guards] == [0.5, 0.5]


# texts


def make_predictions(plain: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Return the right prediction, none, an edited one and a wrong one."""
    edited = [*plain[2][:8], 90, *plain[2][9:]]
    return [tuple(plain[0]), (), tuple(edited), tuple(range(20, 44))]


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", EACH_CASE)
def test_text_is_the_same_under_a_fallback_of_any_method(name, mode):
    """One batch mixes requests with and without a prediction; the method drafts for the latter."""
    texts = [c.token_ids for c in tiny_models.plain().generate(PROMPTS, mode)]
    alone = tiny_models.plain().with_drafter(METHOD_CASES[name].make(3), verify="match").generate(PROMPTS, mode)
    llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(3), verify="match")
    for _ in range(2):
        done = generate(llm, mode, make_predictions(texts), PROMPTS)
        assert [c.token_ids for c in done] == texts
        assert done[0].stats.target_passes < 8
        assert done[1].stats.num_accepted > 0 or not alone[1].stats.num_accepted
    assert llm.engine.drafter.num_failures == 0


# the distribution


LENGTH = 3
FEW = 4  # tokens
TEXTS = list(itertools.product(range(FEW), repeat=LENGTH))
SAMPLING = Sampling(max_tokens=LENGTH + 2, temperature=0.9, ignore_eos=True)


def counts(fallback: Drafter, lm: TableLM, prediction: tuple[int, ...], count: int) -> dict[bool, np.ndarray]:
    """Count every output, with a prediction and without, in batches of both."""
    transcripts = []
    for i in range(count):
        made = make_transcript([1, 2], SAMPLING, i, verify="reject")
        change_spec(made.request, prediction=prediction if i % 2 else ())
        transcripts.append(made)
    found = {True: np.zeros(len(TEXTS)), False: np.zeros(len(TEXTS))}
    accepted: Counter[bool] = Counter()
    for i, (completion, _) in enumerate(run(make_engine(lm, fallback, max_batch=16), transcripts)):
        found[bool(i % 2)][TEXTS.index(tuple(completion.token_ids[:LENGTH]))] += 1
        accepted[bool(i % 2)] += completion.stats.num_accepted
    assert min(accepted[True], accepted[False]) > count // 10
    return found


def p_values(main: Drafter | None, lm: TableLM, first: Drafter | None = None) -> list[float]:
    expected = []
    for text in TEXTS:
        rows = torch.stack([lm.compute_logits([1, 2, *text[:i]]) for i in range(LENGTH)])
        probs = distribution(rows, SAMPLING)
        expected.append(math.prod(float(probs[i, token]) for i, token in enumerate(text)))
    likeliest = TEXTS[int(np.argmax(expected))]
    found = counts(FallbackDrafter(first or PredictedOutputDrafter(3), main), lm, (*likeliest, 0, 1), 3000)
    return [chi_square(some, np.array(expected)) for some in found.values()]


def target() -> TableLM:
    return TableLM.from_seed(FEW, seed=2, sharpness=1.0)


@pytest.mark.parametrize("branching", [None, (2, 1, 1)], ids=["chain", "tree"])
def test_the_distribution_of_reject_holds_with_and_without_a_prediction(branching):
    assert min(p_values(make_drafter(target().perturb(1.0), 3, branching), target())) > ALPHA / 2


class Shifted(FallbackDrafter):
    """Shift the rows of q by one request."""

    def propose(self, batch: Batch) -> TokenTree:
        tree = super().propose(batch)
        return tree if tree.q is None else replace(tree, q=tree.q.roll(1, 0))


def test_the_distribution_kills_rows_of_q_that_moved(monkeypatch):
    monkeypatch.setitem(globals(), "FallbackDrafter", Shifted)
    assert min(p_values(make_drafter(target().perturb(1.0), 3), target())) < ALPHA / 2
