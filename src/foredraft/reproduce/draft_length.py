"""Speed-up and acceptance length by the draft length K."""

from collections.abc import Sequence

from foredraft.bench.plot import Curve, CurvePanel
from foredraft.reproduce.chain_points import ChainPoint, build_chain_table
from foredraft.reproduce.chain_runs import ALPHA_NOTE, run_chains
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.workbench import GREEDY, SAMPLED, Workbench

LENGTHS = tuple(range(1, 9))  # draft lengths K
NOISE = 0.1  # of the draft that is accepted often


def measure(bench: Workbench) -> Measurement:
    """Measure drafts of one to eight tokens beside a large target."""
    llm, lengths = bench.large_target, bench.choose(LENGTHS, LENGTHS[:2])
    modes = bench.choose((GREEDY, SAMPLED), (GREEDY,))
    runs = run_chains(bench, llm, _list_drafts(bench), lengths, modes, bench.name_draft())
    return Measurement(
        findings=tuple(_state_best(runs.points)),
        notes=(*runs.notes, ALPHA_NOTE),
        tables=(build_chain_table(runs.points),),
        panels=draw_lengths(runs.points),
        data={"points": runs.points},
    )


def _list_drafts(bench: Workbench) -> dict[str, str | None]:
    """List the drafts by title; None = --spec-model or the built-in one."""
    if bench.options.spec_model is not None:
        return {"given draft": None}
    if bench.options.model is not None:
        return {"draft": None}
    return {"built-in draft model": None, f"built-in target with noise {NOISE}": bench.find_noisy_target(NOISE)}


def _state_best(points: Sequence[ChainPoint]) -> list[str]:
    sentences = []
    for draft, mode in dict.fromkeys((p.draft, p.mode) for p in points):
        group = [p for p in points if (p.draft, p.mode) == (draft, mode)]
        best, expected = max(group, key=lambda p: p.speed_up), max(group, key=lambda p: p.formula)
        alpha = sum(p.alpha for p in group) / len(group)
        sentences.append(
            f"{draft}, {mode}: mean alpha {alpha:.2f}; the best length is K = {best.num_tokens} with "
            f"{best.speed_up:.2f}x, and K = {expected.num_tokens} by the formula"
        )
    return sentences


def draw_lengths(points: Sequence[ChainPoint]) -> tuple[CurvePanel, ...]:
    """Draw acceptance length and speed-up against K, with the formulas dashed."""
    ticks = tuple(sorted({p.num_tokens for p in points}))
    lengths, speeds = [], []
    for color, (draft, mode) in enumerate(dict.fromkeys((p.draft, p.mode) for p in points)):
        group = [p for p in points if (p.draft, p.mode) == (draft, mode)]
        x = tuple(float(p.num_tokens) for p in group)
        lengths += [
            Curve(f"{draft}, {mode}", x, tuple(p.acceptance_length for p in group), color),
            Curve("", x, tuple(p.expected_length for p in group), color, is_reference=True),
        ]
        speeds += [
            Curve("", x, tuple(p.speed_up for p in group), color),
            Curve("", x, tuple(p.formula for p in group), color, is_reference=True),
        ]
    label = "draft length K"
    return (
        CurvePanel("Acceptance length; dashed: the formula", label, "tokens per target pass", tuple(lengths), 1, ticks),
        CurvePanel("Speed-up; dashed: the formula", label, "over plain decoding", tuple(speeds), 1, ticks),
    )


CLAIM = Claim(
    name="draft_length",
    title="Draft length",
    statement="The best draft length increases with the acceptance rate, and the formula finds it",
    sources=(
        Source(
            "2211.17192",
            "Fast Inference from Transformers via Speculative Decoding",
            "The best K follows from alpha and c; a longer draft than that costs more than it yields",
        ),
    ),
    minutes=3,
    measure=measure,
)
