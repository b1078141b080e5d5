"""The built-in target's drafting heads: what `foredraft train` makes of the recipes below."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foredraft.llm import LLM
from foredraft.train.config import DataConfig, EvaluationConfig, OptimizationConfig, TrainPlan
from foredraft.train.replay import REGIMES, Recording, Replay, ReplayMetrics
from foredraft.train.run import train
from foredraft.zoo.corpus import make_held_out_prompts
from foredraft.zoo.generated import CORPUS_TOKENS, NUM_DOCUMENTS, write_texts
from foredraft.zoo.measure import MAX_DRAFT_TOKENS

LogLine = Callable[[str], None]
PartProgressCallback = Callable[[str, int, int, float], None]  # part, step, steps, loss
TEXTS_FILE = "texts.npy"
MAX_NEW_TOKENS = 128  # tokens after a prompt, for the card


@dataclass(frozen=True)
class HeadRecipe:
    """One `foredraft train`. Every step reads 2,048 tokens."""

    method: str
    steps: int
    settings: dict[str, str] = field(default_factory=dict)
    learning_rate: float = 2e-3
    optimizer: str = "muon"


HEAD_RECIPES = (
    # without output matrices of their own: they would be nine tenths of its size
    HeadRecipe("medusa", 450, {"own_head": "false", "layers": "2"}),
    HeadRecipe("mlp_speculator", 1000, {"inner": "192"}),
    HeadRecipe("blockwise", 900, {"heads": "3", "inner": "192", "decay": "0.8"}),
    HeadRecipe("hydra", 900, {"heads": "3", "own_head": "false", "rank": "320"}),
    HeadRecipe("early_exit", 300, {"exit_layer": "4"}, learning_rate=0.04),
    HeadRecipe("eagle", 850, {"steps": "2"}),
    HeadRecipe("eagle3", 850, {"steps": "4"}),
    HeadRecipe("chimera", 350, {"heads": "2", "intermediate": "224", "steps": "4"}),
)


@dataclass(frozen=True)
class HeadsPlan:
    """All of them, and what they learn from."""

    recipes: tuple[HeadRecipe, ...] = HEAD_RECIPES
    documents: int = NUM_DOCUMENTS  # that the target writes
    corpus_tokens: int = CORPUS_TOKENS
    prompts: int = 50  # for the figures on the card...
    tokens: int = MAX_NEW_TOKENS  # ... and what is written after each


ALL_HEADS = HeadsPlan()


def train_heads(
    out: Path,
    device: str,
    train_ids: np.ndarray,
    report: PartProgressCallback,
    log_line: LogLine,
    heads: HeadsPlan = ALL_HEADS,
) -> None:
    """Every head below `out`, beside the target that is there. A finished one is kept, a stopped one goes on."""
    texts, held = out / TEXTS_FILE, out / "held.npy"
    if not texts.exists():
        log_line("the target writes texts to learn from")
        write_texts(
            LLM(out / "target", None, dtype="bfloat16", device=device),
            train_ids,
            texts,
            heads.documents,
            heads.corpus_tokens,
        )
    for head in heads.recipes:
        folder = out / head.method
        if (folder / "README.md").exists():
            continue
        train(
            _make_plan(head, out, texts, held, device),
            log_line,
            lambda now, part=head.method: report(part, now.step, now.steps, now.loss),  # type: ignore[misc]
        )
        _remove_target_path(folder / "config.json")
        llm = LLM(out / "target", None, dtype="bfloat16", device=device)
        (folder / "README.md").write_text(
            render_card(head, measure_head(llm, head.method, folder, heads.prompts, heads.tokens))
        )


def measure_head(
    llm: LLM, method: str, folder: Path, prompts: int, tokens: int = MAX_NEW_TOKENS
) -> dict[str, list[float]]:
    """Acceptance lengths of chains of 1, 2, ... tokens by regime, replayed after held-out prompts."""
    assert llm.tokenizer is not None
    asked = [llm.tokenizer(text).input_ids for text in make_held_out_prompts(prompts)]
    found: dict[str, list[float]] = {}
    for regime, temperature in REGIMES.items():
        recording = Recording.make(llm, asked, temperature, tokens)
        lengths = found[regime] = []
        for depth in range(1, MAX_DRAFT_TOKENS + 1):
            drafting = llm.with_drafter({"method": method, "model": str(folder), "num_speculative_tokens": depth})
            assert drafting.drafter is not None
            if drafting.drafter.max_nodes < depth:
                break  # it has no more heads
            lengths.append(ReplayMetrics.from_stats(Replay(drafting, recording).run()).acceptance_length)
    return found


def _remove_target_path(config: Path) -> None:
    """The target's folder of today is none of a shipped head's business."""
    values = json.loads(config.read_text())
    values.pop("base_model_name_or_path", None)
    values.pop("foredraft_target", None)
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _make_plan(head: HeadRecipe, out: Path, texts: Path, held: Path, device: str) -> TrainPlan:
    return TrainPlan(
        method=head.method,
        model=str(out / "target"),
        out=out / head.method,
        data=DataConfig((str(texts),), (str(held),)),
        steps=OptimizationConfig(steps=head.steps, learning_rate=head.learning_rate, optimizer=head.optimizer),
        evaluation=EvaluationConfig(prompts=0),  # the card's figures are measured after
        settings=head.settings,
        device=device,
    )


def render_card(head: HeadRecipe, lengths: Mapping[str, Sequence[float]]) -> str:
    """The model card, as Markdown."""
    settings = "".join(f" --set {key}={value}" for key, value in head.settings.items())
    lines = [
        f"# Foredraft built-in {head.method} head",
        "",
        f"Drafts for the built-in target: `foredraft generate --spec-method {head.method}`.",
        "",
        "- Data: texts that the target wrote itself, half of them greedily and half drawn at temperature 1, and files "
        "of its corpus (`foredraft.zoo.generated`); nothing of the held-out modules and packages.",
        f"- Recipe: `foredraft train {head.method}{settings} --steps {head.steps} --optimizer {head.optimizer} "
        f"--lr {head.learning_rate}`, batches of 2,048 tokens. `foredraft zoo train` repeats it.",
        "",
        "Acceptance length, bonus included, of chains of K tokens after held-out prompts of the standard library: text",
        "of the target, greedy and drawn at temperature 1 with shared noise (`match`), replayed through the drafter.",
        "",
        "| | " + " | ".join(f"K={k + 1}" for k in range(MAX_DRAFT_TOKENS)) + " |",
        "|---|" + "---|" * MAX_DRAFT_TOKENS,
    ]
    for regime, values in lengths.items():
        cells = [f"{value:.2f}" for value in values] + [""] * (MAX_DRAFT_TOKENS - len(values))
        lines.append(f"| {regime} | " + " | ".join(cells) + " |")
    lines.append("")
    return "\n".join(lines)
