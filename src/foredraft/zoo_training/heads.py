"""Training of the built-in heads for the built-in target, with `foredraft.train` and the recipes below."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foredraft.drafters.method import HeadRecipe
from foredraft.drafters.registry import METHOD_SEPARATOR, load_methods
from foredraft.llm import LLM
from foredraft.train.config import DataConfig, EvaluationConfig, OptimizationConfig, TrainPlan
from foredraft.train.replay import REGIMES, Recording, Replay, ReplayMetrics
from foredraft.train.run import train
from foredraft.zoo.corpus import make_held_out_prompts
from foredraft.zoo_training.generated import CORPUS_TOKENS, NUM_DOCUMENTS, write_texts
from foredraft.zoo_training.measure import MAX_DRAFT_TOKENS

LogLine = Callable[[str], None]
PartProgressCallback = Callable[[str, int, int, float], None]  # part, step, steps, loss
TEXTS_FILE = "texts.npy"
MAX_NEW_TOKENS = 128  # tokens generated per prompt for the figures on the card


def list_recipes() -> dict[str, HeadRecipe]:
    """Return the recipes of the heads for the built-in target, by method."""
    return {
        name: method.built_in.recipe for name, method in load_methods().items() if method.built_in.recipe is not None
    }


def list_head_folders() -> list[str]:
    """Return the names of the folders of these heads."""
    return [recipe.get_folder(method) for method, recipe in list_recipes().items()]


@dataclass(frozen=True)
class HeadsPlan:
    """Recipes of all heads, and the size of their training data and measurements."""

    recipes: Mapping[str, HeadRecipe] = field(default_factory=list_recipes)
    documents: int = NUM_DOCUMENTS  # documents that the target generates
    corpus_tokens: int = CORPUS_TOKENS  # training tokens from corpus files
    prompts: int = 50  # prompts for the figures on the card
    tokens: int = MAX_NEW_TOKENS  # tokens generated per prompt for the figures on the card


def train_heads(
    out: Path,
    device: str,
    train_ids: np.ndarray,
    report: PartProgressCallback,
    log_line: LogLine,
    heads: HeadsPlan,
) -> None:
    """Train every head into a subfolder of `out`; a finished head is kept, an interrupted run is resumed.

    Args:
        out: folder that has the finished target and the corpus.
        device: device of training.
        train_ids: training token ids of the corpus, [T].
        report: called with method, step, steps and loss.
        log_line: called with lines for the user.
        heads: recipes.
    """
    texts, held_out = out / TEXTS_FILE, out / "held.npy"
    if not texts.exists():
        log_line("the target generates training texts for the heads")
        write_texts(
            LLM(out / "target", None, dtype="bfloat16", device=device),
            train_ids,
            texts,
            heads.documents,
            heads.corpus_tokens,
        )
    for method, head in heads.recipes.items():
        folder = out / head.get_folder(method)
        if (folder / "README.md").exists():
            continue
        train(
            make_plan(method, head, out, texts, held_out, device),
            log_line,
            lambda status, part=folder.name: report(part, status.step, status.steps, status.loss),  # type: ignore[misc]
        )
        _remove_target_path(folder / "config.json")
        llm = LLM(out / "target", None, dtype="bfloat16", device=device)
        (folder / "README.md").write_text(
            render_card(method, head, measure_head(llm, method, folder, heads.prompts, heads.tokens))
        )


def measure_head(
    llm: LLM, method: str, folder: Path, prompts: int, tokens: int = MAX_NEW_TOKENS
) -> dict[str, list[float]]:
    """Measure the acceptance length of a head by replay after held-out prompts.

    Args:
        llm: target.
        method: drafting method of the head.
        folder: folder of the head.
        prompts: number of prompts.
        tokens: tokens generated per prompt. Default 128.

    Returns:
        Acceptance lengths by regime, for chains of 1, 2, ... draft tokens.
    """
    assert llm.tokenizer is not None
    prompt_ids = [llm.tokenizer(text).input_ids for text in make_held_out_prompts(prompts)]
    lengths_by_regime: dict[str, list[float]] = {}
    for regime, temperature in REGIMES.items():
        recording = Recording.make(llm, prompt_ids, temperature, tokens)
        lengths = lengths_by_regime[regime] = []
        for depth in range(1, MAX_DRAFT_TOKENS + 1):
            drafting = llm.with_drafter({"method": method, "model": str(folder), "num_speculative_tokens": depth})
            assert drafting.drafter is not None
            if drafting.drafter.spec.max_nodes < depth:
                break  # longer chains than the head can draft
            lengths.append(ReplayMetrics.from_stats(Replay(drafting, recording).run()).acceptance_length)
    return lengths_by_regime


def _remove_target_path(config: Path) -> None:
    """Remove the path of the target's training folder, which does not exist on other machines, from the config."""
    values = json.loads(config.read_text())
    values.pop("base_model_name_or_path", None)
    values.pop("foredraft_target", None)
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def make_plan(method: str, head: HeadRecipe, out: Path, texts: Path, held_out: Path, device: str) -> TrainPlan:
    """Make the plan of the training of one head.

    Args:
        method: drafting method of the head.
        head: recipe of the head.
        out: folder that has the target, earlier draft models and the result.
        texts: training token ids.
        held_out: token ids that are not trained on.
        device: device of training.
    """
    return TrainPlan(
        method=method,
        model=str(out / "target"),
        out=out / head.get_folder(method),
        data=DataConfig((str(texts),), (str(held_out),)),
        steps=OptimizationConfig(steps=head.steps, learning_rate=head.learning_rate, optimizer=head.optimizer),
        evaluation=EvaluationConfig(prompts=0),  # `measure_head` measures the figures of the card
        settings=dict(head.settings) | _build_boost(head, out),
        device=device,
    )


