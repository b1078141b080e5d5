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

from foredraft.cli.speed_figures import sum_stats
from foredraft.errors import ForedraftError
from foredraft.outputs import Stats

OFF, AUTO = "off", "auto"
EXTRA_TOKENS = 64  # tokens of a request beside its text: its draft, and what its last page lacks
GOLDEN_FRACTION = 0.6180339887498949  # its multiples, modulo 1, are spread evenly whatever their number


@dataclass(frozen=True)
class LoadRequest:
    """One request. All texts run to `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class RequestTimeline:
    """When the tokens of one request came."""

    sent_at: float  # seconds on the driver's clock, as are all others
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, new tokens), one for every delta
    stats: Stats | None = None  # None if the server gives none; partial for an aborted request

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent_at if self.arrivals else None

    def iter_gaps(self) -> Iterator[tuple[float, int]]:
        """(seconds since the delta before, tokens it brought) of every delta but the first."""
        for (before, _), (now, count) in pairwise(self.arrivals):
            yield now - before, count


@dataclass(frozen=True)
class ClosedLoopResult:
    """One closed loop, up to the moment a stream found nothing left to do."""

    seconds: float
    timelines: tuple[RequestTimeline, ...]

    @property
    def num_tokens(self) -> int:
        return sum(timeline.num_tokens for timeline in self.timelines)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class LoadDriver(Protocol):
    """Somebody who answers requests: an engine in this process, its worker, a server."""

    def run(self, requests: Sequence[LoadRequest], concurrency: int) -> ClosedLoopResult:
        """Raises ForedraftError where a request fails. `jobs` are at least as many as the streams."""

    def close(self) -> None:
        """No more will be asked."""


@dataclass(frozen=True)
class LoadWorkload:
    """The requests of every round."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int  # of a text on average; lengths lie between half and one and a half times that
    waves: float  # requests for every stream in a round
    min_requests: int  # requests of a round at least

    def make_requests(self, concurrency: int, number: int) -> list[LoadRequest]:
        """Those of round `number`; number -1 is the warm-up, of one wave."""
        count = max(self.min_requests, concurrency, round(concurrency * (self.waves if number >= 0 else 1)))
        first = number * count
        return [self._make_request(first + i) for i in range(count)]

    def count_kv_tokens(self, concurrency: int) -> int:
        """Tokens of KV memory without preemption: requests, drafts, and a prefix cache of half as much. More memory
        would only fill with prompts that are never sent again."""
        longest = max(map(len, self.prompts)) + round(1.5 * self.max_tokens) + EXTRA_TOKENS
        return round(1.5 * concurrency * longest) + EXTRA_TOKENS

    def _make_request(self, index: int) -> LoadRequest:
        # texts of one length would end, and prompts be read, all in the same step
        length = max(1, round(self.max_tokens * (0.5 + (index * GOLDEN_FRACTION) % 1)))
        return LoadRequest(self.prompts[index % len(self.prompts)], length)


@dataclass(frozen=True)
class LoadBudget:
    """How long to measure at one concurrency."""

    max_rounds: int  # at most
    min_rounds: int = 2  # rounds in any case
    max_seconds: float | None = None  # no round is begun that would probably end later, warm-up included


@dataclass(frozen=True)
class LoadCell:
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
    acceptance_length: float | None  # tokens for each pass and request, bonus included; None if unknown
    drafted: float | None  # tokens drafted for each pass and request


@dataclass(frozen=True)
class LoadPoint:
    """One concurrency, all modes."""

    concurrency: int
    cells: tuple[LoadCell, ...]
    best_fixed: str | None  # the fixed length with the highest ratio to off, which its luck is part of
    auto_over_best: float | None  # median over the rounds

    def find_cell(self, mode: str) -> LoadCell | None:
        return next((cell for cell in self.cells if cell.mode == mode), None)


