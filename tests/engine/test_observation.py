"""Hidden states of a step: collected unless the policy needs none and the drafter permits it."""

from typing import Any

import pytest

from foredraft import Sampling
from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.observation import choose_hidden_layers
from foredraft.request import Batch
from tests.support import engine_fakes

LAYERS = (1, 2)


class ObservingPolicy(FixedLengthPolicy):
    """Policy that wants hidden states in every step, or in none."""

    def __init__(self, is_needed: bool) -> None:
        self._is_needed = is_needed

    @property
    def needs_observation(self) -> bool:
        return self._is_needed


def make_batch(lacks: tuple[bool, ...]) -> Batch:
    requests = []
    for lacking in lacks:
        request = engine_fakes.make_transcript([1, 2, 3], Sampling()).request
        request.lacks_states = lacking
        requests.append(request)
    return Batch(tuple(requests), (1,) * len(lacks), (0,) * len(lacks))


@pytest.mark.parametrize(
    ("missed", "lacks", "is_needed", "expected"),
    [
        ("forbidden", (False, False), False, LAYERS),
        ("forbidden", (True, True), True, LAYERS),
        ("end", (False, True), True, LAYERS),
        ("end", (True, True), True, ()),  # no request of the batch can draft again
        ("end", (False, False), False, ()),
        ("pause", (True, True), True, LAYERS),
        ("pause", (False, True), False, ()),
    ],
)
def test_the_layers_of_a_step(missed: Any, lacks: tuple[bool, ...], is_needed: bool, expected: tuple[int, ...]) -> None:
    spec = DrafterSpec(4, LAYERS, missed_states=missed)
    assert choose_hidden_layers(make_batch(lacks), spec, ObservingPolicy(is_needed)) == expected
