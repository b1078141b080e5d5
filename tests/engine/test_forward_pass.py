"""Input of a step's forward pass: which hidden states of prompts the drafter reads."""

import pytest
import torch

from foredraft import Sampling
from foredraft.drafters.draft import root_tree
from foredraft.drafters.spec import DrafterSpec, MissedStates
from foredraft.engine.forward_pass import build_forward_batch
from foredraft.engine.step_tree import prepend_chunks
from foredraft.request import Batch
from tests.support import engine_fakes

PROMPTS = [[1, 2, 3, 4], [5, 6]]


def reads_all_states(missed: MissedStates, chunks: tuple[int, ...]) -> bool:
    requests = tuple(engine_fakes.make_transcript(prompt, Sampling()).request for prompt in PROMPTS)
    for request in requests:
        request.pages = [1]
    batch = Batch(requests, chunks, (0,) * len(chunks))
    tree, spec = prepend_chunks(batch, root_tree(batch)), DrafterSpec(4, (1,), missed_states=missed)
    return build_forward_batch(batch, tree, (), torch.device("cpu"), spec).reads_all_states


@pytest.mark.parametrize("chunks", [(4, 2), (2, 2), (3, 2), (4, 1)])
@pytest.mark.parametrize("missed", ["forbidden", "end"])
def test_a_drafter_may_read_every_state(missed: MissedStates, chunks: tuple[int, ...]) -> None:
    assert reads_all_states(missed, chunks)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((4, 2), False),
        ((2, 2), False),  # the rest of a prompt follows, so its newest state is another
        ((3, 2), True),  # a draft from the last token of the first prompt reads the state before it
        ((4, 1), True),
    ],
)
def test_a_drafter_of_the_newest_state_reads_no_other(chunks: tuple[int, ...], expected: bool) -> None:
    assert reads_all_states("pause", chunks) == expected
