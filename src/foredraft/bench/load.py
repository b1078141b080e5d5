"""Throughput and latency under load, measured by a closed loop.

Every stream sends its next request when its last one has ended. In a round all modes answer the same requests, engines
of this process in turns of SLICE_SECONDS. Ratios are taken within a round, so that a slow second of the machine affects
all modes alike. A loop ends when a stream finds no request left, so all streams are busy while time counts. Requests
that still run are then aborted, and their later tokens do not count.
"""

import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from foredraft.bench.pass_limits import LimitsMeter, PassLimits
from foredraft.errors import ForedraftError
from foredraft.outputs import Stats, sum_stats

OFF, AUTO = "off", "auto"  # modes without drafts and with the adaptive draft length
EXTRA_TOKENS = 64  # KV slots of a request beyond its tokens: its draft and the unused end of its last page
GOLDEN_FRACTION = 0.6180339887498949  # any number of its multiples, modulo 1, is spread evenly
SLICE_SECONDS = 0.1  # after which the engine of another mode runs
LENGTH_RANGE = (0.5, 1.5)  # output lengths over their mean


@dataclass(frozen=True)
class LoadRequest:
    """One request, whose output always has `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class RequestTimeline:
    """Arrival times of the tokens of one request."""

    sent_at: float  # all times are seconds on the clock of the driver
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, new tokens), one per delta
    stats: Stats | None = None  # None if the server sends none; partial for an aborted request

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from sending to the first token; None without tokens."""
        return self.arrivals[0][0] - self.sent_at if self.arrivals else None

    def iter_gaps(self) -> Iterator[tuple[float, int]]:
        """Iterate over (seconds since the previous delta, tokens) of every delta but the first."""
        for (previous, _), (current, count) in pairwise(self.arrivals):
            yield current - previous, count


@dataclass(frozen=True)
class ClosedLoopResult:
    """Result of one closed loop, which ends when a stream finds no request left."""

    seconds: float
    timelines: tuple[RequestTimeline, ...]

    @property
    def num_tokens(self) -> int:
        return sum(timeline.num_tokens for timeline in self.timelines)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


SlicedLoop = Generator[None, None, ClosedLoopResult]  # a closed loop that stops now and then, so that others can run


class LoadDriver(Protocol):
    """Interface to an engine in this process, to its worker or to a server."""

    def run_slices(self, requests: Sequence[LoadRequest], concurrency: int) -> SlicedLoop:
        """Run one closed loop. It may stop after SLICE_SECONDS; the time until it goes on does not count.

        Args:
            requests: requests of the round, at least `concurrency`.
            concurrency: number of streams.

        Raises:
            ForedraftError: a request failed.
        """

    def close(self) -> None:
        """Release all resources; the driver is not used any more."""


@dataclass(frozen=True)
class LoadWorkload:
    """The requests of every round."""

    prompts: tuple[tuple[int, ...], ...]  # token ids
    max_tokens: int  # mean output length; lengths lie between 0.5 and 1.5 times the mean
    waves: float  # requests per stream and round
    min_requests: int  # minimum number of requests in a round

    def make_requests(self, concurrency: int, number: int) -> list[LoadRequest]:
        """Make the requests of round `number`; number -1 is the warm-up, with one request per stream."""
        count = max(self.min_requests, concurrency, round(concurrency * (self.waves if number >= 0 else 1)))
        first = number * count
        return [self._make_request(first + i) for i in range(count)]

    def count_kv_tokens(self, concurrency: int) -> int:
        """Count the KV slots that avoid preemption.

        The count covers requests and drafts, and half as much again for the prefix cache. More memory would only hold
        prompts that are never sent again.
        """
        longest = max(map(len, self.prompts)) + round(LENGTH_RANGE[1] * self.max_tokens) + EXTRA_TOKENS
        return round(1.5 * concurrency * longest) + EXTRA_TOKENS

    def _make_request(self, index: int) -> LoadRequest:
        # With equal lengths all requests would end, and all new prompts be computed, in the same step.
        length = max(1, round(self.max_tokens * (LENGTH_RANGE[0] + (index * GOLDEN_FRACTION) % 1)))
        return LoadRequest(self.prompts[index % len(self.prompts)], length)


