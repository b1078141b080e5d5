"""Latency against throughput of several drafters, by the number of streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foredraft.bench import load as closed_loop
from foredraft.bench.load import OFF, LoadBudget, LoadCell, LoadPoint
from foredraft.bench.load_drivers import EngineDriver
from foredraft.bench.load_report import LoadBench
from foredraft.bench.plot import Curve, CurvePanel
from foredraft.bench.report import ReportTable
from foredraft.llm import LLM
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.load import PROMPT_TOKENS, make_plan, prepare
from foredraft.reproduce.workbench import Workbench

STREAMS = (1, 2, 4, 8, 16)
MAX_ROUNDS, MAX_SECONDS = 2, 60.0  # of one number of streams
METHODS = ("medusa:1", "medusa:2", "medusa:3", "medusa:4", "mlp_speculator:3", "eagle3:3", "draft_model:3")


@dataclass(frozen=True)
class ServingPoint:
    """Figures of one drafter at one number of streams."""

    method: str
    streams: int
    tokens_per_second: float  # median over the rounds
    over_plain: float  # median over the rounds of the ratio of throughputs
    first_token_ms: float  # median time to the first token
    token_ms: float  # median time between tokens
    acceptance_length: float


def measure(bench: Workbench) -> Measurement:
    """Measure all drafters at all loads."""
    streams = bench.choose(STREAMS, STREAMS[:2])
    llm = bench.large_target
    labels = bench.choose(METHODS, METHODS[-2:])
    if bench.options.model is not None or bench.options.spec_model is not None:
        labels = tuple(f"{bench.name_draft()}:{length}" for length in bench.choose((1, 2, 3, 4), (1, 2)))
    points, num_prompts, tokens = _run(bench, llm, labels, streams)
    rows = [_build_point(cell) for point in points for cell in point.cells]
    return Measurement(
        findings=tuple(_state_best(rows)),
        notes=(
            bench.describe_target(llm),
            f"{num_prompts} prompts of {PROMPT_TOKENS} tokens, outputs of {tokens // 2} to {3 * tokens // 2} tokens, "
            "greedy; closed loop of concurrent streams, all drafters in turn for the same requests, medians",
            "NAME:K drafts K tokens at every load; medusa:K uses K heads",
            "time to the first token includes the prompts that other streams send at the same time",
        ),
        tables=(_build_table(rows),),
        panels=_draw(rows),
        data={"points": rows},
    )


def _run(bench: Workbench, llm: LLM, labels: Sequence[str], streams: Sequence[int]) -> tuple[list[LoadPoint], int, int]:
    """Run the closed loops. Returns the points, the number of prompts and the mean output length."""
    plan = make_plan(bench, streams, ())
    base = prepare(llm, max(streams))
    job = LoadBench(plan, base, {}, bench.on_progress)
    workload = job.build_workload()
    base.limits = replace(base.limits, kv_tokens=workload.count_kv_tokens(max(streams)))
    drivers = {OFF: EngineDriver(base.with_drafter(None), plan.sampling)}
    drivers |= {label: EngineDriver(bench.add_drafter(base, label), plan.sampling) for label in labels}
    budget = LoadBudget(min(plan.rounds, MAX_ROUNDS), 1, MAX_SECONDS)
    points = [closed_loop.measure(drivers, workload, count, budget, bench.on_progress) for count in streams]
    return points, job.num_prompts, plan.sampling.max_tokens


def _build_point(cell: LoadCell) -> ServingPoint:
    return ServingPoint(
        method="plain" if cell.mode == OFF else cell.mode,
        streams=cell.concurrency,
        tokens_per_second=cell.tokens_per_second,
        over_plain=cell.over_off,
        first_token_ms=1000 * (cell.first_p50 or 0.0),
        token_ms=1000 * (cell.token_p50 or 0.0),
        acceptance_length=cell.acceptance_length or 1.0,
    )


def _state_best(points: Sequence[ServingPoint]) -> list[str]:
    sentences = []
    for streams in dict.fromkeys(p.streams for p in points):
        group = [p for p in points if p.streams == streams]
        plain, best = group[0], max(group[1:], key=lambda p: p.over_plain)
        sentences.append(
            f"{streams} streams: {best.method} is the fastest drafter, {best.over_plain:.2f}x the throughput of plain "
            f"decoding, {best.token_ms:.0f} ms a token (plain {plain.token_ms:.0f} ms), first token after "
            f"{best.first_token_ms:.0f} ms (plain {plain.first_token_ms:.0f} ms)"
        )
    return sentences


def _build_table(points: Sequence[ServingPoint]) -> ReportTable:
    header = (
        "streams", "drafter", "tokens/s", "over plain", "first token, ms", "between tokens, ms", "acceptance length"
    )  # fmt: skip
    rows = tuple(
        (
            str(p.streams), p.method, f"{p.tokens_per_second:.1f}", f"{p.over_plain:.2f}x", f"{p.first_token_ms:.0f}",
            f"{p.token_ms:.1f}", f"{p.acceptance_length:.2f}",
        )
        for p in points
    )  # fmt: skip
    return ReportTable("Every drafter at every load", header, rows, num_name_columns=2)


def _draw(points: Sequence[ServingPoint]) -> tuple[CurvePanel, ...]:
    groups = {name: [p for p in points if p.method == name] for name in dict.fromkeys(p.method for p in points)}
    ticks = tuple(sorted({float(p.streams) for p in points}))
    between, first, over = [], [], []
    for color, (name, group) in enumerate(groups.items()):
        x = tuple(p.tokens_per_second for p in group)
        between.append(Curve(name, x, tuple(p.token_ms for p in group), color))
        first.append(Curve("", x, tuple(p.first_token_ms for p in group), color))
        over.append(Curve("", ticks, tuple(p.over_plain for p in group), color))
    return (
        CurvePanel("Between tokens", "throughput, tokens/s", "median ms", tuple(between)),
        CurvePanel("To the first token", "throughput, tokens/s", "median ms", tuple(first)),
        CurvePanel("Throughput by load", "streams", "over plain decoding", tuple(over), 1, ticks, True),
    )


CLAIM = Claim(
    name="serving",
    title="Drafters under load",
    statement="Drafters lower the time between tokens while few requests run; the gain falls with the load",
    sources=(
        Source(
            "2404.19124",
            "Accelerating Production LLMs with Combined Token/Embedding Speculators",
            "Speculators make production models 2x to 3x as fast; the gain depends on workload and parallelism",
        ),
    ),
    minutes=5,
    measure=measure,
)
