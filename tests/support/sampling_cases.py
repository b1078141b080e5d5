"""Every sampling parameter with a value that matters, and the checker against the slow reference."""

import math
import random
from collections.abc import Callable

import torch

from foredraft.sampling.distribution import TokenHistory
from foredraft.sampling.params import Sampling
from tests.support import sampling_oracle

V = 12
SETTINGS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top-k 1": {"top_k": 1},
    "top-k 5": {"top_k": 5},
    "top-k beyond the vocabulary": {"top_k": 50},
    "top-p": {"top_p": 0.8},
    "tiny top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "min-p 1": {"min_p": 1.0},
    "typical": {"typical_p": 0.6},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.5},
    "negative penalties": {"presence_penalty": -0.8, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {2: 3.0, 7: -4.0}},
    "bad words": {"bad_words": ((4,), (1, 2), (3, 1, 5))},
    "allowed": {"allowed_token_ids": (0, 3, 5, 9)},
    "min tokens": {"min_tokens": 3, "stop_token_ids": (6,)},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 1.0},
    "all filters": {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
    "everything": {
        "temperature": 1.2,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {1: 1.0},
        "bad_words": ((2,), (4, 5)),
        "allowed_token_ids": tuple(range(11)),
        "min_tokens": 4,
    },
}


def make_history(rng: random.Random, sampling: Sampling, v: int = V) -> TokenHistory:
    some = [[rng.randrange(v) for _ in range(rng.randrange(n))] for n in (6, 6, 4)]
    return TokenHistory(*some, end_ids=(6, 8), bad_words=[w for w in sampling.bad_words if not isinstance(w, str)])


def compute_expected(logits: torch.Tensor, sampling: list[Sampling], history: list[TokenHistory]) -> torch.Tensor:
    rows = []
    for x, s, h in zip(logits.tolist(), sampling, history, strict=True):
        try:
            rows.append(sampling_oracle.compute_distribution(x, s, h))
        except sampling_oracle.NoDistributionError:
            rows.append([math.nan] * len(x))
    return torch.tensor(rows, dtype=torch.float64)


def assert_same(p: torch.Tensor, reference: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(p.double(), reference, rtol=0, atol=atol, equal_nan=True)
    assert torch.equal(p > 0, reference > 0)


def measure_largest_error(compute: Callable[..., torch.Tensor], name: str) -> float:
    """Measure the largest difference from the reference over 60 random rows; 1 if the supports differ."""
    rng, sampling = random.Random(name), Sampling(**SETTINGS[name])
    logits = torch.randn(60, V, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64) * 2
    history = [make_history(rng, sampling) for _ in range(60)]
    p, reference = compute(logits, [sampling] * 60, history), compute_expected(logits, [sampling] * 60, history)
    if not torch.equal(p > 0, reference > 0) or not torch.equal(p.isnan(), reference.isnan()):
        return 1.0
    return float((p - reference).abs().nan_to_num().max())
