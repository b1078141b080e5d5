"""The distribution of whole texts if the draft has another vocabulary, against enumeration; and faults that it kills.

Six letters against six tokens, of which four are letters of the target, one is a letter that it has not, and one is two
letters at once. Guards against a q that is not the sampled distribution: of other ids, of the whole vocabulary of the
draft, of other parameters.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft import Draft
from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabDrafter, CrossVocabState
from foredraft.drafters.draft_model.cross_vocab.slem import SlemDrafter
from foredraft.drafters.draft_model.cross_vocab.tli import TliDrafter
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.drafters.method import DrafterContext
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from foredraft.tokenization.byte_vocabulary import TokenizerVocabulary
from tests.support.engine_fakes import TableLM, make_engine, make_transcript, run
from tests.support.statistical_checks import ALPHA, chi_square
from tests.support.tiny_vocabularies import letter_tokenizer

LETTERS = list("abcdef")
OWN = ["e", "c", "x", "a", "ac", "d"]
V, LENGTH, PROMPT = len(LETTERS), 3, [0, 2, 1, 0]  # "acba"; `b` is no token of the draft
SAMPLING = Sampling(
    max_tokens=LENGTH + 1, temperature=0.9, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1, ignore_eos=True
)
TEXTS = list(itertools.product(range(V), repeat=LENGTH))
COUNT = 1000


@cache
def pair() -> VocabMap:
    target = TokenizerVocabulary(letter_tokenizer(LETTERS, []), V)
    return VocabMap(target, TokenizerVocabulary(letter_tokenizer(OWN, [("a", "c")]), len(OWN)))


def target() -> TableLM:
    return TableLM.from_seed(V, seed=2, sharpness=1.0)


def drafter(kind: type[CrossVocabDrafter], **options: object) -> CrossVocabDrafter:
    lm = TableLM.from_seed(len(OWN), seed=3, sharpness=1.5)
    return kind(lm, DrafterContext(vocab_size=V, num_speculative_tokens=3), pair(), TreeOptions(**options), 4000 * 16)  # type: ignore[arg-type]


@cache
def compute_expected() -> np.ndarray:
    lm, found = target(), []
    for text in TEXTS:
        chance = 1.0
        for i in range(LENGTH):
            probs = distribution(
                lm.compute_logits([*PROMPT, *text[:i]])[None], SAMPLING, [TokenHistory(PROMPT, text[:i])]
            )
            chance *= float(probs[0, text[i]])
        found.append(chance)
    return np.array(found)


def p_value(made: CrossVocabDrafter, verify: str = "reject", count: int = COUNT) -> float:
    transcripts = [make_transcript(PROMPT, SAMPLING, i, verify=verify) for i in range(count)]
    counts, accepted, rejected = np.zeros(len(TEXTS)), 0, 0
    engine = make_engine(target(), made, max_batch=64)
    for completion, _ in run(engine, transcripts):
        counts[TEXTS.index(tuple(completion.token_ids[:LENGTH]))] += 1
        accepted += completion.stats.num_accepted
        rejected += completion.stats.num_drafted - completion.stats.num_accepted
    assert engine.drafter.num_failures == 0
    assert made.allocator.num_used == 0
    assert accepted > count // 10
    assert rejected > count // 10
    assert counts[compute_expected() == 0].sum() == 0
    return chi_square(counts, compute_expected())


CASES: dict[str, tuple[Callable[[], CrossVocabDrafter], str]] = {
    "tli, reject": (lambda: drafter(TliDrafter), "reject"),
    "tli, block": (lambda: drafter(TliDrafter), "block"),
    "tli, match": (lambda: drafter(TliDrafter), "match"),
    "tli free tree, reject": (lambda: drafter(TliDrafter, tree_nodes=7, top_k=3), "reject"),
    "tli fixed tree, reject": (lambda: drafter(TliDrafter, branching=(2, 2, 1)), "reject"),
    "tli drafts, spectr": (lambda: drafter(TliDrafter, num_drafts=3), "spectr"),
    "slem, reject": (lambda: drafter(SlemDrafter), "reject"),
    "slem, match": (lambda: drafter(SlemDrafter), "match"),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_distribution_of_the_target(case: str) -> None:
    """With seeds, so that it is the same on every run."""
    make, verify = CASES[case]
    assert p_value(make(), verify) > ALPHA


def test_the_distribution_drawn_from_is_the_drafts_over_the_shared_tokens_alone() -> None:
    """The distributions are equal to the last digit, under the request's parameters in the target's ids."""
    made = drafter(TliDrafter)
    distributions: list[tuple[tuple[int, ...], Tensor]] = []
    own = made.draft_batch

    def record_drafts(held: Sequence[CrossVocabState]) -> list[Draft]:
        drafts = own(held)
        for h, draft in zip(held, drafts, strict=True):
            assert draft.q is not None
            if h.request.num_tokens == len(PROMPT):
                distributions.append((draft.tokens, draft.q))
        return drafts

    made.draft_batch = record_drafts  # type: ignore[method-assign]
    run(make_engine(target(), made), [make_transcript(PROMPT, SAMPLING, i, verify="reject") for i in range(20)])
    lm, shared = made.lm, pair().shared_tokens
    assert {LETTERS[token]: OWN[own] for token, own in shared.items()} == {x: x for x in "acde"}
    reading = [OWN.index("ac"), OWN.index("a")]  # and `b`, which it cannot spell, left out
    for tokens, q in distributions:
        for i in range(len(tokens)):
            text = [*reading, *(shared[token] for token in tokens[:i])]
            logits = torch.full((1, V), -torch.inf, dtype=torch.float64)
            for token, column in shared.items():
                logits[0, token] = lm.compute_logits(text)[column]  # type: ignore[attr-defined]
            probs = distribution(logits, SAMPLING, [TokenHistory(PROMPT, (), tokens[:i])])[0]
            assert torch.equal(q[i], probs)
            assert float(q[i].sum()) == pytest.approx(1)
    assert len({tokens for tokens, _ in distributions}) > 5


# faults


class OtherIds(TliDrafter):
    """Reports its distribution in ids one further: a map that is off by one on the way back."""

    def draft_batch(self, states: Sequence[CrossVocabState]) -> list[Draft]:
        ids = list(self.vocab_map.shared_tokens)
        moved = [ids[(i + 1) % len(ids)] for i in range(len(ids))]
        found = []
        for draft in super().draft_batch(states):
            assert draft.q is not None
            q = torch.zeros_like(draft.q)
            q[:, moved] = draft.q[:, ids]
            found.append(replace(draft, q=q * 0.5 + draft.q * 0.5))
        return found


class NotRenormalised(TliDrafter):
    """Reports its distribution from before the unshared tokens were left out: their mass lies somewhere else."""

    def draft_batch(self, states: Sequence[CrossVocabState]) -> list[Draft]:
        found = []
        for draft in super().draft_batch(states):
            assert draft.q is not None
            q = 0.7 * draft.q
            q[:, 1] += 0.3  # `b`, which the draft has not
            found.append(replace(draft, q=q))
        return found


class Cooler(TliDrafter):
    """Samples under the request's parameters and reports the distribution of the temperature alone."""

    def draft_batch(self, states: Sequence[CrossVocabState]) -> list[Draft]:
        found = []
        for draft in super().draft_batch(states):
            assert draft.q is not None
            q = draft.q**1.5
            found.append(replace(draft, q=q / q.sum(-1, keepdim=True).clamp_min(1e-300)))
        return found


@pytest.mark.parametrize("fault", [OtherIds, NotRenormalised, Cooler])
def test_the_distribution_kills_a_q_that_was_not_drawn_from(fault: type[TliDrafter]) -> None:
    assert p_value(drafter(fault), count=2000) < ALPHA


def test_a_wrong_map_into_the_drafts_tokens_costs_drafts_and_no_text() -> None:
    """This holds for any tokens that the draft continues."""
    made = drafter(TliDrafter)
    shared = made._shared_tokens  # type: ignore[attr-defined]
    wrong = {token: (own + 1) % len(OWN) for token, own in shared.draft_by_target.items()}
    made._shared_tokens = shared._replace(draft_by_target=wrong)  # type: ignore[attr-defined]
    assert p_value(made) > ALPHA
