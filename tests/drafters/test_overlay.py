"""Two drafters as one: the same text, the law of the target, and each part as if it were alone.

Guards against rows of q that belong to another request, a main drafter that takes another's draft for its own, budgets
larger than a part said, and one part's failure that takes the other down.
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
from test_prediction import generate

import models_made
from fakes import Scripted, TableLM, drafter_of, engine_of, run, transcript_of
from foredraft import ForedraftError, Sampling
from foredraft.drafters.base import Draft, Drafter, plant
from foredraft.drafters.overlay import Overlay
from foredraft.drafters.prediction import Prediction
from foredraft.engine.guard import MAX_FAILURES, Guard
from foredraft.request import Batch, Request
from foredraft.sampling import distribution
from foredraft.tree import Commit, TokenTree
from methods_made import EACH, MADE
from stats import ALPHA, chi_square

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [33], [11, 12] * 6, [44, 45]]
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.7, seed=5, repetition_penalty=1.05)
V = 5


def requests(count: int, **more: Any) -> list[Request]:
    return [Request(i, [i + 1], replace(GREEDY, temperature=1.0), seed=i, **more) for i in range(count)]


def scripted(tokens: dict[int, list[int]], q: bool = False, num_nodes: int = 4, **more: Any) -> Scripted:
    """Drafts by slot, chains cut to the budget; with q, the law after node n of slot s is one-hot in (s + n) % V."""

    def propose(batch: Batch) -> TokenTree:
        drafts = []
        for request, budget in zip(batch.requests, batch.budgets, strict=True):
            chain = tokens.get(request.slot, [])[:budget]
            law = None
            if q and chain:
                law = torch.eye(V)[[(request.slot + n) % V for n in range(len(chain) + 1)]]
            drafts.append(Draft.chain(chain, law))
        return plant(batch, dict(enumerate(drafts)))

    return Scripted(propose, num_nodes=num_nodes, **more)


def test_the_first_serves_whom_it_can_and_the_main_all_others():
    batch = Batch(tuple(requests(4)), (1,) * 4, (4,) * 4)
    tree = Overlay(scripted({0: [1, 2], 2: [3]}), scripted({0: [4], 1: [4, 4, 4], 2: [4]})).propose(batch)
    assert tree.token_lists == [[1, 1, 2], [2, 4, 4, 4], [3, 3], [4]]
    assert tree.parent_lists == [[-1, 0, 1], [-1, 0, 1, 2], [-1, 0], [-1]]
    assert tree.q is None


@pytest.mark.parametrize("who", ["main", "first", "both"])
def test_rows_of_q_stay_with_their_requests(who):
    """One request of the middle has no scored row; a row of zeros stands for a guess."""
    some = requests(4)
    some[1] = replace(some[1], prompt=[1, 2, 3], slot=1)
    batch = Batch(tuple(some), (1, 2, 1, 1), (4, 0, 4, 4))
    first = scripted({0: [1, 2]}, q=who != "main")
    tree = Overlay(first, scripted({0: [4], 2: [3], 3: [1, 1]}, q=who != "first")).propose(batch)
    assert tree.sizes == [3, 1, 2, 3]
    assert tree.q is not None
    argmax = [int(row.argmax()) if row.sum() else None for row in tree.q]
    laws = {0: [0, 1, 2], 2: [2, 3], 3: [3, 4, 0]}
    has_q = {0: who != "main", 2: who != "first", 3: who != "first"}
    assert argmax == [law if has_q[slot] else None for slot, found in laws.items() for law in found]
    assert Guard(Overlay(first), V)._fault(batch, tree) is None


def test_budgets_are_those_each_part_asked_for():
    """And none where a request is served already."""
    seen: dict[str, list[tuple[int, ...]]] = {"first": [], "main": []}

    def noting(name: str, inner: Scripted) -> Scripted:
        def propose(batch: Batch) -> TokenTree:
            seen[name].append(batch.budgets)
            return inner.proposal(batch)

        return Scripted(propose, num_nodes=inner.num_nodes)

    overlay = Overlay(
        noting("first", scripted({0: [1]}, num_nodes=6)), noting("main", scripted({1: [1, 1, 1]}, num_nodes=2))
    )
    assert overlay.num_nodes == 6
    tree = overlay.propose(Batch(tuple(requests(3)), (1,) * 3, (6, 6, 1)))
    assert seen == {"first": [(6, 6, 1)], "main": [(0, 2, 1)]}
    assert tree.sizes == [2, 3, 1]
    overlay.propose(Batch(tuple(requests(1)), (1,), (6,)))
    assert len(seen["main"]) == 1, "nobody was left to draft for"


def test_both_observe_and_forget_everything():
    first, main = scripted({0: [1]}), scripted({}, taps=(3,))
    overlay = Overlay(first, main)
    commit = Commit.of([[0]], [[1]])
    overlay.observe(Batch(tuple(requests(1)), (1,), (1,)), commit)
    overlay.forget([4, 5])
    assert first.observed == main.observed == [commit]
    assert first.forgotten == main.forgotten == [4, 5]
    assert overlay.taps == (3,)
    assert Overlay(first).taps == ()
    with pytest.raises(ForedraftError, match="target's states"):
        Overlay(main, first)


def test_memory_is_that_of_the_main_drafter():
    draft = models_made.draft_model(3)
    assert Overlay(Prediction(3), draft).memory is draft.memory
    assert Overlay(Prediction(3), Guard(draft, 97)).memory is draft.memory
    assert Overlay(Prediction(3)).memory is None


# failures


@pytest.mark.parametrize("broken", ["first", "main"])
@pytest.mark.parametrize("how", ["raises", "malformed"])
def test_a_part_that_fails_leaves_the_other_alone(broken, how):
    def fail(batch: Batch) -> TokenTree:
        if how == "raises":
            raise RuntimeError("broken")
        return TokenTree.of([[7]] * len(batch), [[-1]] * len(batch))

    good, bad = scripted({0: [1, 2], 1: [1]}), Scripted(fail)
    parts = (bad, good) if broken == "first" else (scripted({0: [1, 2]}), bad)
    overlay = Overlay(*(Guard(part, V) for part in parts))
    outer = Guard(overlay, V)
    for _ in range(3 * MAX_FAILURES):
        tree = outer.propose(Batch(tuple(requests(2)), (1, 1), (4, 4)))
        assert tree.token_lists[0] == [1, 1, 2]
    assert outer.is_active
    assert outer.num_failures == MAX_FAILURES, "failures of the parts are seen from outside"
    assert sum(outer.failures.values()) == MAX_FAILURES


@pytest.mark.parametrize("slow", [0, 1], ids=["first", "main"])
def test_a_part_that_is_slow_rests_alone_and_comes_back(slow):
    """The guard around both used to count the time of the one against the other."""
    now = 0.0

    def dawdle(batch: Batch) -> TokenTree:
        nonlocal now
        now += 6.0
        return scripted({0: [3], 1: [3]}).proposal(batch)

    parts = [scripted({0: [1, 2]}), scripted({1: [1, 2]})]
    parts[slow] = Scripted(dawdle)
    guards = [Guard(part, V, clock=lambda: now, name=name) for part, name in zip(parts, ("first", "main"), strict=True)]
    outer = Guard(Overlay(*guards), V, clock=lambda: now)
    batch, commit = Batch(tuple(requests(2)), (1, 1), (4, 4)), Commit.of([[0], [0]], [[1], [1]])
    for _ in range(2 * MAX_FAILURES):
        tree = outer.propose(batch)
        outer.observe(batch, commit)
    assert [guard.is_active for guard in guards] == [slow != 0, slow != 1]
    assert outer.is_active
    assert tree.sizes == ([1, 3] if slow == 0 else [3, 1])
    assert outer.failures == {"slow": MAX_FAILURES}
    assert [one.name for one in outer.probations if one.failures] == [("first", "main")[slow]]
    now += 1000.0
    outer.observe(batch, commit)
    assert all(guard.is_active for guard in guards)
    assert outer.num_nodes == 4


def test_a_timeout_set_from_outside_holds_for_every_part():
    guards = [Guard(scripted({}), V), Guard(scripted({}), V)]
    Guard(Overlay(*guards), V).timeout = 0.5
    assert [guard.timeout for guard in guards] == [0.5, 0.5]


# texts


def mixed(plain: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Right, none, edited, wrong."""
    edited = [*plain[2][:8], 90, *plain[2][9:]]
    return [tuple(plain[0]), (), tuple(edited), tuple(range(20, 44))]


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", EACH)
def test_text_is_the_same_under_an_overlay_of_any_method(name, mode):
    """A mixed batch: who has no prediction is drafted for by the method, side by side with those who have."""
    texts = [c.token_ids for c in models_made.plain().generate(PROMPTS, mode)]
    alone = models_made.plain().with_drafter(MADE[name].make(3), verify="match").generate(PROMPTS, mode)
    llm = models_made.plain().with_drafter(MADE[name].make(3), verify="match")
    for _ in range(2):
        done = generate(llm, mode, mixed(texts), PROMPTS)
        assert [c.token_ids for c in done] == texts
        assert done[0].stats.target_passes < 8
        assert done[1].stats.num_accepted > 0 or not alone[1].stats.num_accepted
    assert llm.engine.drafter.num_failures == 0


