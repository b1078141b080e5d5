"""The built-in target's drafting heads: what `foredraft train` makes of the recipes below."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.llm import LLM
from foredraft.train.plan import Data, Evaluation, Plan, Steps
from foredraft.train.run import train
from foredraft.zoo.generated import CORPUS_TOKENS, DOCUMENTS, write

Say = Callable[[str], None]
Report = Callable[[str, int, int, float], None]  # part, step, steps, loss
TEXTS = "texts.npy"


@dataclass(frozen=True)
class Head:
    """One `foredraft train`. Every step reads 2,048 tokens."""

    method: str
    steps: int
    settings: dict[str, str] = field(default_factory=dict)
    learning_rate: float = 2e-3
    optimizer: str = "muon"


RECIPES = (
    Head("medusa", 800),
    Head("mlp_speculator", 1000),
    Head("eagle", 850, {"steps": "2"}),
    Head("eagle3", 850, {"steps": "4"}),
)


@dataclass(frozen=True)
class Heads:
    """All of them, and what they learn from."""

    recipes: tuple[Head, ...] = RECIPES
    documents: int = DOCUMENTS  # that the target writes
    corpus_tokens: int = CORPUS_TOKENS
    prompts: int = 50  # for the figures on the card


EVERY = Heads()


def train_heads(out: Path, device: str, train_ids: np.ndarray, report: Report, say: Say, heads: Heads = EVERY) -> None:
    """Every head below `out`, beside the target that is there. A finished one is kept, a stopped one goes on."""
    texts, held = out / TEXTS, out / "held.npy"
    if not texts.exists():
        say("the target writes texts to learn from")
        write(
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
        outcome = train(
            _plan(head, out, texts, held, device, heads.prompts),
            say,
            lambda now, part=head.method: report(part, now.step, now.steps, now.loss),  # type: ignore[misc]
        )
        _forget_place(folder / "config.json")
        (folder / "README.md").write_text(card(head, outcome.figures))


def _forget_place(config: Path) -> None:
    """The target's folder of today is none of a shipped head's business."""
    told = json.loads(config.read_text())
    told.pop("base_model_name_or_path", None)
    config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def _plan(head: Head, out: Path, texts: Path, held: Path, device: str, prompts: int) -> Plan:
    return Plan(
        method=head.method,
        model=str(out / "target"),
        out=out / head.method,
        data=Data((str(texts),), (str(held),)),
        steps=Steps(steps=head.steps, learning_rate=head.learning_rate, optimizer=head.optimizer),
        evaluation=Evaluation(prompts=prompts, tokens=128),
        settings=head.settings,
        device=device,
    )


def card(head: Head, figures: Mapping[str, Any]) -> str:
    """The model card, as Markdown."""
    settings = "".join(f" --set {key}={value}" for key, value in head.settings.items())
    lines = [
        f"# Foredraft built-in {head.method} head",
        "",
        f"Drafts for the built-in target: `foredraft generate --spec-method {head.method}`.",
        "",
        "- Data: texts that the target wrote itself, half of them greedily and half drawn at temperature 1, and files "
        "of the standard library (`foredraft.zoo.generated`); nothing of the held-out modules.",
        f"- Recipe: `foredraft train {head.method}{settings} --steps {head.steps} --optimizer {head.optimizer} "
        f"--lr {head.learning_rate}`, batches of 2,048 tokens. `foredraft zoo train` repeats it.",
        f"- Figures: {json.dumps(figures)}" if figures else "- Figures: see docs/performance.md.",
        "",
    ]
    return "\n".join(lines)
