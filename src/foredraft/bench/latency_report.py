"""Run and report of `foredraft bench latency`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.bench import latency, methods, plot, report, verify_cost
from foredraft.bench.methods import PLAIN, BenchMethod
from foredraft.bench.pass_limits import LimitsMeter, PassLimits, format_limit
from foredraft.bench.questions import Question
from foredraft.errors import ForedraftError
from foredraft.sampling.params import Sampling
from foredraft.verification.registry import RULES

if TYPE_CHECKING:
    from foredraft.llm import LLM

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class LatencyBenchPlan:
    """Methods, prompts and settings of a latency measurement."""

    methods: tuple[BenchMethod, ...]
    is_default: bool  # True: default methods, of which unavailable ones are skipped and named in the notes
    questions: tuple[Question, ...]
    sampling: Sampling
    rounds: int  # repetitions of every prompt
    spec_model: str | None = None  # draft model or head for all methods
    quantization: str | None = None  # quantisation of the loaded target
    verify_rows: tuple[int, ...] = ()  # tokens per pass to measure; () = not measured
    context: int = 256  # tokens before the measured passes


@dataclass
class LatencyBench:
    """One run of `foredraft bench latency` on a loaded model."""

    plan: LatencyBenchPlan
    llm: "LLM"
    on_progress: ProgressCallback
    skipped: dict[str, str] = field(default_factory=dict)  # method label -> reason
    rows: list[latency.LatencyRow] = field(default_factory=list)
    categories: dict[str, list[latency.LatencyRow]] = field(default_factory=dict)
    costs: list[verify_cost.VerifyCost] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    limits: PassLimits | None = None  # None = nothing generated, or the target has no packed weights

    def run(self) -> report.BenchReport:
        plan = self.plan
        if plan.questions:
            if self.llm.tokenizer is None:
                raise ForedraftError(f"{self.llm.target.name} has no tokenizer; put tokenizer.json beside its weights")
            meter = LimitsMeter(self.llm.target)
            outcome = latency.measure(
                self._create_generators(), plan.questions, self.llm.tokenizer, self.llm.target.context_length,
                plan.sampling, plan.rounds, self.on_progress, meter=meter,
            )  # fmt: skip
            self.limits, self.too_long = meter.limits, outcome.too_long
            self.rows = latency.build_rows(outcome, plan.sampling, self.limits)
            self.categories = latency.build_category_rows(outcome, plan.sampling)
        if plan.verify_rows:
            self.on_progress("cost of verification")
            self.costs = verify_cost.measure_costs(self.llm, plan.verify_rows, plan.context)
        return self._build_report()

    def save_plot(self, path: Path) -> None:
        plot.save_latency_plot(self.rows, self.costs, "\n".join(self._build_notes()[: report.NUM_CAPTION_NOTES]), path)

    def _create_generators(self) -> dict[str, "LLM"]:
        generators = {PLAIN: self.llm}
        for method in methods.attach_models(self.plan.methods, self.llm.target.model.config, self.plan.spec_model):
            try:
                generators[method.label] = self.llm.with_drafter(dict(method.spec))
            except ForedraftError as error:
                if not self.plan.is_default:
                    raise
                self.skipped[method.label] = str(error)
        return generators

    @property
    def _weights_label(self) -> str:
        dtype = str(self.llm.target.model.dtype).removeprefix("torch.")
        return dtype if self.plan.quantization is None else f"{dtype} with {self.plan.quantization} weights"

    def _build_notes(self) -> list[str]:
        target = self.llm.target
        notes = [
            f"target {report.get_model_name(self.llm)}: {target.num_parameters / 1e6:.1f}M parameters, "
            f"{self._weights_label}",
            *report.list_origin_notes(target.model.config),
            report.format_machine_note(report.describe_machine()),
        ]
        if self.rows:
            notes.append(self._build_question_note())
        if self.limits is not None:
            notes.append(
                "limit, tokens/s: only the target's passes over output and drafts take time, at "
                f"{self.limits.describe_machine()}; in brackets how much of it is reached"
            )
        for name, reason in self.skipped.items():
            notes.append(f"{name} was left out: {reason}")
        if self.too_long:
            notes.append(
                f"{len(self.too_long)} of {len(self.plan.questions)} questions, or later turns, exceed the context"
            )
        lossless = {rule.name for rule in RULES.values() if rule.is_lossless}
        lossy = sorted({row.verification for row in self.rows} - lossless)
        if lossy:
            notes.append(f"lossy rule {lossy[0]}: the output does not follow the target's distribution")
        if self.rows and self.rows[0].identical is None:  # sampled without a seed: the rule depends on the drafter
            notes.append(f"verification: {self._describe_rules()}")
        if any(row.identical is not None and row.identical < row.prompts for row in self.rows) and not lossy:
            notes.append(
                "an output that differs from plain decoding: if two tokens are equally likely within the rounding of "
                "the dtype, a pass over several tokens may round the other way; check with --dtype float64"
            )
        if self.costs:
            notes.append(f"cost of verification: medians of passes after {self.plan.context} tokens")
        return notes

    def _describe_rules(self) -> str:
        """Return every rule of a drafter's run with its methods."""
        drafting = self.rows[1:] or self.rows
        rules = dict.fromkeys(row.verification for row in drafting)
        return "; ".join(
            f"{rule} ({', '.join(row.method for row in drafting if row.verification == rule)})" for rule in rules
        )

    def _build_question_note(self) -> str:
        s, plain = self.plan.sampling, self.rows[0]
        mode = "greedy" if s.is_greedy else f"temperature {s.temperature}, top-p {s.top_p}, seed {s.seed}"
        rounds = f", median of {self.plan.rounds} rounds" if self.plan.rounds > 1 else ""
        return (
            f"{plain.prompts} prompts of up to {s.max_tokens} tokens each, {mode}{rounds}; all methods in turn for "
            "every prompt; the speed-up is the median over prompts"
        )

    def _build_report(self) -> report.BenchReport:
        tables = []
        if self.rows:
            tables += [
                build_speed_table(self.rows),
                build_category_table(self.categories),
                build_position_table(self.rows),
            ]
        if self.costs:
            tables.append(build_cost_table(self.costs))
        data = {
            "model": report.describe_model(
                report.get_model_name(self.llm), self.llm.target.model.config, self._weights_label
            ),
            "machine": report.describe_machine(),
            "sampling": self.plan.sampling,
            "rounds": self.plan.rounds,
            "methods": self.rows,
            "categories": self.categories,
            "skipped": self.skipped,
            "too_long": self.too_long,
            "limits": self.limits,
            "verify_cost": {"context": self.plan.context, "passes": self.costs} if self.costs else None,
        }
        return report.BenchReport("Latency", tuple(self._build_notes()), tuple(t for t in tables if t.rows), data)


