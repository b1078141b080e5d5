"""Report of a comparison: every mode of every program, Foredraft's leads, and the programs that could not run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foredraft import zoo
from foredraft.bench import compare, methods, plot, report
from foredraft.bench.methods import PLAIN, BenchMethod
from foredraft.bench.participants import FOREDRAFT, PeerPythons, iter_participants
from foredraft.bench.pass_limits import PassLimits, find_median_limits
from foredraft.bench.questions import Question
from foredraft.bench.stream_speeds import StreamSpeed, StreamsPlan
from foredraft.errors import ForedraftError
from foredraft.models.loading import load_tokenizer

MAX_CONTEXT = 4096  # tokens of KV memory that every program allocates at most, unless --verify-cost needs more
DTYPES = ("bfloat16", "float32")  # dtypes that all programs support


@dataclass(frozen=True)
class CompareBenchPlan:
    """Programs, methods and prompts of a comparison."""

    model: str | None  # folder of the target; None = the built-in target
    spec_model: str | None  # folder of the draft model; None = that of the built-in pair
    pythons: PeerPythons
    methods: tuple[BenchMethod, ...]
    questions: tuple[Question, ...]
    dtype: str
    threads: int
    max_tokens: int
    draft_tokens: int
    lookup: tuple[int, int]
    quantizations: tuple[str, ...]
    verify_rows: tuple[int, ...]  # tokens per pass to measure; () = not measured
    context: int  # tokens before the measured passes
    settings: dict[str, Any]  # arguments of Foredraft's LLM beyond the shared settings
    streams: StreamsPlan = field(default_factory=StreamsPlan)  # numbers of streams to measure


@dataclass(frozen=True)
class SpeedLead:
    """Speed of Foredraft over one program on the same weights: plain over plain, best mode over best mode."""

    program: str
    weights: str
    plain: float | None
    best: float
    our_best: str
    its_best: str


@dataclass
class CompareBench:
    """One run of `foredraft bench compare`, from the plan to the report."""

    plan: CompareBenchPlan
    on_progress: Callable[[str], None]

    def __post_init__(self) -> None:
        plan = self.plan
        if plan.dtype not in DTYPES:
            raise ForedraftError(f"a comparison takes --dtype {' or '.join(DTYPES)}, not {plan.dtype!r}")
        self.folder = Path(plan.model).expanduser() if plan.model else zoo.find_folder("target")
        file = self.folder / "config.json"
        if not file.exists():
            raise ForedraftError(f"{self.folder} is no model folder; a comparison takes a local --model")
        draft = plan.spec_model and Path(plan.spec_model).expanduser()
        if draft and not (draft / "config.json").exists():
            raise ForedraftError(f"{draft} is no model folder; a comparison takes a local --spec-model")
        self.config = _FolderConfig(json.loads(file.read_text(encoding="utf-8")))
        self.tokenizer = load_tokenizer(str(self.folder))
        if self.tokenizer is None:
            raise ForedraftError(f"{self.folder} has no tokenizer; put tokenizer.json beside its weights")

    def run(self) -> report.BenchReport:
        plan = self.plan
        length = choose_length(self.config.max_position_embeddings, plan.context, plan.verify_rows)
        if plan.max_tokens >= length:
            raise ForedraftError(f"--max-tokens {plan.max_tokens} does not fit the {length} tokens of the context")
        bench_methods = list(methods.attach_models(plan.methods, self.config, plan.spec_model, plan.model is None))
        with TemporaryDirectory(prefix="foredraft-bench-") as scratch:
            settings = compare.PeerSettings(
                str(self.folder), self._find_draft_model(), plan.dtype, plan.threads, length, scratch,
                plan.draft_tokens, plan.lookup, plan.max_tokens, plan.streams,
            )  # fmt: skip
            participants = [
                participant
                for participant in iter_participants(
                    plan.pythons, bench_methods, plan.dtype, plan.quantizations, plan.settings
                )
                # a process without plain decoding only answers questions
                if plan.questions or PLAIN in participant.modes
            ]
            self.comparison = compare.Comparison.from_participants(participants, settings, self.on_progress)
            self.comparison.run(plan.questions, self.tokenizer, plan.verify_rows, plan.context)
        self.rows = self.comparison.build_rows()
        return self._build_report()

    def _find_limits(self) -> dict[str, PassLimits]:
        """Return the limits of each program with packed weights, at the median speeds of the run."""
        return {label: find_median_limits(found) for label, found in self.comparison.limits.items()}

    def _find_draft_model(self) -> str | None:
        """Return the draft model of all programs: the given one, or that of the built-in pair."""
        spec = methods.find_draft_model("draft_model", self.config, self.plan.spec_model, self.plan.model is None)
        return None if spec is None else str(Path(spec).expanduser())

    def save_plot(self, path: Path) -> None:
        plot.save_comparison_plot(
            self.rows, self.comparison.costs, "\n".join(self._build_notes()[: report.NUM_CAPTION_NOTES]), path
        )

    @property
    def _model_name(self) -> str:
        return "built-in" if self.plan.model is None else self.folder.name

    def _build_notes(self) -> list[str]:
        plan, weights = self.plan, self.folder.glob("*.safetensors")
        size = sum(file.stat().st_size for file in weights)
        versions = "; ".join(self.comparison.versions.values())
        facts = report.describe_machine() | {"threads": plan.threads}
        notes = [
            f"target {self._model_name}: {size / 1e6:.0f} MB of weights, run in {plan.dtype}",
            *report.list_origin_notes(self.config),
            report.format_machine_note(facts),
            f"versions: {versions}",
            f"greedy, {plan.max_tokens} tokens each, end of text ignored; time includes the prompt; all "
            "programs in turn for every prompt, after a warm-up; 'over ours' is the median over prompts",
            f"draft lengths: {plan.draft_tokens} with a draft model, {plan.lookup[0]} by prompt lookup (matches of up "
            f"to {plan.lookup[1]} tokens), Foredraft's as named",
            f"every program is a process of its own with {report.format_count(plan.threads, 'thread')}, stopped "
            "(SIGSTOP) while it is not its turn, so that waiting threads take no time from the others",
        ]
        if self.comparison.too_long:
            notes.append(f"{len(self.comparison.too_long)} questions, or their later turns, exceed the context")
        if plan.verify_rows:
            notes.append(f"cost of verification: medians of passes after {plan.context} tokens")
        if self.comparison.limits:
            notes.append(
                "limits: medians of reads from memory and of products in a cache, measured between the prompts; a pass "
                "takes at least the time to read its weights, keys and values, and that of their multiplications; with "
                "streams in brackets how much of it is reached"
            )
        if plan.streams.counts:
            notes.append(
                f"streams: prompts of {plan.streams.prompt_tokens} random tokens that begin together, their time "
                f"included; medians over {plan.streams.rounds} rounds; in brackets Foredraft's throughput over that of "
                "the program, paired by round"
            )
            notes += [f"streams: {label} failed: {why}" for label, why in self.comparison.stream_failures.items()]
        return notes

    def _build_report(self) -> report.BenchReport:
        tables = [
            # without questions only what is missing
            build_result_table([row for row in self.rows if self.plan.questions or row.status != "ok"]),
            build_lead_table(compute_leads(self.rows)),
            build_limit_table(self._find_limits(), self.rows),
            build_cost_table(self.comparison.costs, self._find_limits(), self.plan.context),
            build_streams_table(
                self.comparison.stream_speeds, self._find_limits(), self.plan.streams, self.plan.max_tokens
            ),
        ]
        data = {
            "model": report.describe_model(self._model_name, self.config, self.plan.dtype),
            "machine": report.describe_machine() | {"threads": self.plan.threads},
            "versions": self.comparison.versions,
            "results": self.rows,
            "leads": compute_leads(self.rows),
            "verify_cost": {"context": self.plan.context, "passes": self.comparison.costs},
            "limits": self._find_limits(),
            "too_long": self.comparison.too_long,
            "streams": self.comparison.stream_speeds,
        }
        return report.BenchReport("Comparison", tuple(self._build_notes()), tuple(t for t in tables if t.rows), data)


class _FolderConfig:
    """Attributes of a config.json, as the configuration of a loaded model has them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.max_position_embeddings = MAX_CONTEXT
        self.__dict__.update(values)