@dataclass(frozen=True)
class LoadBudget:
    """Limits of the measurement at one concurrency."""

    max_rounds: int
    min_rounds: int = 2  # rounds even beyond max_seconds
    max_seconds: float | None = None  # warm-up included; a round that would probably end later is not started


@dataclass(frozen=True)
class LoadCell:
    """Figures of one mode at one concurrency. Latencies are None if no request got as far."""

    concurrency: int
    mode: str
    rounds: int
    requests: int  # over all rounds
    tokens: int  # output tokens over all rounds
    tokens_per_second: float  # median over the rounds
    over_off: float  # median over the rounds of (throughput / throughput of off)
    over_off_rounds: tuple[float, ...]  # the ratio of each round
    first_p50: float | None  # seconds to the first token
    first_p99: float | None
    gap_p50: float | None  # seconds between two deltas of a request; a delta may hold several tokens
    gap_p99: float | None
    token_p50: float | None  # seconds per token: gap over the tokens of its delta, weighted by these tokens
    token_p99: float | None
    acceptance_length: float | None  # tokens per pass and request, bonus token included; None if unknown
    drafted: float | None  # draft tokens per pass and request
    limit_tokens_per_second: float | None = None  # if only the target's passes over output and drafts took time


@dataclass(frozen=True)
class LoadPoint:
    """Figures of all modes at one concurrency."""

    concurrency: int
    cells: tuple[LoadCell, ...]
    best_fixed: str | None  # fixed draft length with the highest over_off; selection bias favours it
    auto_over_best: float | None  # median over the rounds of (throughput of auto / of best_fixed)

    def find_cell(self, mode: str) -> LoadCell | None:
        return next((cell for cell in self.cells if cell.mode == mode), None)


def measure(
    drivers: Mapping[str, LoadDriver],
    workload: LoadWorkload,
    concurrency: int,
    budget: LoadBudget,
    on_progress: Callable[[str], None] = lambda _: None,
    meter: LimitsMeter | None = None,
) -> LoadPoint:
    """Warm up all modes, then measure them round by round.

    Args:
        drivers: mode -> driver. OFF must be among the modes; others are AUTO or a draft length.
        workload: requests of the rounds.
        concurrency: number of streams.
        budget: limits on rounds and seconds.
        on_progress: called with a title before every loop.
        meter: measures the machine before every round. Default None = it is not measured.

    Raises:
        ForedraftError: a request failed, or a round had no tokens.
    """
    start = time.perf_counter()
    names = list(drivers)
    for name in names:
        on_progress(f"{concurrency} streams, warming up {name}")
        run_in_turns({name: drivers[name].run_slices(workload.make_requests(concurrency, -1), concurrency)})
    loops: dict[str, list[ClosedLoopResult]] = {name: [] for name in names}
    longest_round = 0.0
    for number in range(budget.max_rounds):
        round_start = time.perf_counter()
        if (
            budget.max_seconds is not None
            and number >= budget.min_rounds
            and round_start + longest_round > start + budget.max_seconds
        ):
            break
        requests = workload.make_requests(concurrency, number)
        shift = number % len(names)
        on_progress(f"{concurrency} streams, round {number + 1}")
        if meter is not None:
            meter.measure()
        gc.collect()  # garbage of the warm-up or of another round
        order = names[shift:] + names[:shift]
        results = run_in_turns({name: drivers[name].run_slices(requests, concurrency) for name in order})
        for name, result in results.items():
            loops[name].append(result)
        longest_round = max(longest_round, time.perf_counter() - round_start)
    return build_point(concurrency, loops, None if meter is None else meter.limits)


