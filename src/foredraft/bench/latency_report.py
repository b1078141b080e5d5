"""`foredraft bench latency` from the loaded model to the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.bench import flatness, latency, methods, plot, report
from foredraft.bench.methods import PLAIN, Method
from foredraft.bench.questions import Question
from foredraft.errors import ForedraftError
from foredraft.sampling import Sampling
from foredraft.verify import LOSSY

if TYPE_CHECKING:
    from foredraft.llm import LLM

Step = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    methods: tuple[Method, ...]
    is_default: bool  # nobody asked for these methods: one that cannot be had is left out, and named
    questions: tuple[Question, ...]
    sampling: Sampling
    rounds: int
    spec_model: str | None = None
    quantization: str | None = None  # what the target was loaded with
    verify_rows: tuple[int, ...] = ()  # numbers of tokens in a target pass; () = not measured
    context: int = 256  # tokens before them


@dataclass
class Job:
    """One run."""

    plan: Plan
    llm: "LLM"
    step: Step
    skipped: dict[str, str] = field(default_factory=dict)
    rows: list[latency.Row] = field(default_factory=list)
    categories: dict[str, list[latency.Row]] = field(default_factory=dict)
    costs: list[flatness.Cost] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)

    def run(self) -> report.Report:
        plan = self.plan
        if plan.questions:
            if self.llm.tokenizer is None:
                raise ForedraftError(f"{self.llm.target.name} has no tokenizer; put tokenizer.json beside its weights")
            outcome = latency.measure(
                self._generators(), plan.questions, self.llm.tokenizer, self.llm.target.context_length, plan.sampling,
                plan.rounds, self.step,
            )  # fmt: skip
            self.rows, self.too_long = latency.rows(outcome, plan.sampling), outcome.too_long
            self.categories = latency.rows_by_category(outcome, plan.sampling)
        if plan.verify_rows:
            self.step("cost of verification")
            self.costs = flatness.costs(self.llm, plan.verify_rows, plan.context)
        return self._report()

    def draw(self, path: Path) -> None:
        plot.latency(self.rows, self.costs, "\n".join(self._notes()[:3]), path)

    def _generators(self) -> dict[str, "LLM"]:
        generators = {PLAIN: self.llm}
        for method in methods.with_models(self.plan.methods, self.llm.target.model.config, self.plan.spec_model):
            try:
                generators[method.label] = self.llm.with_drafter(dict(method.spec))
            except ForedraftError as error:
                if not self.plan.is_default:
                    raise
                self.skipped[method.label] = str(error)
        return generators

    @property
    def _weights(self) -> str:
        dtype = str(self.llm.target.model.dtype).removeprefix("torch.")
        return dtype if self.plan.quantization is None else f"{dtype} with {self.plan.quantization} weights"

    def _notes(self) -> list[str]:
        target = self.llm.target
        notes = [
            f"target {report.model_name(self.llm)}: {target.num_parameters / 1e6:.1f}M parameters, {self._weights}",
            *report.grown_notes(target.model.config),
            report.machine_note(report.machine()),
        ]
        if self.rows:
            notes.append(self._question_note())
        for name, reason in self.skipped.items():
            notes.append(f"{name} was left out: {reason}")
        if self.too_long:
            notes.append(
                f"{len(self.too_long)} of {len(self.plan.questions)} questions, or later turns, exceed the context"
            )
        lossy = sorted({row.verification for row in self.rows} & LOSSY)
        if lossy:
            notes.append(f"lossy rule {lossy[0]}: the texts are not the target's own")
        if any(row.identical is not None and row.identical < row.prompts for row in self.rows) and not lossy:
            notes.append(
                "a text that is not plain decoding's: where two tokens are equally likely within the rounding of the "
                "dtype, one pass over many tokens may round the other way; --dtype float64 tells"
            )
        if self.costs:
            notes.append(f"cost of verification: medians of passes after {self.plan.context} tokens")
        return notes

    def _question_note(self) -> str:
        s, plain = self.plan.sampling, self.rows[0]
        law = "greedy" if s.is_greedy else f"temperature {s.temperature}, top-p {s.top_p}, seed {s.seed}"
        rounds = f", median of {self.plan.rounds} rounds" if self.plan.rounds > 1 else ""
        return (
            f"{plain.prompts} prompts of up to {s.max_tokens} tokens each, {law}{rounds}; all methods in turn for "
            "every prompt; the speed-up is the median over prompts"
        )

    def _report(self) -> report.Report:
        tables = []
        if self.rows:
            tables += [speed_table(self.rows), category_table(self.categories), position_table(self.rows)]
        if self.costs:
            tables.append(cost_table(self.costs))
        data = {
            "model": report.model_facts(report.model_name(self.llm), self.llm.target.model.config, self._weights),
            "machine": report.machine(),
            "sampling": self.plan.sampling,
            "rounds": self.plan.rounds,
            "methods": self.rows,
            "categories": self.categories,
            "skipped": self.skipped,
            "too_long": self.too_long,
            "verify_cost": {"context": self.plan.context, "passes": self.costs} if self.costs else None,
        }
        return report.Report("Latency", tuple(self._notes()), tuple(t for t in tables if t.rows), data)


def speed_table(rows: Sequence[latency.Row]) -> report.Table:
    header = (
        "method", "tokens/s", "speed-up", "acceptance length", "acceptance rate", "drafting share", "target passes",
        "identical to plain",
    )  # fmt: skip
    cells = [
        (
            row.method, f"{row.tokens_per_second:.1f}", f"{row.speed_up:.2f}x", f"{row.acceptance_length:.2f}",
            f"{row.acceptance_rate:.2f}", report.percent(row.draft_share), str(row.target_passes), row.agreement,
        )
        for row in rows
    ]  # fmt: skip
    return report.Table("Speed", header, tuple(cells))


def category_table(categories: Mapping[str, Sequence[latency.Row]]) -> report.Table:
    """Speed-up and acceptance length of every method but plain decoding, by the questions' category."""
    methods = [row.method for row in next(iter(categories.values()), ()) if row.method != PLAIN]
    cells = [
        (name, str(rows[0].prompts), *(f"{row.speed_up:.2f}x ({row.acceptance_length:.2f})" for row in rows[1:]))
        for name, rows in categories.items()
        if methods
    ]
    return report.Table("Speed-up (acceptance length) by category", ("category", "prompts", *methods), tuple(cells))


def position_table(rows: Sequence[latency.Row]) -> report.Table:
    """Share of all drafts kept to each depth."""
    depth = max((len(row.per_position) for row in rows), default=0)
    cells = [
        (row.method, *report.positions(row.per_position), *["-"] * (depth - len(row.per_position)))
        for row in rows
        if row.per_position
    ]
    header = ("method", *(str(i + 1) for i in range(depth)))
    return report.Table("Drafts kept to each position", header, tuple(cells))


def cost_table(costs: Sequence[flatness.Cost]) -> report.Table:
    cells = [(str(c.rows), f"{1000 * c.seconds:.2f}", f"{c.ratio:.2f}") for c in costs]
    return report.Table("Cost of verification", ("tokens in one pass", "ms", "over one token"), tuple(cells))
