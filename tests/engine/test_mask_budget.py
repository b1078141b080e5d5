"""Grammars that are slow to follow: they hold others up for a bounded part of the time, come to their end, and change
no text. The clock and the matchers are fakes."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from foredraft.engine.engine import Engine
from foredraft.engine.scheduler import SchedulerLimits
from foredraft.engine.transcript import Transcript
from foredraft.kv.allocator import PageAllocator
from foredraft.models.forward_batch import ForwardBatch
from foredraft.sampling.grammar import Grammar
from foredraft.sampling.grammar_tokens import AllowedTokens
from foredraft.sampling.params import Sampling
from tests.support.engine_fakes import TableLM, make_drafter, make_transcript

PASS = 0.005  # seconds of a pass of the target
SLOW = 0.1  # seconds of a slow mask


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SlowMatcher:
    """Allows everything, and takes its time for every new question."""

    clock: Clock
    cost: float
    spent: float = 0.0
    error: str | None = None

    def __post_init__(self) -> None:
        self.asked: set[tuple[int, tuple[int, ...]]] = set()

    def find_allowed(self, output: Sequence[int], draft_path: Sequence[int] = ()) -> AllowedTokens:
        question = len(output), tuple(draft_path)
        if question not in self.asked:
            self.asked.add(question)
            self.clock.now += self.cost
            self.spent += self.cost
        return AllowedTokens()

    def take_seconds(self) -> float:
        taken, self.spent = self.spent, 0.0
        return taken


class TimedLM(TableLM):
    """A pass takes time of the clock, which is set after it is made."""

    clock: Clock

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        self.clock.now += PASS
        return super().forward(forward_batch, hidden_layers)


class World:
    def __init__(self, num_drafted: int = 0, **limits: int) -> None:
        self.clock = Clock()
        lm = TimedLM(TableLM.from_seed(9, seed=3).table)
        lm.clock = self.clock
        drafter = make_drafter(TableLM.from_seed(9, seed=3).perturb(0.3), num_drafted) if num_drafted else None
        allocator = PageAllocator(4000, 4)
        self.engine = Engine(
            lm, drafter, allocator, SchedulerLimits(**limits), torch.device("cpu"), self.clock, is_debug=True
        )
        self.num_added = 0

    def add(self, max_tokens: int, cost: float | None = None, at_first: float = 0.0) -> Transcript:
        """cost: seconds of each mask; None = without a grammar. at_first: of those made before it was queued."""
        grammar = None if cost is None else Grammar.regex("(?s:.*)")
        sampling = Sampling(max_tokens=max_tokens, temperature=0.8, grammar=grammar)
        made = make_transcript([self.num_added % 8], sampling, self.num_added, eos_ids=(99,))  # no id of the model
        if cost is not None:
            made.request.matcher = SlowMatcher(self.clock, cost, at_first)
        self.num_added += 1
        self.engine.add(made)
        return made

    def step(self) -> None:
        self.result = self.engine.step()
        assert self.result.requests, "there is work and no request runs"

    def run(self, *awaited: Transcript, most: int = 20_000) -> None:
        while not all(transcript.is_finished for transcript in awaited):
            self.step()
            most -= 1
            assert most, "it never ends"


@pytest.mark.parametrize("num_drafted", [0, 3])
@pytest.mark.parametrize("at_first", [0.0, 2 * SLOW])
def test_slow_grammars_hold_a_small_request_up_for_a_bounded_time(at_first: float, num_drafted: int):
    """Requests with slow first masks are never all in one step; the others are together once."""
    world = World(num_drafted)
    slow = [world.add(40, SLOW, at_first) for _ in range(31)]
    small = world.add(32)
    world.run(small)
    once = 0.0 if at_first else 31 * SLOW * (1 + num_drafted)
    assert world.clock.now < once + 32 * PASS * 1.5 + 2 * SLOW * (1 + num_drafted)
    assert not any(transcript.is_finished for transcript in slow)


def test_requests_that_sit_out_go_on_beside_others_without_end():
    world = World()
    slow = [world.add(5, SLOW, SLOW) for _ in range(6)]
    world.add(10_000)
    world.run(*slow)
    busy = 6 * 5 * SLOW
    assert busy / 0.4 < world.clock.now < busy / 0.3  # a third of the time is theirs


def test_each_gets_its_turn():
    world = World()
    slow = [world.add(30, SLOW, SLOW) for _ in range(5)]
    world.add(10_000)
    while not any(transcript.is_finished for transcript in slow):
        world.step()
    counts = [transcript.num_tokens for transcript in slow]
    assert min(counts) >= max(counts) - 1


def test_slow_requests_by_themselves_wait_for_nothing():
    """The requests are never all in one step, since another may arrive."""
    world = World()
    slow = [world.add(6, SLOW, SLOW) for _ in range(8)]
    while not all(transcript.is_finished for transcript in slow):
        before = world.clock.now
        world.step()
        assert world.clock.now - before < 2 * SLOW
    assert world.clock.now < 8 * 6 * (SLOW + PASS) + 1e-6


def test_requests_that_sit_out_give_their_places_up_to_those_that_wait():
    world = World(max_batch=4)
    slow = [world.add(40, SLOW, SLOW) for _ in range(4)]
    for _ in range(3):
        world.step()
    small = [world.add(8) for _ in range(6)]
    world.run(*small)
    assert world.clock.now < 12 * SLOW
    world.run(*slow)
    assert not world.engine.scheduler.has_work


@pytest.mark.parametrize("num_drafted", [0, 3])
def test_sitting_out_changes_no_text(num_drafted: int):
    texts = []
    for cost in (0.0, 0.03):
        world = World(num_drafted, max_batch=3)
        made = [world.add(12, None if i % 3 == 0 else cost * i, 0.01 * i) for i in range(8)]
        world.run(*made)
        texts.append([list(transcript.request.output) for transcript in made])
    assert texts[0] == texts[1]
    assert all(len(text) == 12 for text in texts[0])


def test_ordinary_grammars_are_never_held_back():
    world = World()
    made = [world.add(20, 0.0005) for _ in range(10)]
    for _ in range(20):
        world.step()
        assert len(world.result.requests) == 10
    assert all(transcript.is_finished for transcript in made)


def test_who_is_left_to_run_runs_whatever_its_debt():
    """A server steps some of its requests alone while others' readers are behind, or when one made a step fail."""
    world = World()
    first, second = world.add(8, SLOW, 50.0), world.add(8, SLOW, 50.0)
    assert world.engine.step(frozenset([second.request])).requests == (second.request,)
    world.run(first, second)


def test_a_request_that_was_aborted_leaves_no_debt():
    world = World()
    slow = world.add(8, SLOW, 50.0)
    world.add(3)
    world.step()
    world.engine.abort(slow.request)
    world.step()
    assert not world.engine.planner.mask_budget.find_deferred()