def compute_leads(rows: Sequence[compare.ComparisonRow]) -> list[SpeedLead]:
    """Compute the lead of Foredraft over every program with results, for each group of weights."""
    result = []
    for group in dict.fromkeys(row.group for row in rows):
        by_program: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.group == group and row.tokens_per_second is not None:
                by_program.setdefault(row.program, {})[row.mode] = row.tokens_per_second
        our_speeds = by_program.pop(FOREDRAFT, {})
        for program, speeds in by_program.items() if our_speeds else ():
            our_best, its_best = max(our_speeds, key=our_speeds.__getitem__), max(speeds, key=speeds.__getitem__)
            plain = our_speeds[PLAIN] / speeds[PLAIN] if PLAIN in our_speeds and PLAIN in speeds else None
            result.append(SpeedLead(program, group, plain, our_speeds[our_best] / speeds[its_best], our_best, its_best))
    return result


def build_result_table(rows: Sequence[compare.ComparisonRow]) -> report.ReportTable:
    """Build the table of speeds, one row per mode of every program."""
    cells = []
    for row in rows:
        name = (row.program, row.mode, row.weights)
        if row.tokens_per_second is None:
            cells.append((*name, f"{row.status}: {row.reason}" if row.reason else "not run", "", "", ""))
            continue
        over = "-" if row.over_ours is None else f"{row.over_ours:.2f}x"
        length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        same = "-" if row.identical is None else f"{row.identical}/{row.prompts}"
        cells.append((*name, f"{row.tokens_per_second:.1f}", over, length, same))
    header = ("program", "mode", "weights", "tokens/s", "over our plain", "acceptance length", "texts of our plain")
    return report.ReportTable("Speed", header, tuple(cells), num_name_columns=3)


