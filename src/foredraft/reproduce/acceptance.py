"""Acceptance rate against speed-up on a target whose passes are limited by memory."""

from collections.abc import Sequence
from itertools import pairwise

from foredraft import zoo
from foredraft.bench.plot import Curve, CurvePanel
from foredraft.reproduce.chain_points import (
    ChainPoint,
    build_chain_table,
    compute_formula,
    solve_alpha,
)
from foredraft.reproduce.chain_runs import ALPHA_NOTE, run_chains
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.workbench import GREEDY, NOISE_SIZES, SAMPLED, Workbench

LENGTHS = (3, 5)  # draft lengths K
GOAL, RATE = 2.0, 0.75  # speed-up, and the acceptance rate that is said to give it
NOISY_TITLE = "built-in target with noise"
DRAFT_TITLES = {"draft": "built-in draft model", "draft_2": "second built-in draft model"}


def measure(bench: Workbench) -> Measurement:
    """Measure drafts of graded quality beside the grown target."""
    llm, lengths = bench.grown, bench.choose(LENGTHS, LENGTHS[:1])
    runs = run_chains(bench, llm, _list_drafts(bench), lengths, bench.choose((GREEDY, SAMPLED), (GREEDY,)))
    points = runs.points
    return Measurement(
        findings=(*_state_goal(_select_noisy(points)), *_state_highest(points)),
        notes=(
            *runs.notes,
            "built-in target with noise s: the target before its growth, with normal noise on every matrix, of s times "
            "the standard deviation of the entries",
            ALPHA_NOTE,
        ),
        tables=(build_chain_table(points),),
        panels=_draw(points, lengths),
        data={"points": points},
    )


def _list_drafts(bench: Workbench) -> dict[str, str | None]:
    """List the folders of the drafts, by title."""
    built_in: dict[str, str | None] = {
        title: folder for name, title in DRAFT_TITLES.items() if (folder := zoo.find_installed(name)) is not None
    }
    sizes = bench.choose(NOISE_SIZES, NOISE_SIZES[1:2])
    return built_in | {f"{NOISY_TITLE} {size}": bench.find_noisy_target(size) for size in sizes}


def _state_goal(points: Sequence[ChainPoint]) -> list[str]:
    """State the acceptance rate at which the speed-up is GOAL, measured and by the formula."""
    sentences = []
    for mode, length in dict.fromkeys((p.mode, p.num_tokens) for p in points):
        group = sorted((p for p in points if (p.mode, p.num_tokens) == (mode, length)), key=lambda p: p.alpha)
        cost = sum(p.cost for p in group) / len(group)
        measured, expected = find_crossing(group, GOAL), solve_alpha(GOAL, length, cost)
        reached = (
            f"{GOAL:g}x is reached at alpha {measured:.2f}" if measured is not None else f"{GOAL:g}x is not reached"
        )
        formula = "at none" if expected is None else f"at alpha {expected:.2f}"
        at_rate = interpolate(group, RATE)
        at_text = "" if at_rate is None else f"; alpha {RATE:g} gives {at_rate:.2f}x"
        sentences.append(
            f"{mode}, K = {length}, drafts with noise: {reached}, by the formula with their mean c of {cost:.2f} "
            f"{formula}{at_text} ({compute_formula(RATE, length, cost):.2f}x by the formula)"
        )
    return sentences


def _state_highest(points: Sequence[ChainPoint]) -> list[str]:
    best = max(points, key=lambda p: p.speed_up)
    return [
        f"The highest speed-up is {best.speed_up:.2f}x, at alpha {best.alpha:.2f} with K = {best.num_tokens} "
        f"({best.mode}; formula {best.formula:.2f}x)"
    ]


def _select_noisy(points: Sequence[ChainPoint]) -> list[ChainPoint]:
    """Select the points of one network at several sizes of noise: their c is the same."""
    return [p for p in points if p.draft.startswith(NOISY_TITLE)]


def interpolate(points: Sequence[ChainPoint], alpha: float) -> float | None:
    """Return the speed-up at an acceptance rate on the straight line between two points; None outside of them."""
    for below, above in pairwise(points):
        if below.alpha <= alpha <= above.alpha:
            share = 0.0 if above.alpha == below.alpha else (alpha - below.alpha) / (above.alpha - below.alpha)
            return below.speed_up + share * (above.speed_up - below.speed_up)
    return None


def find_crossing(points: Sequence[ChainPoint], speed_up: float) -> float | None:
    """Find the acceptance rate at which the speed-up is reached, on the straight line between two points.

    Args:
        points: points in the order of their acceptance rates.
        speed_up: value to reach.

    Returns:
        The lowest such rate; None if no point reaches the value.
    """
    for below, above in zip([None, *points], points, strict=False):
        if above.speed_up >= speed_up:
            if below is None:
                return above.alpha
            share = (speed_up - below.speed_up) / (above.speed_up - below.speed_up)
            return below.alpha + share * (above.alpha - below.alpha)
    return None


def _draw(points: Sequence[ChainPoint], lengths: Sequence[int]) -> tuple[CurvePanel, ...]:
    panels, noisy = [], _select_noisy(points)
    for mode in dict.fromkeys(p.mode for p in points):
        curves = []
        others = [p for p in points if p.mode == mode and p not in noisy]
        for color, length in enumerate(lengths):
            group = sorted((p for p in noisy if (p.mode, p.num_tokens) == (mode, length)), key=lambda p: p.alpha)
            cost = sum(p.cost for p in group) / len(group)
            alphas = tuple(i / 50 for i in range(50))
            formula = tuple(compute_formula(alpha, length, cost) for alpha in alphas)
            measured = tuple(p.alpha for p in group), tuple(p.speed_up for p in group)
            curves.append(Curve(f"target with noise, K = {length}", *measured, color))
            curves.append(Curve(f"formula, K = {length}, c = {cost:.2f}", alphas, formula, color, is_reference=True))
        built_in = tuple(p.alpha for p in others), tuple(p.speed_up for p in others)
        curves.append(Curve("built-in draft models", *built_in, len(lengths), is_scatter=True))
        curves.append(Curve(f"alpha {RATE:g}, {GOAL:g}x", (RATE,), (GOAL,), len(lengths) + 1, is_scatter=True))
        title = f"Speed-up by acceptance rate, {mode}"
        panels.append(CurvePanel(title, "acceptance rate alpha", "over plain decoding", tuple(curves), baseline=1))
    return tuple(panels)


CLAIM = Claim(
    name="acceptance",
    title="Acceptance rate and speed-up",
    statement="The acceptance rate and the cost of the draft determine the speed-up; by a rule of thumb 75 % give 2x",
    sources=(
        Source(
            "2211.17192",
            "Fast Inference from Transformers via Speculative Decoding",
            "The expected speed-up is (1 - a^(K+1)) / ((1 - a)(Kc + 1)); T5-XXL becomes 2x to 3x as fast",
        ),
    ),
    minutes=4,
    measure=measure,
    fixed_models="its drafts of graded quality are the built-in target with noise",
)
