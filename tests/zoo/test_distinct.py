"""The share of distinct n-grams, and its measurement on greedy texts."""

import pytest

from foredraft import LLM
from foredraft.zoo_training.distinct import OPENINGS, compute_distinct_share, measure_distinct_share


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([1, 2, 3, 4, 5], 1.0), ([7] * 11, 1 / 8), ([1, 2, 3, 4] * 2, 4 / 5), ([1, 2], 1.0), ([], 1.0)],
)
def test_the_share_counts_every_ngram_once(tokens, share):
    assert compute_distinct_share(tokens) == share


def test_greedy_texts_are_measured_one_by_one(monkeypatch):
    """Texts are not joined: the same text after every opening has the share of one text."""

    class Completion:
        token_ids = [7] * 11

    class StubLLM:
        def generate(self, prompts, sampling):
            assert prompts == list(OPENINGS)
            assert sampling.temperature == 0
            assert sampling.ignore_eos
            return [Completion()] * len(prompts)

    assert measure_distinct_share(StubLLM()) == 1 / 8


def test_the_built_in_target_is_measured():
    assert 0.05 < measure_distinct_share(LLM(drafter=None)) < 0.95
