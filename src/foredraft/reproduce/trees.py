"""Trees of 4 to 64 nodes against chains."""

from collections.abc import Sequence

from foredraft.bench.methods import PLAIN
from foredraft.bench.report import ReportTable
from foredraft.bench.verify_cost import VerifyCost, measure_costs
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.method_points import (
    MethodPoint,
    build_method_points,
    build_method_table,
    draw_series,
    find_best,
)
from foredraft.reproduce.workbench import GREEDY, SAMPLED, Workbench

NODES = (4, 8, 16, 32, 64)
DEPTHS = (("draft_model", 5), ("eagle3", 5), ("medusa", 4))  # built-in methods with the depth of their trees
COST_CONTEXT = 128  # tokens before the passes whose time is measured


def measure(bench: Workbench) -> Measurement:
    """Measure trees and the chain of the same depth beside a large target."""
    llm, nodes = bench.large_target, bench.choose(NODES, NODES[:2])
    methods = bench.choose(DEPTHS, DEPTHS[-1:])
    if bench.options.model is not None or bench.options.spec_model is not None:
        methods = ((bench.name_draft(), 5),)
    places = {f"{name}:{depth}": (name, float(depth)) for name, depth in methods}
    chains = set(places)
    places |= {f"{name}:{depth}:tree_nodes={n}": (name, float(n)) for name, depth in methods for n in nodes}
    generators = {PLAIN: llm} | {label: bench.add_drafter(llm, label) for label in places}
    prompts, tokens = bench.load_prompts(4), bench.choose(48, 12)
    points: list[MethodPoint] = []
    for mode in bench.choose((GREEDY, SAMPLED), (GREEDY,)):
        points += build_method_points(bench.run_rows(generators, mode, prompts, tokens), places, mode)
    rows = [1, *(n + 1 for n in nodes)]
    costs = measure_costs(llm, rows, COST_CONTEXT, repeats=bench.choose(10, 2))
    trees = [p for p in points if p.label not in chains]
    return Measurement(
        findings=(*_compare(points, chains), *_state_costs(costs)),
        notes=(
            bench.describe_target(llm),
            bench.describe_runs(prompts, tokens),
            "a tree has the depth of the chain; its nodes are the likeliest ones, at T = 1 sampled without replacement",
        ),
        tables=(_name_kinds(points, chains), _build_cost_table(costs)),
        panels=draw_series(trees, "nodes of the tree", nodes, has_log_x=True),
        data={"points": points, "costs": costs},
    )


def _name_kinds(points: Sequence[MethodPoint], chains: set[str]) -> ReportTable:
    """Build the table, with the kind of every draft before its nodes."""
    table = build_method_table(points, "nodes")
    kinds = ["chain" if p.label in chains else "tree" for p in points]
    rows = tuple((row[0], kind, *row[1:]) for row, kind in zip(table.rows, kinds, strict=True))
    header = ("method", "draft", *table.header[1:])
    return ReportTable(table.title, header, rows, table.num_name_columns + 1)


def _build_cost_table(costs: Sequence[VerifyCost]) -> ReportTable:
    rows = tuple((str(c.rows), f"{1000 * c.seconds:.1f}", f"{c.ratio:.2f}") for c in costs)
    return ReportTable("Cost of verification", ("tokens in one pass", "ms", "over one token"), rows)


def _compare(points: Sequence[MethodPoint], chains: set[str]) -> list[str]:
    sentences = []
    for series, mode in dict.fromkeys((p.series, p.mode) for p in points):
        group = [p for p in points if (p.series, p.mode) == (series, mode)]
        [chain] = [p for p in group if p.label in chains]
        trees = [p for p in group if p.label not in chains]
        best = find_best(trees, series, mode)
        sentences.append(
            f"{series}, {mode}: the chain accepts {chain.acceptance_length:.2f} tokens a pass ({chain.speed_up:.2f}x), "
            f"the fastest tree has {best.x:g} nodes and accepts {best.acceptance_length:.2f} ({best.speed_up:.2f}x), "
            f"the largest accepts {trees[-1].acceptance_length:.2f} ({trees[-1].speed_up:.2f}x)"
        )
    return sentences


def _state_costs(costs: Sequence[VerifyCost]) -> list[str]:
    last = costs[-1]
    return [f"A pass over {last.rows} tokens takes {last.ratio:.1f} times as long as one over a single token"]


CLAIM = Claim(
    name="trees",
    title="Token trees",
    statement="A tree of drafts accepts more tokens per pass than a chain; its size is worth what a pass costs",
    sources=(
        Source(
            "2401.10774",
            "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
            "Several candidates of each head are verified at once by tree attention",
        ),
        Source(
            "2406.16858",
            "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
            "A tree that follows the draft's confidence is 20 to 40 % faster than EAGLE's fixed tree",
        ),
        Source(
            "2305.09781",
            "SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and Verification",
            "Token trees give 1.5x to 2.8x over other systems for distributed and 2.6x to 3.5x for offloaded models",
        ),
    ),
    minutes=4,
    measure=measure,
)