def measure(
    drivers: Mapping[str, LoadDriver],
    workload: LoadWorkload,
    concurrency: int,
    budget: LoadBudget,
    on_progress: Callable[[str], None] = lambda _: None,
) -> LoadPoint:
    """Warm every mode up, then round after round. `drivers` holds OFF; other names are AUTO or a draft length."""
    began = time.perf_counter()
    names = list(drivers)
    for name in names:
        on_progress(f"{concurrency} streams, warming up {name}")
        drivers[name].run(workload.make_requests(concurrency, -1), concurrency)
    loops: dict[str, list[ClosedLoopResult]] = {name: [] for name in names}
    longest = 0.0
    for number in range(budget.max_rounds):
        start = time.perf_counter()
        if (
            budget.max_seconds is not None
            and number >= budget.min_rounds
            and start + longest > began + budget.max_seconds
        ):
            break
        jobs = workload.make_requests(concurrency, number)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            on_progress(f"{concurrency} streams, round {number + 1}, {name}")
            gc.collect()  # another mode's garbage is not this one's time
            loops[name].append(drivers[name].run(jobs, concurrency))
        longest = max(longest, time.perf_counter() - start)
    return build_point(concurrency, loops)


def build_point(concurrency: int, loops: Mapping[str, Sequence[ClosedLoopResult]]) -> LoadPoint:
    """The figures of all rounds at one concurrency."""
    speeds = {name: [loop.tokens_per_second for loop in rounds] for name, rounds in loops.items()}
    ratios = {name: _compute_ratios(rounds, speeds[OFF]) for name, rounds in speeds.items()}
    cells = tuple(_build_cell(concurrency, name, rounds, ratios[name]) for name, rounds in loops.items())
    fixed = {cell.mode: cell.over_off for cell in cells if cell.mode not in (OFF, AUTO)}
    best = max(fixed, key=lambda mode: fixed[mode]) if fixed else None
    over = (
        statistics.median(_compute_ratios(speeds[AUTO], speeds[best])) if best is not None and AUTO in speeds else None
    )
    return LoadPoint(concurrency, cells, best, over)


def _compute_ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    if not all(others):
        raise ForedraftError("no token came within a round; ask for more requests or longer texts")
    return [mine / other for mine, other in zip(speeds, others, strict=True)]


def _build_cell(concurrency: int, mode: str, loops: Sequence[ClosedLoopResult], ratios: Sequence[float]) -> LoadCell:
    timelines = [timeline for loop in loops for timeline in loop.timelines]
    firsts = [timeline.first_token_seconds for timeline in timelines if timeline.first_token_seconds is not None]
    gaps = [gap for timeline in timelines for gap in timeline.iter_gaps()]
    each = [(gap / count, count) for gap, count in gaps]
    stats = [timeline.stats for timeline in timelines if timeline.stats is not None]
    summed = sum_stats(stats) if stats else None
    return LoadCell(
        concurrency=concurrency,
        mode=mode,
        rounds=len(loops),
        requests=len(timelines),
        tokens=sum(loop.num_tokens for loop in loops),
        tokens_per_second=statistics.median(loop.tokens_per_second for loop in loops),
        over_off=statistics.median(ratios),
        over_off_rounds=tuple(ratios),
        first_p50=compute_quantile([(value, 1) for value in firsts], 0.5),
        first_p99=compute_quantile([(value, 1) for value in firsts], 0.99),
        gap_p50=compute_quantile([(gap, 1) for gap, _ in gaps], 0.5),
        gap_p99=compute_quantile([(gap, 1) for gap, _ in gaps], 0.99),
        token_p50=compute_quantile(each, 0.5),
        token_p99=compute_quantile(each, 0.99),
        acceptance_length=None if summed is None else summed.acceptance_length,
        drafted=None if summed is None else summed.num_drafted / max(1, summed.target_passes),
    )


def compute_quantile(weighted: Sequence[tuple[float, int]], share: float) -> float | None:
    """The smallest value that at least `share` of the weight does not exceed; None of nothing."""
    ordered = sorted(weighted)
    rest = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        rest -= weight
        if rest <= 0:
            return value
    return ordered[-1][0] if ordered else None
