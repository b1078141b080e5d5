"""Runs of chains of several drafts and lengths beside one target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foredraft.bench.methods import PLAIN
from foredraft.llm import LLM
from foredraft.reproduce.chain_points import ChainPoint, build_points, make_chains
from foredraft.reproduce.workbench import Workbench

NUM_PROMPTS = 4
TOKENS, QUICK_TOKENS = 48, 12
ALPHA_NOTE = "alpha: accepted over verified draft tokens; c: time of a draft pass over that of a target pass"


@dataclass(frozen=True)
class ChainRuns:
    """Points of every draft, length and mode, with the notes on target and prompts."""

    points: tuple[ChainPoint, ...]
    notes: tuple[str, ...]


def run_chains(
    bench: Workbench,
    llm: LLM,
    drafts: Mapping[str, str | None],
    lengths: Sequence[int],
    modes: Sequence[str],
    method: str = "draft_model",
) -> ChainRuns:
    """Measure every draft with every length in turn.

    Args:
        bench: models and sizes.
        llm: target.
        drafts: title -> folder of a draft model or head; None = --spec-model, else the built-in one.
        lengths: draft lengths K.
        modes: GREEDY, SAMPLED or both.
        method: method of the drafts.
    """
    chains = make_chains(list(drafts), lengths)
    generators = {PLAIN: llm} | {
        label: bench.add_drafter(llm, f"{method}:{length}", model=drafts[draft])
        for label, (draft, length) in chains.items()
    }
    prompts, tokens = bench.load_prompts(NUM_PROMPTS), bench.choose(TOKENS, QUICK_TOKENS)
    points: list[ChainPoint] = []
    for mode in modes:
        points += build_points(bench.run(generators, mode, prompts, tokens), chains, mode)
    return ChainRuns(tuple(points), (bench.describe_target(llm), bench.describe_runs(prompts, tokens)))