def build_speed_table(rows: Sequence[latency.LatencyRow]) -> report.ReportTable:
    """Build the table of speeds, one row per method."""
    header = (
        "method", "tokens/s", "limit", "speed-up", "acceptance length", "acceptance rate", "drafting share",
        "target passes", "identical to plain",
    )  # fmt: skip
    cells = [
        (
            row.method, f"{row.tokens_per_second:.1f}",
            format_limit(row.limit_tokens_per_second, row.tokens_per_second), f"{row.speed_up:.2f}x",
            f"{row.acceptance_length:.2f}",
            f"{row.acceptance_rate:.2f}", report.format_percent(row.draft_share), str(row.target_passes), row.agreement,
        )
        for row in rows
    ]  # fmt: skip
    return report.ReportTable("Speed", header, tuple(cells))


def build_category_table(categories: Mapping[str, Sequence[latency.LatencyRow]]) -> report.ReportTable:
    """Build the table of speed-ups and acceptance lengths, one row per category of questions."""
    methods = [row.method for row in next(iter(categories.values()), ()) if row.method != PLAIN]
    cells = [
        (name, str(rows[0].prompts), *(f"{row.speed_up:.2f}x ({row.acceptance_length:.2f})" for row in rows[1:]))
        for name, rows in categories.items()
        if methods
    ]
    return report.ReportTable(
        "Speed-up (acceptance length) by category", ("category", "prompts", *methods), tuple(cells)
    )


def build_position_table(rows: Sequence[latency.LatencyRow]) -> report.ReportTable:
    """Build the table of the share of drafts that are accepted up to each depth."""
    depth = max((len(row.per_position) for row in rows), default=0)
    cells = [
        (row.method, *report.format_rates(row.per_position), *["-"] * (depth - len(row.per_position)))
        for row in rows
        if row.per_position
    ]
    header = ("method", *(str(i + 1) for i in range(depth)))
    return report.ReportTable("Drafts accepted up to each position", header, tuple(cells))


def build_cost_table(costs: Sequence[verify_cost.VerifyCost]) -> report.ReportTable:
    """Build the table of pass times, one row per number of tokens in a pass."""
    cells = [(str(c.rows), f"{1000 * c.seconds:.2f}", f"{c.ratio:.2f}") for c in costs]
    return report.ReportTable("Cost of verification", ("tokens in one pass", "ms", "over one token"), tuple(cells))
