"""Measured speed-up, to compare with the prediction: plain decoding and a drafter in turn on equal prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.doctor.measured_llm import MeasuredLLM
from foredraft.models.prompts import Prompt
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling


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

    Args:
        plain: plain decoding.
        drafting: the same target with a drafter.
        length: draft nodes per request and step.
        prompts: prompts, taken in turn.
        num_streams: requests at a time. A round ends when the first of them ends, so all of it has this number.
        sampling: sampling of every request.
        seconds: time of the measurement; two rounds run at least.
        clock: returns seconds.
    """
    end, num_rounds = clock() + seconds, 0
    totals = {name: [0, 0.0] for name in ("plain", "drafting")}
    while num_rounds < 2 or clock() < end:
        first = num_rounds * num_streams
        chosen = [prompts[(first + i) % len(prompts)] for i in range(num_streams)]
        runs = [("plain", plain, 0), ("drafting", drafting, length)]
        for name, llm, nodes in runs if num_rounds % 2 else reversed(runs):
            tokens, elapsed = _time_round(llm, chosen, sampling, nodes, clock)
            totals[name][0] += tokens
            totals[name][1] += elapsed
        num_rounds += 1
    rates = {name: tokens / elapsed for name, (tokens, elapsed) in totals.items()}
    return CheckedSpeed(num_streams, rates["plain"], rates["drafting"], num_rounds)


def _time_round(
    measured: MeasuredLLM, prompts: Sequence[Prompt], sampling: Sampling, nodes: int, clock: Callable[[], float]
) -> tuple[int, float]:
    """Return tokens and seconds until the first request ends."""
    options = RequestOptions(num_speculative_tokens=nodes)
    measured.policy.take_reports()
    start = clock()
    for delta in measured.llm.stream(prompts, sampling, options=options):
        if delta.finish_reason is not None:
            break
    seconds = clock() - start
    # The reports count whole steps; the deltas of the other requests in the last step are still unread.
    outcomes = [outcome for report in measured.policy.take_reports() for outcome in report.outcomes]
    return sum(1 + len(outcome.accepted_nodes) for outcome in outcomes), seconds