def _build_boost(head: HeadRecipe, out: Path) -> dict[str, str]:
    """Return the training setting for the earlier draft models; empty without any."""
    return {"boost": ",".join(str(out / name) for name in head.boost)} if head.boost else {}


def render_card(method: str, head: HeadRecipe, lengths: Mapping[str, Sequence[float]]) -> str:
    """Return the model card as Markdown.

    Args:
        method: drafting method of the head.
        head: recipe of the head.
        lengths: acceptance lengths by regime, as `measure_head` returns them.
    """
    settings = "".join(f" --set {key}={value}" for key, value in head.settings.items())
    settings += "".join(f" --boost {name}" for name in head.boost)
    title = head.folder or f"{method} head"
    members = METHOD_SEPARATOR.join([method] * (1 + len(head.boost)))  # the drafter and those that it complements
    lines = [
        f"# Foredraft built-in {title}",
        "",
        f"Drafts for the built-in target: `foredraft generate --spec-method {members}`.",
        "",
        "- Data: output of the target, half of it greedy and half sampled at temperature 1, and files "
        "of its corpus (`foredraft.zoo_training.generated`); nothing of the held-out modules and packages.",
        f"- Recipe: `foredraft train {method}{settings} --steps {head.steps} --optimizer {head.optimizer} "
        f"--lr {head.learning_rate}`, batches of 2,048 tokens. `foredraft zoo train` repeats it.",
        "",
        "Acceptance length, bonus included, of its own chains of K tokens after held-out prompts of the standard",
        "library: output of the target, greedy and sampled at temperature 1 with shared noise (`match`), replayed",
        "through the drafter.",
        "",
        "| | " + " | ".join(f"K={k + 1}" for k in range(MAX_DRAFT_TOKENS)) + " |",
        "|---|" + "---|" * MAX_DRAFT_TOKENS,
    ]
    for regime, values in lengths.items():
        cells = [f"{value:.2f}" for value in values] + [""] * (MAX_DRAFT_TOKENS - len(values))
        lines.append(f"| {regime} | " + " | ".join(cells) + " |")
    lines.append("")
    return "\n".join(lines)
