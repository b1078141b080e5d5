"""Repetition in greedy text: the share of distinct n-grams after ordinary openings of Python code."""

from collections.abc import Sequence
from typing import Any

from foredraft.sampling.params import Sampling

NGRAM = 4  # tokens of the n-grams
NEW_TOKENS = 128  # tokens of a text
OPENINGS = (
    "def fibonacci(n):",
    "class Stack:",
    "class TestQueue(unittest.TestCase):",
    "parser = argparse.ArgumentParser(",
    "def main():",
    "def read_config(path):",
    "class Node:\n    def __init__(self, value):",
    "@pytest.mark.parametrize(",
    "def quicksort(items):",
    "async def fetch(session, url):",
    "    def test_empty(self):",
    "for line in open(path):",
)


def compute_distinct_share(tokens: Sequence[int], size: int = NGRAM) -> float:
    """Return the number of different n-grams of a sequence over that of its n-grams; 1.0 for a shorter sequence."""
    ngrams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def measure_distinct_share(llm: Any) -> float:
    """Return the mean share of distinct n-grams in the greedy texts of an LLM after OPENINGS."""
    sampling = Sampling(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    completions = llm.generate(list(OPENINGS), sampling)
    return sum(compute_distinct_share(completion.token_ids) for completion in completions) / len(completions)