def build_lead_table(leads: Sequence[SpeedLead]) -> report.ReportTable:
    """Build the table of leads, one row per program and group of weights."""
    cells = [
        (
            lead.program, lead.weights, "-" if lead.plain is None else f"{lead.plain:.2f}x", f"{lead.best:.2f}x",
            lead.our_best, lead.its_best,
        )
        for lead in leads
    ]  # fmt: skip
    header = ("program", "weights", "plain over its plain", "our best over its best", "our best", "its best")
    return report.ReportTable("Foredraft over each program", header, tuple(cells), num_name_columns=2)


def build_limit_table(limits: dict[str, PassLimits], rows: Sequence[compare.ComparisonRow]) -> report.ReportTable:
    """Build the table of what memory permits: plain decoding reads all weights once for a token."""
    plain = {f"{row.program} ({row.weights})": row.tokens_per_second for row in rows if row.mode == PLAIN}
    cells = []
    for label, limit in limits.items():
        speed, most = plain.get(label), 1.0 / limit.byte_seconds
        reached = ("-", "-") if speed is None else (f"{speed:.1f}", f"{100 * speed / most:.0f} %")
        cells.append((
            label, f"{limit.weight_bytes / 1e6:.0f}", f"{limit.gigabytes_per_second:.1f}", f"{limit.gigaflops:.0f}",
            f"{most:.1f}", *reached,
        ))  # fmt: skip
    header = (
        "weights", "MB per pass", "memory, GB/s", "arithmetic, GFLOP/s", "plain by bytes, tokens/s", "measured",
        "reached",
    )  # fmt: skip
    return report.ReportTable("Limits of the machine", header, tuple(cells))


def build_cost_table(
    costs: dict[str, list[Any]], limits: dict[str, PassLimits], context: int = 0
) -> report.ReportTable:
    """Build the table of pass times in milliseconds, with the ratio to a pass over one token, and their limits.

    `context` is the number of tokens before the passes.
    """
    counts = sorted({cost.rows for passes in costs.values() for cost in passes})
    cells: list[tuple[str, ...]] = []
    for label, passes in costs.items():
        times = [f"{1000 * c.seconds:.1f} ms ({c.ratio:.2f}x)" for c in sorted(passes, key=lambda c: c.rows)]
        cells.append((label, *times))
        if label in limits:
            cells.append((f"limit of {label}", *(limits[label].describe(count, context) for count in counts)))
    return report.ReportTable(
        "Cost of verification", ("tokens in one pass", *(str(count) for count in counts)), tuple(cells)
    )


def build_streams_table(
    speeds: Sequence[StreamSpeed], limits: dict[str, PassLimits], streams: StreamsPlan, max_tokens: int
) -> report.ReportTable:
    """Build the table of throughputs with several streams: one row per program, and one below it for its limit."""
    counts = sorted({speed.streams for speed in speeds})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for speed in speeds:
        over = "" if speed.ours_over_it is None else f" ({speed.ours_over_it:.2f}x)"
        row = cells.setdefault((speed.program, speed.weights), {})
        row[speed.streams] = f"{speed.tokens_per_second:.1f}{over}"
        limit = limits.get(f"{speed.program} ({speed.weights})")
        if limit is not None:
            most = limit.compute_streams_speed(speed.streams, streams.prompt_tokens, max_tokens)
            limit_row = cells.setdefault((f"limit of {speed.program}", speed.weights), {})
            limit_row[speed.streams] = f"{most:.1f} ({100 * speed.tokens_per_second / most:.0f} %)"
    return report.ReportTable(
        "Plain decoding by streams, tokens/s",
        ("program", "weights", *(str(count) for count in counts)),
        tuple((*names, *(row.get(count, "-") for count in counts)) for names, row in cells.items()),
        num_name_columns=2,
    )


def choose_length(longest: int, context: int, verify_rows: Sequence[int]) -> int:
    """Choose the tokens of KV memory of every program.

    Args:
        longest: context of the model.
        context: tokens before the passes of --verify-cost.
        verify_rows: tokens of these passes; empty = none.

    Raises:
        ForedraftError: the model's context is too short for the passes.
    """
    timed = context + max(verify_rows) if verify_rows else 0
    if timed > longest:
        raise ForedraftError(f"--context {context} does not fit the {longest} tokens of the model's context")
    return min(longest, max(MAX_CONTEXT, timed))