def run_in_turns(loops: Mapping[str, SlicedLoop]) -> dict[str, ClosedLoopResult]:
    """Run several closed loops, a slice of each in turn, and return their results."""
    results: dict[str, ClosedLoopResult] = {}
    while len(results) < len(loops):
        for name, loop in loops.items():
            if name not in results:
                try:
                    next(loop)
                except StopIteration as end:
                    results[name] = end.value
    return results


def build_point(
    concurrency: int, loops: Mapping[str, Sequence[ClosedLoopResult]], limits: PassLimits | None = None
) -> LoadPoint:
    """Compute the figures of all rounds at one concurrency.

    Args:
        concurrency: number of streams.
        loops: mode -> its loop of every round.
        limits: of the target on this machine. Default None = cells have no limit.
    """
    speeds = {name: [loop.tokens_per_second for loop in rounds] for name, rounds in loops.items()}
    ratios = {name: _compute_ratios(rounds, speeds[OFF]) for name, rounds in speeds.items()}
    cells = tuple(_build_cell(concurrency, name, rounds, ratios[name], limits) for name, rounds in loops.items())
    fixed = {cell.mode: cell.over_off for cell in cells if cell.mode not in (OFF, AUTO)}
    best = max(fixed, key=lambda mode: fixed[mode]) if fixed else None
    auto_over_best = (
        statistics.median(_compute_ratios(speeds[AUTO], speeds[best])) if best is not None and AUTO in speeds else None
    )
    return LoadPoint(concurrency, cells, best, auto_over_best)


def _compute_ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    if not all(others):
        raise ForedraftError("no token came within a round; raise the number of requests or --max-tokens")
    return [speed / other for speed, other in zip(speeds, others, strict=True)]


def _build_cell(
    concurrency: int,
    mode: str,
    loops: Sequence[ClosedLoopResult],
    ratios: Sequence[float],
    limits: PassLimits | None,
) -> LoadCell:
    timelines = [timeline for loop in loops for timeline in loop.timelines]
    first_seconds = [timeline.first_token_seconds for timeline in timelines if timeline.first_token_seconds is not None]
    gaps = [gap for timeline in timelines for gap in timeline.iter_gaps()]
    seconds_per_token = [(gap / count, count) for gap, count in gaps]
    stats = [timeline.stats for timeline in timelines if timeline.stats is not None]
    total_stats = sum_stats(stats) if stats else None
    limit = None if limits is None or total_stats is None else limits.compute_draft_speed(total_stats, concurrency)
    return LoadCell(
        concurrency=concurrency,
        mode=mode,
        rounds=len(loops),
        requests=len(timelines),
        tokens=sum(loop.num_tokens for loop in loops),
        tokens_per_second=statistics.median(loop.tokens_per_second for loop in loops),
        over_off=statistics.median(ratios),
        over_off_rounds=tuple(ratios),
        first_p50=compute_quantile([(value, 1) for value in first_seconds], 0.5),
        first_p99=compute_quantile([(value, 1) for value in first_seconds], 0.99),
        gap_p50=compute_quantile([(gap, 1) for gap, _ in gaps], 0.5),
        gap_p99=compute_quantile([(gap, 1) for gap, _ in gaps], 0.99),
        token_p50=compute_quantile(seconds_per_token, 0.5),
        token_p99=compute_quantile(seconds_per_token, 0.99),
        acceptance_length=None if total_stats is None else total_stats.acceptance_length,
        drafted=None if total_stats is None else total_stats.num_drafted / max(1, total_stats.target_passes),
        limit_tokens_per_second=limit,
    )


def compute_quantile(weighted: Sequence[tuple[float, int]], share: float) -> float | None:
    """Compute the smallest value that at least `share` of the weight does not exceed; None without values."""
    ordered = sorted(weighted)
    remaining = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        remaining -= weight
        if remaining <= 0:
            return value
    return ordered[-1][0] if ordered else None
