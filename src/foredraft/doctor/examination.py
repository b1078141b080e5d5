"""The measurements of `foredraft doctor`, in rounds over plain decoding and all drafters.

The rounds alternate, so that a slow minute of the machine affects plain decoding and drafters alike. Acceptance and the
time until the first token come from single requests. Costs with several streams come from a few prompts in the prefix
cache: most of the time would go to reading prompts otherwise.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.doctor.acceptance import MeasuredAcceptance, estimate_acceptance
from foredraft.doctor.cost_fit import FittedCosts, fit_costs
from foredraft.doctor.measured_llm import MeasuredLLM
from foredraft.doctor.prediction import StreamCosts, StreamPrediction, predict_streams
from foredraft.doctor.step_runs import StreamRuns, run_waves
from foredraft.models.prompts import Prompt
from foredraft.sampling.params import Sampling

NUM_ROUNDS = 5
CURVE_SHARE = 0.1  # share of the measuring time for the cost curve of the target's pass
SINGLE_SHARE = 0.5  # share of an engine's time for single requests, which also measure the acceptance
PLAIN_WEIGHT = 1.0  # time of plain decoding over that of a drafter
NUM_SHARED_PROMPTS = 4  # prompts of the runs with several streams, which the prefix cache holds after their first use


@dataclass(frozen=True)
class DrafterResult:
    """Measured acceptance and costs of one drafter, and the predictions from them."""

    acceptance: MeasuredAcceptance
    costs: dict[int, StreamCosts]  # by number of streams
    predictions: tuple[StreamPrediction, ...]
    draft_start: float  # seconds that the first draft of a request takes longer than later ones
    is_near_chance: bool  # over the drafts of all runs, too few first tokens were accepted for a drafter of this target


@dataclass
class Examination:
    """Runs of plain decoding and of the drafters of one target.

    Args:
        plain: plain decoding.
        drafting: the drafters, by label.
        prompts: prompts as token ids.
        sampling: sampling of all requests.
        streams: numbers of streams, rising.
        seconds: measuring time.
        on_progress: called with what is measured next.
        clock: returns seconds.
    """

    plain: MeasuredLLM
    drafting: dict[str, MeasuredLLM]
    prompts: Sequence[Prompt]
    sampling: Sampling
    streams: tuple[int, ...]
    seconds: float
    on_progress: Callable[[str], None]
    clock: Callable[[], float] = time.perf_counter
    points: list[tuple[int, float]] = field(default_factory=list)  # (rows, seconds) of the target's pass
    runs: dict[tuple[str, int], StreamRuns] = field(default_factory=dict)  # by label ("" = plain) and streams

    def measure(self) -> None:
        """Measure the cost curve of the target, then all engines in rounds."""
        start = self.clock()
        engines = {"": self.plain} | self.drafting
        counts = sorted({1, *self.streams})
        self.runs = {(label, count): StreamRuns() for label in engines for count in counts}
        for label, engine in engines.items():  # the first steps allocate memory
            self.on_progress(f"warming up {label or 'plain decoding'}")
            run_waves(engine.llm, engine.policy, StreamRuns(), self.prompts, 1, self.sampling, 0.0, False, self.clock)
        for number in range(NUM_ROUNDS):
            self._measure_passes(CURVE_SHARE * self.seconds / NUM_ROUNDS)
            left = max(self.seconds - (self.clock() - start), 0.0) / (NUM_ROUNDS - number)
            weights = {key: self._weigh(*key) for key in self.runs}
            total = sum(weights.values())
            for (label, count), weight in weights.items():
                self.on_progress(f"{label or 'plain decoding'}, {count} streams")
                self._run(label, engines[label], count, left * weight / total)

    def _measure_passes(self, seconds: float) -> None:
        """Measure the target's passes, and keep the fastest of all rounds: other programs only make a pass slower."""
        self.on_progress("cost of a pass")
        earlier = dict(self.points)
        self.points = [
            (rows, min(time_of_pass, earlier.get(rows, time_of_pass)))
            for rows, time_of_pass in self.plain.llm.calibrate(seconds)
        ] or self.points
        self.plain.llm.engine.length_policy = self.plain.policy  # `calibrate` replaces an adaptive one

    def _weigh(self, label: str, num_streams: int) -> float:
        several = [count for count in self.streams if count > 1]
        share = (SINGLE_SHARE if several else 1.0) if num_streams == 1 else (1.0 - SINGLE_SHARE) / len(several)
        return share if label else PLAIN_WEIGHT * share

    def _run(self, label: str, engine: MeasuredLLM, num_streams: int, seconds: float) -> None:
        is_cached, runs = num_streams > 1, self.runs[label, num_streams]
        prompts = self.prompts[:NUM_SHARED_PROMPTS] if is_cached else self.prompts
        run_waves(engine.llm, engine.policy, runs, prompts, num_streams, self.sampling, seconds, is_cached, self.clock)

    def evaluate(self, label: str) -> DrafterResult:
        """Fit the costs of a drafter and of plain decoding, and predict the speed."""
        max_nodes, kind = self.drafting[label].max_nodes, int(not self.sampling.is_greedy)
        reports = [r for (name, _), runs in self.runs.items() if name == label for r in runs.decode_reports]
        single = self.runs[label, 1]
        acceptance = estimate_acceptance(single.decode_reports, max_nodes, kind)
        is_near_chance = estimate_acceptance(reports, max_nodes, kind).is_near_chance
        draft_start = _measure_draft_start(single)
        plain_start, drafting_start = _measure_start(self.runs["", 1]), _measure_start(single) + draft_start
        costs = {
            count: StreamCosts(
                count,
                self._fit("", count),
                self._fit(label, count),
                plain_start,
                drafting_start,
            )
            for count in self.streams
        }
        predictions = [predict_streams(one, acceptance, max_nodes, self.output_tokens) for one in costs.values()]
        return DrafterResult(acceptance, costs, tuple(predictions), draft_start, is_near_chance)

    @property
    def output_tokens(self) -> float:
        """Mean output tokens of a request, over those that ended; the limit if none did."""
        measured = self.runs["", 1].output_tokens
        return float(self.sampling.max_tokens) if measured is None else max(measured, 2.0)

    def fit_plain(self) -> dict[int, float]:
        """Return the seconds of a step of plain decoding, by number of streams."""
        return {count: self._fit("", count).predict_plain(count) for label, count in self.runs if not label}

    def _fit(self, label: str, num_streams: int) -> FittedCosts:
        return fit_costs(self.points, self.runs[label, num_streams])


def _measure_start(runs: StreamRuns) -> float:
    """Return the median seconds until the first token of a request."""
    return statistics.median(wave.start_seconds for wave in runs.waves)


def _measure_draft_start(runs: StreamRuns) -> float:
    """Return the median seconds by which the first draft of a request takes longer than the others."""
    times = [report.draft_time for report in runs.decode_reports]
    if not times or not runs.draft_starts:
        return 0.0
    usual = statistics.median(times)
    return max(statistics.median(runs.draft_starts) - usual, 0.0)
