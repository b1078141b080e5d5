"""The law of whole texts where the draft has another vocabulary, against enumeration; and faults that it kills.

Six letters against six tokens, of which four are letters of the target, one is a letter that it has not, and one is two
letters at once. Guards against a q that is not the law that was drawn from: of other ids, of the whole of the draft's
vocabulary, of other parameters.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes import TableLM, engine_of, run, transcript_of
from foredraft.drafters.base import Context, Draft
from foredraft.drafters.growth import TreeOptions
from foredraft.drafters.intersection import Pair
from foredraft.drafters.slem import Retokenising
from foredraft.drafters.tli import Intersecting
from foredraft.drafters.translated import Held, Translated
from foredraft.drafters.vocabularies import TokenizerVocabulary
from foredraft.sampling import History, Sampling, distribution
from stats import ALPHA, chi_square
from vocab_made import letter_tokenizer

LETTERS = list("abcdef")
OWN = ["e", "c", "x", "a", "ac", "d"]
V, LENGTH, PROMPT = len(LETTERS), 3, [0, 2, 1, 0]  # "acba"; `b` is no token of the draft
SAMPLING = Sampling(
    max_tokens=LENGTH + 1, temperature=0.9, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1, ignore_eos=True
)
TEXTS = list(itertools.product(range(V), repeat=LENGTH))
COUNT = 1000


@cache
def pair() -> Pair:
    target = TokenizerVocabulary(letter_tokenizer(LETTERS, []), V)
    return Pair(target, TokenizerVocabulary(letter_tokenizer(OWN, [("a", "c")]), len(OWN)))


def target() -> TableLM:
    return TableLM.random(V, seed=2, sharpness=1.0)


def drafter(kind: type[Translated], **options: object) -> Translated:
    lm = TableLM.random(len(OWN), seed=3, sharpness=1.5)
    return kind(lm, Context(vocab_size=V, num_tokens=3), pair(), TreeOptions(**options), 4000 * 16)  # type: ignore[arg-type]


@cache
def expected() -> np.ndarray:
    lm, found = target(), []
    for text in TEXTS:
        chance = 1.0
        for i in range(LENGTH):
            law = distribution(lm.after([*PROMPT, *text[:i]])[None], SAMPLING, [History(PROMPT, text[:i])])
            chance *= float(law[0, text[i]])
        found.append(chance)
    return np.array(found)


def p_value(made: Translated, verify: str = "reject", count: int = COUNT) -> float:
    transcripts = [transcript_of(PROMPT, SAMPLING, i, verify=verify) for i in range(count)]
    counts, accepted, rejected = np.zeros(len(TEXTS)), 0, 0
    engine = engine_of(target(), made, max_batch=64)
    for completion, _ in run(engine, transcripts):
        counts[TEXTS.index(tuple(completion.token_ids[:LENGTH]))] += 1
        accepted += completion.stats.num_accepted
        rejected += completion.stats.num_drafted - completion.stats.num_accepted
    assert engine.drafter.num_failures == 0
    assert made.allocator.num_used == 0
    assert accepted > count // 10
    assert rejected > count // 10
    assert counts[expected() == 0].sum() == 0
    return chi_square(counts, expected())


CASES: dict[str, tuple[Callable[[], Translated], str]] = {
    "tli, reject": (lambda: drafter(Intersecting), "reject"),
    "tli, block": (lambda: drafter(Intersecting), "block"),
    "tli, match": (lambda: drafter(Intersecting), "match"),
    "tli free tree, reject": (lambda: drafter(Intersecting, tree_nodes=7, top_k=3), "reject"),
    "tli fixed tree, reject": (lambda: drafter(Intersecting, branching=(2, 2, 1)), "reject"),
    "slem, reject": (lambda: drafter(Retokenising), "reject"),
    "slem, match": (lambda: drafter(Retokenising), "match"),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_law_of_the_target(case: str) -> None:
    """With seeds, so that it is the same on every run."""
    make, verify = CASES[case]
    assert p_value(make(), verify) > ALPHA


def test_the_law_drawn_from_is_the_drafts_over_the_shared_tokens_alone() -> None:
    """To the last digit, under the request's parameters in the target's ids."""
    made = drafter(Intersecting)
    laws: list[tuple[tuple[int, ...], Tensor]] = []
    own = made.draft

    def watched(held: Sequence[Held]) -> list[Draft]:
        drafts = own(held)
        for h, draft in zip(held, drafts, strict=True):
            assert draft.q is not None
            if h.request.num_tokens == len(PROMPT):
                laws.append((draft.tokens, draft.q))
        return drafts

    made.draft = watched  # type: ignore[method-assign]
    run(engine_of(target(), made), [transcript_of(PROMPT, SAMPLING, i, verify="reject") for i in range(20)])
    lm, shared = made.lm, pair().shared
    assert {LETTERS[token]: OWN[own] for token, own in shared.items()} == {x: x for x in "acde"}
    reading = [OWN.index("ac"), OWN.index("a")]  # and `b`, which it cannot spell, left out
    for tokens, q in laws:
        for i in range(len(tokens)):
            text = [*reading, *(shared[token] for token in tokens[:i])]
            logits = torch.full((1, V), -torch.inf, dtype=torch.float64)
            for token, column in shared.items():
                logits[0, token] = lm.after(text)[column]  # type: ignore[attr-defined]
            law = distribution(logits, SAMPLING, [History(PROMPT, (), tokens[:i])])[0]
            assert torch.equal(q[i], law)
            assert float(q[i].sum()) == pytest.approx(1)
    assert len({tokens for tokens, _ in laws}) > 5


# faults


class OtherIds(Intersecting):
    """Says its law in ids one further: a map that is off by one on the way back."""

    def draft(self, held: Sequence[Held]) -> list[Draft]:
        ids = list(self.pair.shared)
        moved = [ids[(i + 1) % len(ids)] for i in range(len(ids))]
        found = []
        for draft in super().draft(held):
            assert draft.q is not None
            q = torch.zeros_like(draft.q)
            q[:, moved] = draft.q[:, ids]
            found.append(replace(draft, q=q * 0.5 + draft.q * 0.5))
        return found


class NotRenormalised(Intersecting):
    """Says what its law was before the tokens that are not shared were left out: their mass lies somewhere else."""

    def draft(self, held: Sequence[Held]) -> list[Draft]:
        found = []
        for draft in super().draft(held):
            assert draft.q is not None
            q = 0.7 * draft.q
            q[:, 1] += 0.3  # `b`, which the draft has not
            found.append(replace(draft, q=q))
        return found


class Cooler(Intersecting):
    """Draws under the request's parameters and says the law of the temperature alone."""

    def draft(self, held: Sequence[Held]) -> list[Draft]:
        found = []
        for draft in super().draft(held):
            assert draft.q is not None
            q = draft.q**1.5
            found.append(replace(draft, q=q / q.sum(-1, keepdim=True).clamp_min(1e-300)))
        return found


@pytest.mark.parametrize("fault", [OtherIds, NotRenormalised, Cooler])
def test_the_law_kills_a_q_that_was_not_drawn_from(fault: type[Intersecting]) -> None:
    assert p_value(drafter(fault), count=2000) < ALPHA


def test_a_wrong_map_into_the_drafts_tokens_costs_drafts_and_no_text() -> None:
    """Whatever the draft is told to go on from."""
    made = drafter(Intersecting)
    shared = made._shared  # type: ignore[attr-defined]
    wrong = {token: (own + 1) % len(OWN) for token, own in shared.own.items()}
    made._shared = shared._replace(own=wrong)  # type: ignore[attr-defined]
    assert p_value(made) > ALPHA
