"""Hidden states and tokens of a step: given unless the policy needs none and the drafter permits it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft import Sampling
from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.drafters.draft import root_tree
from foredraft.drafters.spec import DrafterSpec, TokenSteps
from foredraft.engine.observation import choose_hidden_layers, show_commit
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.step_tree import prepend_chunks
from foredraft.engine.target_output import TargetOutput
from foredraft.request import Batch
from foredraft.tree import Commit
from foredraft.verification.probs import LazyTargetProbs
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


@pytest.mark.parametrize(
    ("needs", "token_steps", "is_needed", "granted", "seen", "is_observed"),
    [
        (True, "active", False, 0, [], False),
        (True, "active", True, 0, [True], True),
        (True, "all", False, 0, [True], True),
        (True, "drafted", True, 0, [], True),  # the drafter has all that it reads
        (True, "drafted", False, 2, [True], True),
        (False, "active", False, 0, [False], True),  # it reads the commit alone
    ],
)
def test_the_tokens_of_a_step(
    needs: bool, token_steps: TokenSteps, is_needed: bool, granted: int, seen: list[bool], is_observed: bool
) -> None:
    """Fault: `token_recycling` and `lookahead` took 7 and 2 % of a plain step at rest, for tokens of no use there."""
    inner = engine_fakes.ScriptedDrafter(root_tree, needs_target_argmax=needs, token_steps=token_steps)
    batch = replace(make_batch((False,)), granted_nodes=(granted,))
    tree = prepend_chunks(batch, root_tree(batch))
    logits = torch.zeros(1, 8)
    output = TargetOutput(logits, LazyTargetProbs(logits, [Sampling()]), None, {})
    commit = Commit.from_lists([[0]], [[0]])
    guard, policy = SandboxedDrafter(inner, 8), ObservingPolicy(is_needed)
    assert show_commit(guard, batch, tree, commit, output, policy) == is_observed
    assert [commit.target_argmax is not None for commit in inner.observed] == seen


def test_tokens_are_given_with_the_hidden_states() -> None:
    """A drafter that gets states in every step, such as a merged ensemble, gets the tokens with them."""
    inner = engine_fakes.ScriptedDrafter(root_tree, hidden_layers=(1,), needs_target_argmax=True, token_steps="active")
    batch = make_batch((False,))
    tree = prepend_chunks(batch, root_tree(batch))
    logits = torch.zeros(1, 8)
    output = TargetOutput(logits, LazyTargetProbs(logits, [Sampling()]), torch.zeros(1, 4), {})
    commit = Commit.from_lists([[0]], [[0]])
    assert show_commit(SandboxedDrafter(inner, 8), batch, tree, commit, output, ObservingPolicy(False))
    assert inner.observed[0].target_argmax is not None
    assert inner.observed[0].path_features is not None


def test_candidates_are_the_likeliest_tokens_of_rows_with_finite_logits() -> None:
    batch = make_batch((False,) * 4)
    tree = prepend_chunks(batch, root_tree(batch))
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0]).repeat(4, 1)
    logits[0, 0], logits[2, 3] = torch.inf, torch.nan
    logits[3] = -torch.inf
    output = TargetOutput(logits, LazyTargetProbs(logits, [Sampling()] * 4), None, {})
    commit = Commit.from_lists([[0]] * 4, [[0]] * 4)
    seen = output.attach_to(commit, tree, DrafterSpec(4, num_target_candidates=3), with_tokens=True)
    assert seen.target_candidates is not None
    assert list(seen.target_candidates.rows) == [(), (1, 3, 2), (), ()]
