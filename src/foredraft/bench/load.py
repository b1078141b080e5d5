"""Many requests at once: a closed loop, in which every stream sends its next request when the last one has ended.

All modes answer the same requests in the same round, in an order that rotates from round to round, and are set against
each other within a round: a slow minute of the machine hits all alike. Time counts while every stream is busy: it ends
when a stream finds no request left, and what the others still had to say is aborted and does not count.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from foredraft.cli.figures import total
from foredraft.completion import Stats
from foredraft.errors import ForedraftError

OFF, AUTO = "off", "auto"
ROOM = 64  # tokens of a request beside its text: its draft, and what its last page lacks
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly whatever their number


@dataclass(frozen=True)
class Job:
    """One request. All texts run to `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Timeline:
    """When the tokens of one request came."""

    sent: float  # seconds on the driver's clock, as are all others
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, new tokens), one for every delta
    stats: Stats | None = None  # where whoever answers gives them; of an aborted request as far as it came

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent if self.arrivals else None

    def gaps(self) -> Iterator[tuple[float, int]]:
        """(seconds since the delta before, tokens it brought) of every delta but the first."""
        for (before, _), (now, count) in pairwise(self.arrivals):
            yield now - before, count


@dataclass(frozen=True)
class Loop:
    """One closed loop, up to the moment a stream found nothing left to do."""

    seconds: float
    timelines: tuple[Timeline, ...]

    @property
    def num_tokens(self) -> int:
        return sum(timeline.num_tokens for timeline in self.timelines)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class Driver(Protocol):
    """Somebody who answers requests: an engine in this process, its worker, a server."""

    def run(self, jobs: Sequence[Job], concurrency: int) -> Loop:
        """Raises ForedraftError where a request fails. `jobs` are at least as many as the streams."""

    def close(self) -> None:
        """No more will be asked."""


@dataclass(frozen=True)
class Work:
    """The requests of every round."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int  # of a text on average; lengths lie between half and one and a half times that
    waves: float  # requests for every stream in a round
    least: int  # requests of a round at least

    def jobs(self, concurrency: int, number: int) -> list[Job]:
        """Those of round `number`; number -1 is the warm-up, of one wave."""
        count = max(self.least, concurrency, round(concurrency * (self.waves if number >= 0 else 1)))
        first = number * count
        return [self._job(first + i) for i in range(count)]

    def memory(self, concurrency: int) -> int:
        """Tokens of KV memory in which nobody is ever preempted, drafts and a cache of half as much included: an
        engine that may have more would fill it all with prompts that nobody sends again."""
        longest = max(map(len, self.prompts)) + round(1.5 * self.max_tokens) + ROOM
        return round(1.5 * concurrency * longest) + ROOM

    def _job(self, index: int) -> Job:
        # texts of one length would end, and prompts be read, all in the same step
        length = max(1, round(self.max_tokens * (0.5 + (index * GOLDEN) % 1)))
        return Job(self.prompts[index % len(self.prompts)], length)


@dataclass(frozen=True)
class Effort:
    """How long to measure at one concurrency."""

    rounds: int  # at most
    least: int = 2  # rounds in any case
    seconds: float | None = None  # no round is begun that would probably end later, warm-up included


@dataclass(frozen=True)
class Cell:
    """One mode at one concurrency."""

    concurrency: int
    mode: str
    rounds: int
    requests: int
    tokens: int
    tokens_per_second: float  # median over the rounds
    over_off: float  # median over the rounds of the ratio of throughputs
    over_off_rounds: tuple[float, ...]
    # None where no text came as far
    first_p50: float | None  # seconds to the first token
    first_p99: float | None
    gap_p50: float | None  # seconds between two deltas of a text, which may bring several tokens
    gap_p99: float | None
    token_p50: float | None  # seconds for a token: the gap over the tokens that came with it, weighted by them
    token_p99: float | None
    acceptance_length: float | None  # tokens for each pass and request, bonus included; None where nobody says
    drafted: float | None  # tokens drafted for each pass and request


@dataclass(frozen=True)
class Point:
    """One concurrency, all modes."""

    concurrency: int
    cells: tuple[Cell, ...]
    best_fixed: str | None  # the fixed length with the highest ratio to off, which its luck is part of
    auto_over_best: float | None  # median over the rounds

    def cell(self, mode: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.mode == mode), None)


def measure(
    drivers: Mapping[str, Driver],
    work: Work,
    concurrency: int,
    effort: Effort,
    step: Callable[[str], None] = lambda _: None,
) -> Point:
    """Warm every mode up, then round after round. `drivers` holds OFF; other names are AUTO or a draft length."""
    began = time.perf_counter()
    names = list(drivers)
    for name in names:
        step(f"{concurrency} streams, warming up {name}")
        drivers[name].run(work.jobs(concurrency, -1), concurrency)
    loops: dict[str, list[Loop]] = {name: [] for name in names}
    longest = 0.0
    for number in range(effort.rounds):
        start = time.perf_counter()
        if effort.seconds is not None and number >= effort.least and start + longest > began + effort.seconds:
            break
        jobs = work.jobs(concurrency, number)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            step(f"{concurrency} streams, round {number + 1}, {name}")
            gc.collect()  # another mode's garbage is not this one's time
            loops[name].append(drivers[name].run(jobs, concurrency))
        longest = max(longest, time.perf_counter() - start)
    return point(concurrency, loops)


def point(concurrency: int, loops: Mapping[str, Sequence[Loop]]) -> Point:
    """The figures of all rounds at one concurrency."""
    speeds = {name: [loop.tokens_per_second for loop in rounds] for name, rounds in loops.items()}
    ratios = {name: _ratios(rounds, speeds[OFF]) for name, rounds in speeds.items()}
    cells = tuple(_cell(concurrency, name, rounds, ratios[name]) for name, rounds in loops.items())
    fixed = {cell.mode: cell.over_off for cell in cells if cell.mode not in (OFF, AUTO)}
    best = max(fixed, key=lambda mode: fixed[mode]) if fixed else None
    over = statistics.median(_ratios(speeds[AUTO], speeds[best])) if best is not None and AUTO in speeds else None
    return Point(concurrency, cells, best, over)


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    if not all(others):
        raise ForedraftError("no token came within a round; ask for more requests or longer texts")
    return [mine / other for mine, other in zip(speeds, others, strict=True)]


def _cell(concurrency: int, mode: str, loops: Sequence[Loop], ratios: Sequence[float]) -> Cell:
    timelines = [timeline for loop in loops for timeline in loop.timelines]
    firsts = [timeline.first for timeline in timelines if timeline.first is not None]
    gaps = [gap for timeline in timelines for gap in timeline.gaps()]
    each = [(gap / count, count) for gap, count in gaps]
    stats = [timeline.stats for timeline in timelines if timeline.stats is not None]
    summed = total(stats) if stats else None
    return Cell(
        concurrency=concurrency,
        mode=mode,
        rounds=len(loops),
        requests=len(timelines),
        tokens=sum(loop.num_tokens for loop in loops),
        tokens_per_second=statistics.median(loop.tokens_per_second for loop in loops),
        over_off=statistics.median(ratios),
        over_off_rounds=tuple(ratios),
        first_p50=quantile([(value, 1) for value in firsts], 0.5),
        first_p99=quantile([(value, 1) for value in firsts], 0.99),
        gap_p50=quantile([(gap, 1) for gap, _ in gaps], 0.5),
        gap_p99=quantile([(gap, 1) for gap, _ in gaps], 0.99),
        token_p50=quantile(each, 0.5),
        token_p99=quantile(each, 0.99),
        acceptance_length=None if summed is None else summed.acceptance_length,
        drafted=None if summed is None else summed.num_drafted / max(1, summed.target_passes),
    )


def quantile(weighted: Sequence[tuple[float, int]], share: float) -> float | None:
    """The smallest value that at least `share` of the weight does not exceed; None of nothing."""
    ordered = sorted(weighted)
    rest = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        rest -= weight
        if rest <= 0:
            return value
    return ordered[-1][0] if ordered else None