# the law


LENGTH = 3
FEW = 4  # tokens
TEXTS = list(itertools.product(range(FEW), repeat=LENGTH))
LAW = Sampling(max_tokens=LENGTH + 2, temperature=0.9, ignore_eos=True)


def counts(overlay: Drafter, lm: TableLM, prediction: tuple[int, ...], count: int) -> dict[bool, np.ndarray]:
    """How often every text came out, with a prediction and without, in batches of both."""
    transcripts = []
    for i in range(count):
        made = transcript_of([1, 2], LAW, i, verify="reject")
        made.request.prediction = prediction if i % 2 else ()
        transcripts.append(made)
    found = {True: np.zeros(len(TEXTS)), False: np.zeros(len(TEXTS))}
    accepted: Counter[bool] = Counter()
    for i, (completion, _) in enumerate(run(engine_of(lm, overlay, max_batch=16), transcripts)):
        found[bool(i % 2)][TEXTS.index(tuple(completion.token_ids[:LENGTH]))] += 1
        accepted[bool(i % 2)] += completion.stats.num_accepted
    assert min(accepted[True], accepted[False]) > count // 10
    return found


def p_values(main: Drafter | None, lm: TableLM, first: Drafter | None = None) -> list[float]:
    expected = []
    for text in TEXTS:
        rows = torch.stack([lm.after([1, 2, *text[:i]]) for i in range(LENGTH)])
        law = distribution(rows, LAW)
        expected.append(math.prod(float(law[i, token]) for i, token in enumerate(text)))
    likeliest = TEXTS[int(np.argmax(expected))]
    found = counts(Overlay(first or Prediction(3), main), lm, (*likeliest, 0, 1), 3000)
    return [chi_square(some, np.array(expected)) for some in found.values()]


def target() -> TableLM:
    return TableLM.random(FEW, seed=2, sharpness=1.0)


@pytest.mark.parametrize("branching", [None, (2, 1, 1)], ids=["chain", "tree"])
def test_the_law_of_reject_holds_with_and_without_a_prediction(branching):
    assert min(p_values(drafter_of(target().perturbed(1.0), 3, branching), target())) > ALPHA / 2


class Shifted(Overlay):
    """Rows of q one request further."""

    def propose(self, batch: Batch) -> TokenTree:
        tree = super().propose(batch)
        return tree if tree.q is None else replace(tree, q=tree.q.roll(1, 0))


def test_the_law_kills_rows_of_q_that_moved(monkeypatch):
    monkeypatch.setitem(globals(), "Overlay", Shifted)
    assert min(p_values(drafter_of(target().perturbed(1.0), 3), target())) < ALPHA / 2
