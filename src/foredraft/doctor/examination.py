"""The measurements of `foredraft doctor`, in rounds over plain decoding and all drafters.

The rounds alternate, so that a slow minute of the machine affects plain decoding and drafters alike. Acceptance and the
time until the first token come from single requests. Costs with several streams come from a few prompts in the prefix
cache: most of the time would go to reading prompts otherwise.

All drafts of a single request have the same length. After short drafts a long one is accepted more often than after
long ones, which have used up the text that is easy to draft.
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
NUM_SEARCH_ROUNDS = 2  # first rounds, which compare all lengths; the later ones measure the best lengths again
CURVE_SHARE = 0.1  # share of the measuring time for the cost curve of the target's pass
SINGLE_SHARE = 0.5  # share of an engine's time for single requests, which also measure the acceptance
PLAIN_WEIGHT = 1.0  # time of plain decoding over that of a drafter
NUM_SHARED_PROMPTS = 4  # prompts of the runs with several streams, which the prefix cache holds after their first use


@dataclass(frozen=True)
class DrafterResult:
    """Measured acceptance and costs of one drafter, and the predictions from them."""

    acceptance: MeasuredAcceptance  # over drafts of all lengths of single requests
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
    choices: dict[str, tuple[int, ...]] = field(default_factory=dict)  # draft lengths of the later rounds, by label

    def measure(self) -> None:
        """Measure the cost curve of the target, then all engines in rounds."""
        start = self.clock()
        engines = {"": self.plain} | self.drafting
        counts = sorted({1, *self.streams})
        self.runs = {(label, count): StreamRuns() for label in engines for count in counts}
        for label, engine in engines.items():  # the first steps allocate memory
            self.on_progress(f"warming up {label or 'plain decoding'}")
            lengths = engine.lengths[-1:] or (0,)
            run_waves(
                engine.llm, engine.policy, StreamRuns(), self.prompts, 1, self.sampling, 0.0, lengths, clock=self.clock
            )
        for number in range(NUM_ROUNDS):
            if number >= NUM_SEARCH_ROUNDS:
                self.choices = {label: self._choose_lengths(label) for label in self.drafting}
            self._measure_passes(CURVE_SHARE * self.seconds / NUM_ROUNDS)
            left = max(self.seconds - (self.clock() - start), 0.0) / (NUM_ROUNDS - number)
            total = sum(self._weigh(*key) for key in self.runs)
            for label, count in self.runs:
                self.on_progress(f"{label or 'plain decoding'}, {count} streams")
                self._run(label, engines[label], count, left * self._weigh(label, count) / total)

    def _choose_lengths(self, label: str) -> tuple[int, ...]:
        """Return the best lengths by the predictions so far, over all numbers of streams."""
        return tuple(sorted({prediction.length for prediction in self.evaluate(label).predictions}))

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
        """Run waves for some seconds. A single request keeps one length; costs with several streams may mix them."""
        lengths = self.choices.get(label) or engine.lengths or (0,)
        is_single = num_streams == 1
        prompts = self.prompts if is_single else self.prompts[:NUM_SHARED_PROMPTS]
        parts: Sequence[Sequence[int]] = [[length] for length in lengths] if is_single else [lengths]
        for granted in parts:
            run_waves(
                engine.llm, engine.policy, self.runs[label, num_streams], prompts, num_streams, self.sampling,
                seconds / len(parts), granted, not is_single, self.clock,
            )  # fmt: skip

    def evaluate(self, label: str) -> DrafterResult:
        """Fit the costs of a drafter and of plain decoding, and predict the speed."""
        lengths, kind = self.drafting[label].lengths, int(not self.sampling.is_greedy)
        reports = [r for (name, _), runs in self.runs.items() if name == label for r in runs.decode_reports]
        single, max_nodes = self.runs[label, 1], lengths[-1]
        by_length = {n: estimate_acceptance(single.list_reports_of(n), n, kind) for n in lengths}
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
        choices = self.choices.get(label, ())
        predictions = [predict_streams(one, by_length, self.output_tokens, choices) for one in costs.values()]
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
        return fit_costs(self.points, self.runs[label, num_streams], self.plain.llm.target.row_buckets)


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
