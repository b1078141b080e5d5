"""Adaptive draft lengths against fixed ones, by the number of concurrent requests."""

from collections.abc import Sequence
from dataclasses import replace

from foredraft.bench.load import AUTO, OFF, LoadPoint
from foredraft.bench.load_report import LoadBench, LoadBenchPlan, build_cell_table, build_ratio_table, format_mode
from foredraft.bench.plot import Curve, CurvePanel
from foredraft.llm import LLM, MemoryLimits
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.workbench import GREEDY, MODES, Workbench

STREAMS = (1, 2, 4, 8, 16)
FIXED = (1, 3, 5)  # draft lengths K
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32  # outputs: the mean


def measure(bench: Workbench) -> Measurement:
    """Measure throughput over plain decoding at several loads."""
    llm = bench.large_target
    plan = make_plan(bench, bench.choose(STREAMS, STREAMS[:2]), bench.choose(FIXED, FIXED[:1]))
    method = bench.name_draft()
    job = LoadBench(plan, prepare(llm, max(plan.concurrency)), bench.build_spec(llm, method), bench.on_progress)
    job.run()
    return Measurement(
        findings=tuple(_compare(job.points)),
        notes=(
            bench.describe_target(llm),
            f"drafts by {method}; {job.num_prompts} prompts of {PROMPT_TOKENS} tokens, outputs of "
            f"{plan.sampling.max_tokens // 2} to {3 * plan.sampling.max_tokens // 2} tokens, greedy; closed loop of "
            "concurrent streams, all modes in turn for the same requests",
        ),
        tables=(build_ratio_table(job.points), build_cell_table([c for p in job.points for c in p.cells])),
        panels=_draw(job.points),
        data={"points": job.points},
    )


def make_plan(bench: Workbench, streams: Sequence[int], fixed: Sequence[int]) -> LoadBenchPlan:
    """Make the plan of a closed loop at several numbers of streams."""
    tokens = bench.choose(OUTPUT_TOKENS, 8)
    return LoadBenchPlan(
        concurrency=tuple(streams), fixed=tuple(fixed), more=(), more_until=0, questions=tuple(bench.load_prompts(16)),
        sampling=replace(MODES[GREEDY], max_tokens=tokens), prompt_tokens=PROMPT_TOKENS, waves=1.5,
        least=bench.choose(3, 2), rounds=bench.choose(3, 1), minutes=bench.choose(3.5, None),
    )  # fmt: skip


def prepare(llm: LLM, streams: int) -> LLM:
    """Return an LLM on the same weights whose engines take this many requests at once."""
    other = llm.with_drafter(None)
    other.limits = MemoryLimits(max_batch=streams)
    return other


def _compare(points: Sequence[LoadPoint]) -> list[str]:
    sentences = []
    for point in points:
        adaptive = point.find_cell(AUTO)
        fixed = [cell for cell in point.cells if cell.mode not in (OFF, AUTO)]
        if adaptive is None or not fixed:
            continue
        worst, best = (choose(fixed, key=lambda cell: cell.over_off) for choose in (min, max))
        sentences.append(
            f"{point.concurrency} streams: adaptive {adaptive.over_off:.2f}x, best fixed {format_mode(best.mode)} "
            f"{best.over_off:.2f}x, worst fixed {format_mode(worst.mode)} {worst.over_off:.2f}x"
        )
    return sentences


def _draw(points: Sequence[LoadPoint]) -> tuple[CurvePanel, ...]:
    modes = [cell.mode for cell in points[0].cells if cell.mode != OFF]
    ticks = tuple(float(point.concurrency) for point in points)
    speeds, drafted = [], []
    for color, mode in enumerate(modes):
        cells = [cell for point in points if (cell := point.find_cell(mode)) is not None]
        label = "adaptive" if mode == AUTO else format_mode(mode)
        speeds.append(Curve(label, ticks, tuple(cell.over_off for cell in cells), color))
        drafted.append(Curve(label, ticks, tuple(cell.drafted or 0.0 for cell in cells), color))
    return (
        CurvePanel("Throughput by load", "streams", "over no speculation", tuple(speeds), 1, ticks, True),
        CurvePanel("Draft tokens by load", "streams", "draft tokens per pass", tuple(drafted), None, ticks, True),
    )


CLAIM = Claim(
    name="load",
    title="Draft length by load",
    statement="No fixed draft length is best at every load; an adaptive one falls with the load",
    sources=(
        Source(
            "2406.14066",
            "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
            "SmartSpec chooses the length of each request by goodput; up to 3.2x lower latency than without drafts",
        ),
    ),
    minutes=4,
    measure=measure,
)
