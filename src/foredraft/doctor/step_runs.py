"""Runs of an engine for some seconds, as step reports: waves of equally many requests that start together."""

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.doctor.measuring_policy import MeasuringPolicy
from foredraft.draft_length.policy import StepReport
from foredraft.llm import LLM
from foredraft.models.prompts import Prompt
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling

MIN_STEPS = 8  # decoding steps that are measured even if the time is over
MAX_SHORT_WAVES = 8  # waves of short outputs after which a run ends with fewer steps


@dataclass
class Wave:
    """Steps of requests that started together."""

    reports: list[StepReport]
    lengths: tuple[int, ...] = ()  # draft nodes granted by step, in turn
    is_complete: bool = False  # all its requests ended by themselves
    setup_seconds: float = 0.0  # of one request before its first step
    gap_seconds: float = 0.0  # between two steps: delivery of the text

    @property
    def num_start_steps(self) -> int:
        """Leading steps that read the prompts, at least one; the last of them gives the first tokens.

        The first step of an encoder-decoder model runs the encoder and has no prompt tokens.
        """
        return next((i for i, report in enumerate(self.reports) if i and not has_chunk(report)), len(self.reports))

    @property
    def start_seconds(self) -> float:
        """Seconds until the first tokens: the preparation of the request, and the steps that read the prompts."""
        return self.setup_seconds + sum(report.step_time for report in self.reports[: self.num_start_steps])

    @property
    def decode_reports(self) -> list[StepReport]:
        """Steps after the first, in which a drafter may read the prompt."""
        start = self.num_start_steps
        return [report for report in self.reports[start + 1 :] if not has_chunk(report)]


@dataclass
class StreamRuns:
    """Waves of one engine with one number of streams."""

    waves: list[Wave] = field(default_factory=list)
    next_prompt: int = 0  # index of the next wave's first prompt

    @property
    def output_tokens(self) -> float | None:
        """Mean output tokens of the complete waves of plain decoding; None without one."""
        lengths = [len(wave.reports) - wave.num_start_steps + 1 for wave in self.waves if wave.is_complete]
        return statistics.fmean(lengths) if lengths else None

    def list_reports_of(self, length: int) -> list[StepReport]:
        """List the decoding steps of the waves in which every draft had this length."""
        return [report for wave in self.waves if wave.lengths == (length,) for report in wave.decode_reports]

    @property
    def gap_seconds(self) -> float:
        """Median seconds between two steps."""
        return statistics.median(wave.gap_seconds for wave in self.waves)

    @property
    def draft_starts(self) -> list[float]:
        """Seconds of the first draft of each wave."""
        firsts = [wave.reports[wave.num_start_steps :] for wave in self.waves]
        return [reports[0].draft_time for reports in firsts if reports]

    @property
    def decode_reports(self) -> list[StepReport]:
        return [report for wave in self.waves for report in wave.decode_reports]


def make_private_options(count: int, num_speculative_tokens: int | None = None) -> list[RequestOptions]:
    """Return the options of `count` requests whose prompts are found in no prefix cache."""
    return [
        RequestOptions(num_speculative_tokens=num_speculative_tokens, salt=secrets.token_bytes(8)) for _ in range(count)
    ]


def has_chunk(report: StepReport) -> bool:
    """Return whether a step read more of a prompt than the last token of each request."""
    drafted = sum(outcome.num_drafted for outcome in report.outcomes)
    return report.num_pass_tokens > report.num_requests + drafted


def run_waves(
    llm: LLM,
    policy: MeasuringPolicy,
    runs: StreamRuns,
    prompts: Sequence[Prompt],
    num_streams: int,
    sampling: Sampling,
    seconds: float,
    lengths: Sequence[int] = (0,),
    is_cached: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run waves of `num_streams` requests for about `seconds`, at least for MIN_STEPS steps, and keep the steps.

    Args:
        llm: its engine has `policy` as the policy of draft lengths.
        policy: source of the reports.
        runs: where the waves are added.
        prompts: prompts, taken in turn.
        num_streams: requests of a wave.
        sampling: sampling of every request.
        seconds: time of the measurement. A wave is broken off at its end.
        lengths: draft nodes granted to every request, step by step in turn.
        is_cached: whether the prefix cache may serve prompts of earlier waves.
        clock: returns seconds.
    """
    end = clock() + seconds
    policy.take_reports()
    policy.set_lengths(lengths)
    num_waves, num_steps = 0, len(runs.decode_reports)
    while clock() < end or len(runs.decode_reports) < num_steps + MIN_STEPS:
        chosen = [prompts[(runs.next_prompt + i) % len(prompts)] for i in range(num_streams)]
        runs.next_prompt += num_streams
        is_over, start, first, num_first = False, clock(), 0.0, 0
        options = [RequestOptions()] * num_streams if is_cached else make_private_options(num_streams)
        for _ in llm.stream(chosen, sampling, options=options):
            if not first:
                first, num_first = clock(), len(policy.reports)
            if clock() >= end and len(Wave(policy.reports).decode_reports) >= MIN_STEPS:
                is_over = True
                break
        stop, reports = clock(), policy.take_reports()
        times = [report.step_time for report in reports]
        setup, rest = first - start - sum(times[:num_first]), stop - first - sum(times[num_first:])
        # A step with fewer requests than the wave, after the first has ended, measures another number of streams.
        kept = [report for report in reports if report.num_requests == num_streams or has_chunk(report)]
        runs.waves.append(
            Wave(kept, tuple(lengths), not is_over, setup / num_streams, rest / max(len(times) - num_first, 1))
        )
        num_waves += 1
        if is_over or (num_waves >= MAX_SHORT_WAVES and clock() >= end):  # the outputs may be too short for more steps
            return
