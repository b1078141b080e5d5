"""Settings as tensors: the probabilities of `distribution`, bit by bit."""

import math

import pytest
import torch

from foredraft.sampling.distribution import compute_reference_probs
from foredraft.sampling.params import Sampling
from foredraft.sampling.row_settings import FilterSizes, RowSettings

ROWS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, top_k=1),
    Sampling(temperature=1.7, top_k=5, top_p=0.8),
    Sampling(temperature=1e-300, min_p=0.2),
    Sampling(temperature=0.9, top_p=1e-9),
    Sampling(temperature=2.0, top_k=3000, top_p=0.5, min_p=0.05),
    Sampling(temperature=1.0, top_k=7),
]


def to_settings(rows: list[Sampling]) -> RowSettings:
    return RowSettings(
        FilterSizes.measure(rows),
        torch.tensor([s.temperature for s in rows], dtype=torch.float64),
        torch.tensor([s.top_k for s in rows]),
        torch.tensor([s.top_p for s in rows], dtype=torch.float64),
        torch.tensor([s.min_p for s in rows], dtype=torch.float64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 61])
def test_probabilities_are_those_of_distribution(size: int, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(len(ROWS), size, generator=noise)).to(dtype)
    logits[6] = logits[6].round()  # ties
    for rows in (ROWS, ROWS[:1], ROWS[4:5] * 2, ROWS[6:]):
        x = logits[: len(rows)] if len(rows) > 1 else logits[6:]
        wide = x if dtype == torch.float64 else x.float()
        assert torch.equal(to_settings(rows).compute_probs(x), compute_reference_probs(wide, rows))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_invalid_logits_is_nan_and_no_other(value: float) -> None:
    logits = torch.randn(len(ROWS), 9, generator=torch.Generator().manual_seed(0))
    logits[2, 4] = value
    logits[5] = -math.inf
    probs = to_settings(ROWS).compute_probs(logits)
    assert [bool(row.isnan().all()) for row in probs] == [i in (2, 5) for i in range(len(ROWS))]
    assert torch.equal(probs.isnan(), compute_reference_probs(logits, ROWS).isnan())


def test_sizes_round_top_k_up() -> None:
    assert FilterSizes.measure(ROWS[:1]) == FilterSizes()
    assert FilterSizes.measure(ROWS[2:3]) == FilterSizes(8, True, False)
    assert FilterSizes.measure(ROWS[3:4]) == FilterSizes(0, False, True)
