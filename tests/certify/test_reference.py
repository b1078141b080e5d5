"""The slow reference in numpy equals the slow reference in plain Python, and the engine's function."""

import random

import pytest
import torch

from foredraft.certify.reference import ReferenceHistory, compute_reference
from foredraft.sampling.params import Sampling
from tests.support import sampling_oracle
from tests.support.sampling_cases import SETTINGS, V, make_history


@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_equals_the_other_reference(name):
    rng, sampling = random.Random(name), Sampling(**SETTINGS[name])
    logits = torch.randn(40, V, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64) * 2
    for row in logits:
        history = make_history(rng, sampling)
        output = (*history.output, *history.draft_path)
        own = ReferenceHistory(tuple(history.prompt), output, frozenset(history.end_ids))
        expected = sampling_oracle.compute_distribution(row.tolist(), sampling, history)
        assert compute_reference(row.numpy(), sampling, own).p == pytest.approx(expected, abs=1e-12)


def test_the_margin_is_the_distance_of_the_nearest_cut():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)).numpy()
    history = ReferenceHistory((), (), frozenset())
    assert compute_reference(logits, Sampling(top_p=0.8 - 1e-7), history).margin == pytest.approx(1e-7, rel=1e-3)
    assert compute_reference(logits, Sampling(min_p=0.5), history).margin == pytest.approx(0.05, rel=1e-6)
    assert compute_reference(logits, Sampling(temperature=0), history).margin == pytest.approx(0.5108, rel=1e-3)
