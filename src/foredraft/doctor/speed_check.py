"""Measured speed-up, to compare with the prediction: plain decoding and a drafter in turn on equal prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.doctor.measured_llm import MeasuredLLM
from foredraft.doctor.step_runs import make_private_options
from foredraft.models.prompts import Prompt
from foredraft.sampling.params import Sampling

MIN_SINGLE_ROUNDS = 2  # rounds with one stream at least
PROMPTS_PER_STREAM = 4


@dataclass(frozen=True)
class CheckedSpeed:
    """Measured speed with one number of streams, over all rounds."""

    num_streams: int
    plain_rate: float  # tokens per second of all streams
    rate: float
    rounds: int

    @property
    def speed_up(self) -> float:
        return self.rate / self.plain_rate


@dataclass
class SpeedTotals:
    """Sums over the rounds of one engine."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def check_speed(
    plain: MeasuredLLM,
    drafting: MeasuredLLM,
    length: int,
    prompts: Sequence[Prompt],
    num_streams: int,
    sampling: Sampling,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> CheckedSpeed:
    """Generate from the same prompts with both in turn, for about `seconds`, and compare tokens per second.

    A round has PROMPTS_PER_STREAM prompts for every stream. A request that ends is replaced by the next one; the round
    ends when there is none left, so that all of it has the same number of streams.

    Args:
        plain: plain decoding.
        drafting: the same target with a drafter.
        length: draft nodes per request and step.
        prompts: prompts, taken in turn.
        num_streams: requests at a time.
        sampling: sampling of every request.
        seconds: time of the measurement; one round runs at least, two with one stream.
        clock: returns seconds.
    """
    end, num_rounds, count = clock() + seconds, 0, num_streams * PROMPTS_PER_STREAM
    plain_totals, drafting_totals = SpeedTotals(), SpeedTotals()
    while num_rounds < (MIN_SINGLE_ROUNDS if num_streams == 1 else 1) or clock() < end:
        chosen = [prompts[(num_rounds * count + i) % len(prompts)] for i in range(count)]
        runs = [(plain_totals, plain, 0), (drafting_totals, drafting, length)]
        for totals, measured, nodes in runs if num_rounds % 2 else reversed(runs):
            start = clock()
            totals.tokens += _run_round(measured, chosen, num_streams, sampling, nodes)
            totals.seconds += clock() - start
        num_rounds += 1
    return CheckedSpeed(num_streams, plain_totals.rate, drafting_totals.rate, num_rounds)


def _run_round(
    measured: MeasuredLLM, prompts: Sequence[Prompt], num_streams: int, sampling: Sampling, nodes: int
) -> int:
    """Generate until fewer than `num_streams` requests are left. Returns the tokens."""
    measured.set_max_requests(num_streams)
    measured.policy.take_reports()
    num_left = len(prompts)
    for delta in measured.llm.stream(prompts, sampling, options=make_private_options(len(prompts), nodes)):
        num_left -= delta.finish_reason is not None
        if num_left < num_streams:
            break
    # The reports count whole steps; the deltas of the other requests in the last step are still unread.
    outcomes = [outcome for report in measured.policy.take_reports() for outcome in report.outcomes]
    return sum(1 + len(outcome.accepted_nodes) for outcome in outcomes)
