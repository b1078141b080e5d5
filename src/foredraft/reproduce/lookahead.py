"""Lookahead decoding by the size of its window."""

from collections.abc import Sequence

from foredraft.bench.methods import PLAIN
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.method_points import (
    MethodPoint,
    build_method_points,
    build_method_table,
    draw_series,
    find_best,
)
from foredraft.reproduce.workbench import GREEDY, SAMPLED, Workbench

METHOD: str = "lookahead"
WINDOWS = (1, 2, 3, 5, 8)  # columns W; as many n-grams are verified
NGRAM_SIZES = (3, 4)  # N
MODES = (GREEDY, SAMPLED)


def measure(bench: Workbench) -> Measurement:
    """Measure windows of several sizes beside a large target."""
    llm = bench.large_target
    places: dict[str, tuple[str, float]] = {}
    nodes: dict[str, int] = {}
    for size in bench.choose(NGRAM_SIZES, NGRAM_SIZES[:1]):
        for window in bench.choose(WINDOWS, WINDOWS[:2]):
            count = count_nodes(window, size, window)
            label = f"{METHOD}:{count}:window={window}:ngram_size={size}:guesses={window}"
            places[label], nodes[label] = (f"N = {size}", float(window)), count
    generators = {PLAIN: llm} | {label: bench.add_drafter(llm, label) for label in places}
    prompts, tokens = bench.load_prompts(4), bench.choose(48, 12)
    points: list[MethodPoint] = []
    for mode in bench.choose(MODES, MODES[:1]):
        points += build_method_points(bench.run_rows(generators, mode, prompts, tokens), places, mode)
    return Measurement(
        findings=tuple(_state_best(points, nodes)),
        notes=(
            bench.describe_target(llm),
            bench.describe_runs(prompts, tokens),
            "a window of W columns and n-grams of N tokens; W n-grams are verified, so the tree has "
            "2 W (N - 1) - 1 nodes",
            "n-grams of the prompt and of the output are in the pool too",
        ),
        tables=(build_method_table(points, "window"),),
        panels=draw_series(points, "window W", bench.choose(WINDOWS, WINDOWS[:2])),
        data={"points": points, "nodes": nodes},
    )


def count_nodes(window: int, ngram_size: int, guesses: int) -> int:
    """Count the nodes of the tree: W (N - 1) - 1 of the window and G (N - 1) of the n-grams."""
    return window * (ngram_size - 1) - 1 + guesses * (ngram_size - 1)


def _state_best(points: Sequence[MethodPoint], nodes: dict[str, int]) -> list[str]:
    sentences = []
    for series, mode in dict.fromkeys((p.series, p.mode) for p in points):
        best = find_best(points, series, mode)
        sentences.append(
            f"{series}, {mode}: W = {best.x:g} is fastest with {best.speed_up:.2f}x, {best.acceptance_length:.2f} "
            f"tokens a pass and {nodes[best.label]} nodes"
        )
    return sentences


CLAIM = Claim(
    name="lookahead",
    title="Lookahead decoding",
    statement="A window of guessed tokens makes n-grams to verify, without a draft model",
    sources=(
        Source(
            "2402.02057",
            "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
            "Up to 1.8x on MT-bench, and 4x on code completion with strong scaling on several GPUs",
        ),
    ),
    minutes=3,
    measure=measure,
)
