"""Run and report of `foredraft bench load`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.bench import load, load_plot, report
from foredraft.bench.load import AUTO, OFF, LoadBudget, LoadCell, LoadDriver, LoadPoint, LoadWorkload
from foredraft.bench.load_drivers import EngineDriver, OpenAIEndpoint, WorkerDriver, fetch_model_name
from foredraft.bench.pass_limits import LimitsMeter, format_limit
from foredraft.bench.questions import PromptBuilder, Question
from foredraft.errors import ForedraftError
from foredraft.sampling.params import Sampling

if TYPE_CHECKING:
    from foredraft.llm import LLM

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class LoadBenchPlan:
    """Concurrency levels, modes and prompts of a load measurement."""

    concurrency: tuple[int, ...]
    fixed: tuple[int, ...]  # draft lengths measured at every concurrency
    more: tuple[int, ...]  # further draft lengths, measured at up to `more_until` streams as candidates for the best
    more_until: int
    questions: tuple[Question, ...]
    sampling: Sampling  # max_tokens is the mean output length
    prompt_tokens: int | None  # prompts are cut to their last `prompt_tokens` tokens
    waves: float  # requests per stream and round
    least: int  # minimum number of requests in a round
    rounds: int  # maximum number of rounds
    minutes: float | None  # limit of the whole run

    def list_modes(self, concurrency: int) -> list[str]:
        more = self.more if concurrency <= self.more_until else ()
        return [OFF, AUTO, *map(str, sorted({*self.fixed, *more}))]

    @property
    def all_modes(self) -> list[str]:
        return max((self.list_modes(count) for count in self.concurrency), key=len)


@dataclass
class LoadBench:
    """One run of `foredraft bench load`. Without `drivers` it measures engines in this process."""

    plan: LoadBenchPlan
    llm: "LLM"
    spec: dict[str, Any]  # drafter in the keys of vLLM's speculative_config, without a draft length
    on_progress: ProgressCallback
    driver_factory: Callable[["LLM", Sampling], LoadDriver] = EngineDriver
    drivers: Mapping[str, LoadDriver] | None = None  # mode -> driver
    origin: str = "the engine, stepped in the thread that measures"  # measured system, for the notes
    points: list[LoadPoint] = field(default_factory=list)
    num_prompts: int = 0
    machine_limits: list[str] = field(default_factory=list)  # speeds of the machine, by concurrency; empty = unknown

    def run(self) -> report.BenchReport:
        start = time.perf_counter()
        workload = self.build_workload()
        drivers = self.drivers or self._create_drivers(workload)
        try:
            self._measure(workload, drivers, start)
        finally:
            for driver in drivers.values():
                driver.close()
        return self._build_report(time.perf_counter() - start)

    def _measure(self, workload: LoadWorkload, drivers: Mapping[str, LoadDriver], start: float) -> None:
        plan = self.plan
        for index, concurrency in enumerate(plan.concurrency):
            seconds = None
            if plan.minutes is not None:
                remaining = 60 * plan.minutes - (time.perf_counter() - start)
                seconds = remaining / (len(plan.concurrency) - index)
            active_drivers = {name: drivers[name] for name in plan.list_modes(concurrency)}
            budget = LoadBudget(plan.rounds, max_seconds=seconds)
            meter = None if self.drivers else LimitsMeter(self.llm.target)  # a server may have another machine
            self.points.append(load.measure(active_drivers, workload, concurrency, budget, self.on_progress, meter))
            if meter is not None and meter.limits is not None:
                self.machine_limits.append(f"{concurrency} streams: {meter.limits.describe_machine()}")

    def with_workers(self) -> "LoadBench":
        """Return a copy that runs every engine on a worker thread, as a server does."""
        return replace(self, driver_factory=WorkerDriver, origin="an engine's worker, on a thread of its own")

    def with_server(self, url: str, api_key: str | None) -> "LoadBench":
        """Return a copy that measures a server.

        Args:
            url: base URL, which ends in /v1.
            api_key: bearer token, or None.

        Raises:
            ForedraftError: no server answers.
        """
        model = fetch_model_name(url, api_key)
        lengths = {OFF: 0, AUTO: None} | {mode: int(mode) for mode in self.plan.all_modes if mode not in (OFF, AUTO)}
        drivers = {
            mode: OpenAIEndpoint(url, model, self.plan.sampling, length, api_key).create_driver()
            for mode, length in lengths.items()
        }
        origin = f"the server of {model!r} over HTTP; its drafter observes tokens even if a request has no drafts"
        return replace(self, drivers=drivers, origin=origin)

    def save_plot(self, path: Path) -> None:
        load_plot.save_load_plot(
            [(self._title, self.points)], "\n".join(self._build_notes()[: report.NUM_CAPTION_NOTES]), path
        )

    def build_workload(self) -> LoadWorkload:
        """Build the requests of all rounds from the questions.

        Raises:
            ForedraftError: there is no tokenizer, or no prompt fits the context.
        """
        tokenizer, max_prompt_tokens = self.llm.tokenizer, self.plan.prompt_tokens
        if tokenizer is None:
            raise ForedraftError(f"{self.llm.target.name} has no tokenizer; put tokenizer.json beside its weights")
        encoded = [PromptBuilder(tokenizer).add_user_turn(question.turns[0]) for question in self.plan.questions]
        longest = self.llm.target.context_length - round(1.5 * self.plan.sampling.max_tokens) - 1
        prompts = [tuple(ids if max_prompt_tokens is None else ids[-max_prompt_tokens:]) for ids in encoded]
        fitting_prompts = tuple(ids for ids in prompts if len(ids) <= longest)
        if not fitting_prompts:
            raise ForedraftError(
                f"no prompt with an output of up to {1.5 * self.plan.sampling.max_tokens:.0f} tokens fits the model's "
                f"context of {self.llm.target.context_length}; lower --max-tokens or --prompt-tokens"
            )
        self.num_prompts = len(fitting_prompts)
        return LoadWorkload(fitting_prompts, self.plan.sampling.max_tokens, self.plan.waves, self.plan.least)

    def _create_drivers(self, workload: LoadWorkload) -> dict[str, LoadDriver]:
        """Create one engine per mode on the same weights; mode off has no drafter."""
        self.llm.limits = replace(self.llm.limits, kv_tokens=workload.count_kv_tokens(max(self.plan.concurrency)))
        drivers: dict[str, LoadDriver] = {}
        for mode in self.plan.all_modes:
            self.on_progress(f"preparing {mode}")
            if mode == OFF:
                llm = self.llm.with_drafter(None)
            elif mode == AUTO:
                llm = self.llm.with_drafter(dict(self.spec))
                llm.calibrate()  # as a server does before its first request
            else:
                llm = self.llm.with_drafter(dict(self.spec), int(mode))
            drivers[mode] = self.driver_factory(llm, self.plan.sampling)
        return drivers

    @property
    def _title(self) -> str:
        size = self.llm.target.num_parameters / 1e6
        return f"{report.get_model_name(self.llm)} ({size:.0f}M), {self.spec['method']}"

    def _build_notes(self) -> list[str]:
        target, plan = self.llm.target, self.plan
        dtype = str(target.model.dtype).removeprefix("torch.")
        s = plan.sampling
        mode = "greedy" if s.is_greedy else f"temperature {s.temperature}, top-p {s.top_p}, seed {s.seed}"
        cut = "" if plan.prompt_tokens is None else f", cut to their last {plan.prompt_tokens} tokens"
        return [
            f"target {report.get_model_name(self.llm)}: {target.num_parameters / 1e6:.1f}M parameters, {dtype}; "
            f"drafts by {self.spec['method']}",
            *report.list_origin_notes(target.model.config),
            report.format_machine_note(report.describe_machine()),
            f"{self.origin}; {report.format_count(self.num_prompts, 'prompt')}{cut}, outputs of "
            f"{0.5 * s.max_tokens:.0f} to {1.5 * s.max_tokens:.0f} tokens, {mode}",
            "closed loop: every stream sends its next request when the last has ended, all begin together, and time "
            "ends when a stream finds no request left; all modes for the same requests, engines of this process in "
            "turns of 0.1 s; medians over rounds of the ratios within a round",
            "TTFT: from sending to the first token; gap: between two deltas of a request, which may hold several "
            "tokens; per token: the gap over its tokens, weighted by them",
            "best fixed: the length with the highest median, which selection bias favours",
        ]

    def _build_report(self, seconds: float) -> report.BenchReport:
        cells = [cell for point in self.points for cell in point.cells]
        data = {
            "model": report.describe_model(
                report.get_model_name(self.llm), self.llm.target.model.config, str(self.llm.target.model.dtype)
            ),
            "machine": report.describe_machine(),
            "title": self._title,
            "spec": {name: str(value) for name, value in self.spec.items() if name != "model"},
            "sampling": self.plan.sampling,
            "origin": self.origin,
            "prompt_tokens": self.plan.prompt_tokens,
            "waves": self.plan.waves,
            "seconds": seconds,
            "points": self.points,
        }
        limit_note = "limit: only the target's passes over output and drafts take time, at the speeds of the machine"
        limit_notes = [limit_note, *self.machine_limits] if self.machine_limits else []
        notes = (*self._build_notes(), *limit_notes, f"the run took {seconds / 60:.1f} minutes")
        title = f"Load: {self._title}"
        return report.BenchReport(title, notes, (build_ratio_table(self.points), build_cell_table(cells)), data)


def build_ratio_table(points: Sequence[LoadPoint]) -> report.ReportTable:
    """Build the table of throughputs of all modes over mode off, one row per concurrency."""
    modes = list(dict.fromkeys(cell.mode for point in points for cell in point.cells if cell.mode != OFF))
    header = (
        "streams",
        "off, tokens/s",
        "limit of off",
        *(f"{format_mode(mode)} / off" for mode in modes),
        "best fixed",
        "auto / best fixed",
    )
    rows = []
    for point in points:
        cells = [point.find_cell(mode) for mode in modes]
        off = point.find_cell(OFF)
        over = point.auto_over_best
        rows.append(
            (
                str(point.concurrency),
                "-" if off is None else f"{off.tokens_per_second:.1f}",
                "-" if off is None else format_limit(off.limit_tokens_per_second, off.tokens_per_second),
                *("-" if cell is None else f"{cell.over_off:.2f}x" for cell in cells),
                "-" if point.best_fixed is None else format_mode(point.best_fixed),
                "-" if over is None else f"{over:.2f}x",
            )
        )
    return report.ReportTable("Throughput over no speculation", header, tuple(rows))


def build_cell_table(cells: Sequence[LoadCell]) -> report.ReportTable:
    """Build the table of all figures, one row per mode and concurrency."""
    header = (
        "streams", "mode", "tokens/s", "limit, tokens/s", "/ off", "lowest and highest round", "TTFT p50, ms", "p99",
        "gap p50, ms", "p99", "per token p50, ms", "p99", "acceptance length", "drafted a pass", "requests", "rounds",
    )  # fmt: skip
    rows = [
        (
            str(cell.concurrency), format_mode(cell.mode), f"{cell.tokens_per_second:.1f}",
            format_limit(cell.limit_tokens_per_second, cell.tokens_per_second), f"{cell.over_off:.2f}x",
            f"{min(cell.over_off_rounds):.2f} {max(cell.over_off_rounds):.2f}",
            *("-" if value is None else f"{1000 * value:.1f}" for value in (
                cell.first_p50, cell.first_p99, cell.gap_p50, cell.gap_p99, cell.token_p50, cell.token_p99
            )),
            "-" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
            "-" if cell.drafted is None else f"{cell.drafted:.2f}",
            str(cell.requests), str(cell.rounds),
        )
        for cell in cells
    ]  # fmt: skip
    return report.ReportTable("Every mode", header, tuple(rows), num_name_columns=2)


def format_mode(mode: str) -> str:
    """Format the name of a mode; a draft length K becomes "K = 4"."""
    return mode if mode in (OFF, AUTO) else f"K = {mode}"
