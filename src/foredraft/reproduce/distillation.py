"""Distilled draft model against one of the same shape that was trained without the target."""

from collections.abc import Sequence

from foredraft.reproduce.chain_points import ChainPoint, build_chain_table
from foredraft.reproduce.chain_runs import run_chains
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.draft_length import draw_lengths
from foredraft.reproduce.workbench import GREEDY, SAMPLED, Workbench

LENGTHS = (1, 2, 3, 4, 6)
DISTILLED, UNDISTILLED = "distilled", "undistilled"


def measure(bench: Workbench) -> Measurement:
    """Measure both drafts beside a large target. The runner checks that both are given."""
    llm, lengths = bench.large_target, bench.choose(LENGTHS, LENGTHS[:2])
    drafts = {DISTILLED: None, UNDISTILLED: bench.options.undistilled}
    runs = run_chains(bench, llm, drafts, lengths, (GREEDY, SAMPLED))
    return Measurement(
        findings=tuple(_compare(runs.points)),
        notes=(
            *runs.notes,
            "both drafts have one shape, one number of steps and the same data; the distilled one learned the "
            "target's distribution, the other one the next token of the text",
        ),
        tables=(build_chain_table(runs.points),),
        panels=draw_lengths(runs.points),
        data={"points": runs.points},
    )


def _compare(points: Sequence[ChainPoint]) -> list[str]:
    """State the gain of distillation for each mode, at the best length of each draft."""
    sentences = []
    for mode in dict.fromkeys(p.mode for p in points):
        best = {
            draft: max((p for p in points if (p.draft, p.mode) == (draft, mode)), key=lambda p: p.speed_up)
            for draft in (DISTILLED, UNDISTILLED)
        }
        ratio = best[DISTILLED].speed_up / best[UNDISTILLED].speed_up
        rates = [
            sum(group) / len(group)
            for draft in (DISTILLED, UNDISTILLED)
            if (group := [p.alpha for p in points if (p.draft, p.mode) == (draft, mode)])
        ]
        sentences.append(
            f"{mode}: mean alpha {rates[0]:.2f} distilled and {rates[1]:.2f} undistilled; at the best lengths the "
            f"distilled draft is {100 * (ratio - 1):+.0f} % in speed over the other "
            f"({best[DISTILLED].speed_up:.2f}x, {best[UNDISTILLED].speed_up:.2f}x)"
        )
    return sentences


CLAIM = Claim(
    name="distillation",
    title="Distilled drafts",
    statement="A draft model distilled from its target is accepted more often than one trained on text alone",
    sources=(
        Source(
            "2310.08461",
            "DistillSpec: Improving Speculative Decoding via Knowledge Distillation",
            "Distillation gives 10 to 45 % over standard speculative decoding, greedy and sampled",
        ),
    ),
    minutes=2,
    measure=measure,
    extra="undistilled",
    needs_extra=True,
    extra_help="a draft model trained without the target, as `foredraft zoo train --undistilled` writes one",
)
