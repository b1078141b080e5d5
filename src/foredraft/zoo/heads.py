"""The built-in target's drafting heads: what `foredraft train` makes of the recipes below."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foredraft.llm import LLM
from foredraft.train.plan import Data, Evaluation, Plan, Steps
from foredraft.train.replay import REGIMES, Figures, Recording, Replay
from foredraft.train.run import train
from foredraft.zoo.corpus import held_out_prompts
from foredraft.zoo.generated import CORPUS_TOKENS, DOCUMENTS, write
from foredraft.zoo.measure import MAX_DRAFT

Say = Callable[[str], None]
Report = Callable[[str, int, int, float], None]  # part, step, steps, loss
TEXTS = "texts.npy"
WRITTEN_EACH = 128  # tokens after a prompt, for the card


@dataclass(frozen=True)
class Head:
    """One `foredraft train`. Every step reads 2,048 tokens."""

    method: str
    steps: int
    settings: dict[str, str] = field(default_factory=dict)
    learning_rate: float = 2e-3
    optimizer: str = "muon"


RECIPES = (
    # without output matrices of their own: they would be nine tenths of its size
    Head("medusa", 450, {"own_head": "false", "layers": "2"}),
    Head("mlp_speculator", 1000, {"inner": "192"}),
    Head("blockwise", 900, {"heads": "3", "inner": "192", "decay": "0.8"}),
    Head("hydra", 900, {"heads": "3", "own_head": "false", "rank": "320"}),
    Head("early_exit", 300, {"exit_layer": "4"}, learning_rate=0.04),
    Head("eagle", 850, {"steps": "2"}),
    Head("eagle3", 850, {"steps": "4"}),
    Head("chimera", 350, {"heads": "2", "intermediate": "224", "steps": "4"}),
)


@dataclass(frozen=True)
class Heads:
    """All of them, and what they learn from."""

    recipes: tuple[Head, ...] = RECIPES
    documents: int = DOCUMENTS  # that the target writes
    corpus_tokens: int = CORPUS_TOKENS
    prompts: int = 50  # for the figures on the card...
    tokens: int = WRITTEN_EACH  # ... and what is written after each


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
        train(
            _plan(head, out, texts, held, device),
            say,
            lambda now, part=head.method: report(part, now.step, now.steps, now.loss),  # type: ignore[misc]
        )
        _forget_place(folder / "config.json")
        llm = LLM(out / "target", None, dtype="bfloat16", device=device)
        (folder / "README.md").write_text(card(head, measure(llm, head.method, folder, heads.prompts, heads.tokens)))


def measure(llm: LLM, method: str, folder: Path, prompts: int, tokens: int = WRITTEN_EACH) -> dict[str, list[float]]:
    """Acceptance lengths of chains of 1, 2, ... tokens by regime, replayed after held-out prompts."""
    assert llm.tokenizer is not None
    asked = [llm.tokenizer(text).input_ids for text in held_out_prompts(prompts)]
    found: dict[str, list[float]] = {}
    for regime, temperature in REGIMES.items():
        recording = Recording.make(llm, asked, temperature, tokens)
        lengths = found[regime] = []
        for depth in range(1, MAX_DRAFT + 1):
            drafting = llm.with_drafter({"method": method, "model": str(folder), "num_speculative_tokens": depth})
            assert drafting.drafter is not None
            if drafting.drafter.num_nodes < depth:
                break  # it has no more heads
            lengths.append(Figures.of(Replay(drafting, recording).run()).acceptance_length)
    return found


def _forget_place(config: Path) -> None:
    """The target's folder of today is none of a shipped head's business."""
    told = json.loads(config.read_text())
    told.pop("base_model_name_or_path", None)
    told.pop("foredraft_target", None)
    config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def _plan(head: Head, out: Path, texts: Path, held: Path, device: str) -> Plan:
    return Plan(
        method=head.method,
        model=str(out / "target"),
        out=out / head.method,
        data=Data((str(texts),), (str(held),)),
        steps=Steps(steps=head.steps, learning_rate=head.learning_rate, optimizer=head.optimizer),
        evaluation=Evaluation(prompts=0),  # the card's figures are measured after
        settings=head.settings,
        device=device,
    )


def card(head: Head, lengths: Mapping[str, Sequence[float]]) -> str:
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
        "| | " + " | ".join(f"K={k + 1}" for k in range(MAX_DRAFT)) + " |",
        "|---|" + "---|" * MAX_DRAFT,
    ]
    for regime, values in lengths.items():
        cells = [f"{value:.2f}" for value in values] + [""] * (MAX_DRAFT - len(values))
        lines.append(f"| {regime} | " + " | ".join(cells) + " |")
    lines.append("")
    return "\n".join(lines)
