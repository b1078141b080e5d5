"""Speed-up and acceptance length by the number of Medusa heads."""

from collections.abc import Sequence

from foredraft.bench.methods import PLAIN
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.method_points import (
    MethodPoint,
    build_method_points,
    build_method_table,
    draw_series,
    find_best,
)
from foredraft.reproduce.workbench import GREEDY, SAMPLED, Workbench

MAX_HEADS = 8
METHOD: str = "medusa"


def measure(bench: Workbench) -> Measurement:
    """Measure chains of one head after the other, beside the small target and beside the large one."""
    targets = {"built-in target": bench.built_in, "grown target": bench.grown}
    if bench.given is not None:
        targets = {"given target": bench.given}
    prompts, tokens = bench.load_prompts(6), bench.choose(48, 12)
    points: list[MethodPoint] = []
    for series, llm in targets.items():
        generators = _make_generators(bench, llm)
        places = {label: (series, float(label.rpartition(":")[2])) for label in generators if label != PLAIN}
        for mode in bench.choose((GREEDY, SAMPLED), (GREEDY,)):
            points += build_method_points(bench.run_rows(generators, mode, prompts, tokens), places, mode)
    return Measurement(
        findings=tuple(_state_best(points)),
        notes=(
            *(bench.describe_target(llm) for llm in targets.values()),
            bench.describe_runs(prompts, tokens),
            "a chain of one token per head; "
            + ("the heads of --heads" if bench.options.heads else "the heads are the built-in ones"),
        ),
        tables=(build_method_table(points, "heads"),),
        panels=draw_series(points, "heads", sorted({p.x for p in points})),
        data={"points": points},
    )


def _make_generators(bench: Workbench, llm: LLM) -> dict[str, LLM]:
    folder = bench.options.heads
    longest = bench.add_drafter(llm, f"{METHOD}:{MAX_HEADS}", model=folder).drafter
    if longest is None:
        raise ForedraftError("the heads draft nothing; give others with --heads")
    count = min(bench.choose(MAX_HEADS, 2), longest.spec.max_nodes)  # a chain has as many nodes as heads
    labels = [f"{METHOD}:{heads}" for heads in range(1, count + 1)]
    return {PLAIN: llm} | {label: bench.add_drafter(llm, label, model=folder) for label in labels}


def _state_best(points: Sequence[MethodPoint]) -> list[str]:
    sentences = []
    for series, mode in dict.fromkeys((p.series, p.mode) for p in points):
        group = [p for p in points if (p.series, p.mode) == (series, mode)]
        best, first, last = find_best(points, series, mode), group[0], group[-1]
        sentences.append(
            f"{series}, {mode}: {best.x:g} of {last.x:g} heads are fastest, {best.speed_up:.2f}x; the acceptance "
            f"length is {first.acceptance_length:.2f} with one head and {last.acceptance_length:.2f} with {last.x:g}"
        )
    return sentences


CLAIM = Claim(
    name="medusa_heads",
    title="Number of Medusa heads",
    statement="A few heads bring most of the gain; each further head is accepted less often",
    sources=(
        Source(
            "2401.10774",
            "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
            "Additional heads predict several later tokens in parallel; 2.2x to 3.6x",
        ),
        Source(
            "2404.19124",
            "Accelerating Production LLMs with Combined Token/Embedding Speculators",
            "Heads that also read the sampled tokens speed up production models by 2x to 3x",
        ),
    ),
    minutes=2,
    measure=measure,
    extra="heads",
)
