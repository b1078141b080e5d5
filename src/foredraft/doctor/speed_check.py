"""Measured speed-up, to compare with the prediction: plain decoding and a drafter in turn on equal prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.doctor.measured_llm import MeasuredLLM
from foredraft.doctor.step_runs import Wave, make_private_options
from foredraft.models.prompts import Prompt
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling

MIN_ROUNDS = 2


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
    """Sums over the rounds of one engine: until the first tokens, and after them."""

    start_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    num_waves: int = 0

    def add(self, wave: Wave) -> None:
        """Add a wave that ended with its first request."""
        self.num_waves += 1
        self.start_seconds += wave.start_seconds
        for report in wave.reports[wave.num_start_steps :]:
            self.decode_seconds += report.step_time
            self.decode_tokens += sum(1 + len(outcome.accepted_nodes) for outcome in report.outcomes)

    def compute_rate(self, num_streams: int, output_tokens: float) -> float:
        """Return tokens per second of requests of this length: the time until the first token, then the rest."""
        decoding = num_streams * (output_tokens - 1) * self.decode_seconds / max(self.decode_tokens, 1)
        return num_streams * output_tokens / (self.start_seconds / self.num_waves + decoding)


def check_speed(
    plain: MeasuredLLM,
    drafting: MeasuredLLM,
    length: int,
    prompts: Sequence[Prompt],
    num_streams: int,
    sampling: Sampling,
    output_tokens: float,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> CheckedSpeed:
    """Generate from the same prompts with both in turn, for about `seconds`, and compare tokens per second.

    Args:
        plain: plain decoding.
        drafting: the same target with a drafter.
        length: draft nodes per request and step.
        prompts: prompts, taken in turn.
        num_streams: requests at a time. A round ends when the first of them ends, so all of it has this number.
        sampling: sampling of every request.
        output_tokens: tokens of an output, over which the time until the first token is spread.
        seconds: time of the measurement; two rounds run at least.
        clock: returns seconds.
    """
    end, num_rounds = clock() + seconds, 0
    plain_totals, drafting_totals = SpeedTotals(), SpeedTotals()
    while num_rounds < MIN_ROUNDS or clock() < end:
        first = num_rounds * num_streams
        chosen = [prompts[(first + i) % len(prompts)] for i in range(num_streams)]
        runs = [(plain_totals, plain, 0), (drafting_totals, drafting, length)]
        for totals, measured, nodes in runs if num_rounds % 2 else reversed(runs):
            totals.add(_run_wave(measured, chosen, sampling, nodes))
        num_rounds += 1
    return CheckedSpeed(
        num_streams, plain_totals.compute_rate(num_streams, output_tokens),
        drafting_totals.compute_rate(num_streams, output_tokens), num_rounds,
    )  # fmt: skip


def _run_wave(measured: MeasuredLLM, prompts: Sequence[Prompt], sampling: Sampling, nodes: int) -> Wave:
    """Run requests that start together until the first of them ends."""
    options: list[RequestOptions] = make_private_options(len(prompts), nodes)
    measured.policy.take_reports()
    for delta in measured.llm.stream(prompts, sampling, options=options):
        if delta.finish_reason is not None:
            break
    return Wave(measured.policy.take_reports())
