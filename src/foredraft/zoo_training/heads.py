"""Training of the built-in heads for the built-in targets, with `foredraft.train` and the recipes of the methods."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foredraft import zoo
from foredraft.drafters.method import HeadRecipe
from foredraft.drafters.registry import METHOD_SEPARATOR, load_methods
from foredraft.llm import LLM
from foredraft.train.config import DataConfig, EvaluationConfig, OptimizationConfig, TrainPlan
from foredraft.train.prompts import TrainPrompt
from foredraft.train.replay import REGIMES, Recording, Replay, ReplayMetrics
from foredraft.train.run import train
from foredraft.zoo.corpus import make_held_out_prompts
from foredraft.zoo_training.generated import CORPUS_TOKENS, NUM_DOCUMENTS, write_texts
from foredraft.zoo_training.measure import MAX_DRAFT_TOKENS

LogLine = Callable[[str], None]
PartProgressCallback = Callable[[str, int, int, float], None]  # part, step, steps, loss
TEXTS_FILE = "texts.npy"
TRACES_FOLDER = "traces"  # the target's states after the training texts, which all heads share
CARD_FILE = "README.md"  # the last file of a finished model
FIRST_FOLDER = "first"  # results of the first runs of heads that have two
MAX_NEW_TOKENS = 128  # tokens generated per prompt for the figures on the card


def list_recipes(target: str = zoo.DEFAULT_TARGET) -> dict[str, HeadRecipe]:
    """Return the recipes of the drafters for a built-in target, by method."""
    recipes = {name: method.built_in.recipes.get(target) for name, method in load_methods().items()}
    return {name: recipe for name, recipe in recipes.items() if recipe is not None}


def find_head_folder(method: str, target: str = zoo.DEFAULT_TARGET) -> str:
    """Return the name of the folder that a method's recipe for a built-in target fills."""
    return load_methods()[method].built_in.find_recipe_folder(target)


def list_head_folders() -> list[str]:
    """Return the names of the folders of all recipes."""
    return [find_head_folder(method, target) for target in zoo.list_targets() for method in list_recipes(target)]


@dataclass(frozen=True)
class HeadsPlan:
    """Recipes of all heads of a target, and the size of their training data and measurements."""

    recipes: Mapping[str, HeadRecipe] = field(default_factory=list_recipes)
    documents: int = NUM_DOCUMENTS  # documents that the target generates
    corpus_tokens: int = CORPUS_TOKENS  # training tokens from corpus files
    prompts: int = 50  # prompts for the figures on the card
    tokens: int = MAX_NEW_TOKENS  # tokens generated per prompt for the figures on the card


@dataclass(frozen=True)
class HeadsTarget:
    """Built-in target that heads are trained for, with their data and the words of their cards."""

    name: str  # of the built-in target
    folder: str  # that of its weights, below the folder of the build
    data: DataConfig
    batch_tokens: int  # tokens per step
    prompts: Sequence[TrainPrompt]  # held out; the figures on the cards are measured after them
    generate: str  # command that drafts for the target; the method's name follows
    data_description: str
    prompts_description: str


@dataclass(frozen=True)
class HeadRun:
    """Run of `foredraft train` for a head."""

    method: str
    recipe: HeadRecipe
    folder: Path  # of the result
    start: Path | None = None  # result of the first run, for a second one

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self.recipe.steps if self.start is None else self.recipe.further_steps


def list_runs(recipes: Mapping[str, HeadRecipe], target: str, out: Path) -> list[HeadRun]:
    """Return the runs that are not finished, in order; a finished second run needs no first one.

    Args:
        recipes: recipes by method.
        target: name of the built-in target.
        out: folder of the build.
    """
    runs = []
    for method, recipe in recipes.items():
        name = find_head_folder(method, target)
        first = out / FIRST_FOLDER / name if recipe.further_steps else None
        if (out / name / CARD_FILE).exists():
            continue
        if first is not None and not (first / CARD_FILE).exists():
            runs.append(HeadRun(method, recipe, first))
        runs.append(HeadRun(method, recipe, out / name, first))
    return runs


def prepare_code_target(
    out: Path, device: str, train_ids: np.ndarray, log_line: LogLine, heads: HeadsPlan
) -> HeadsTarget:
    """Write the training texts of the heads for the default target.

    Args:
        out: folder that has the finished target and the corpus.
        device: device on which the target generates.
        train_ids: training token ids of the corpus, [T].
        log_line: called with lines for the user.
        heads: sizes of the data.
    """
    texts = out / TEXTS_FILE
    llm = load_target(out / "target", device)
    if not texts.exists():
        log_line("the target generates training texts for the heads")
        write_texts(llm, train_ids, texts, heads.documents, heads.corpus_tokens)
    assert llm.tokenizer is not None
    return HeadsTarget(
        name=zoo.DEFAULT_TARGET,
        folder="target",
        data=DataConfig((str(texts),), (str(out / "held.npy"),), cache=str(out / TRACES_FOLDER)),
        batch_tokens=OptimizationConfig().batch_tokens,
        prompts=[llm.tokenizer(text).input_ids for text in make_held_out_prompts(heads.prompts)],
        generate="foredraft generate --spec-method",
        data_description="output of the target, half of it greedy and half sampled at temperature 1, and files of its "
        "corpus (`foredraft.zoo_training.generated`); nothing of the held-out modules and packages.",
        prompts_description="held-out prompts of the standard library",
    )


def load_target(folder: Path, device: str) -> LLM:
    """Load a trained target without a drafter."""
    return LLM(folder, None, dtype="bfloat16", device=device)


def train_heads(
    target: HeadsTarget, out: Path, device: str, report: PartProgressCallback, log_line: LogLine, heads: HeadsPlan
) -> None:
    """Train every head of a target into a subfolder of `out`; a finished head is kept, an interrupted run is resumed.

    Args:
        target: target and training data.
        out: folder that has the finished target.
        device: device of training.
        report: called with the name of the head's folder, step, steps and loss.
        log_line: called with lines for the user.
        heads: recipes.
    """
    for run in list_runs(heads.recipes, target.name, out):
        train(
            make_plan(run, target, out, device),
            log_line,
            lambda status, part=run.folder.name: report(part, status.step, status.steps, status.loss),  # type: ignore[misc]
        )
        _remove_target_path(run.folder / "config.json")
        llm = load_target(out / target.folder, device)
        lengths = measure_head(llm, run.method, run.folder, target.prompts, heads.tokens)
        (run.folder / CARD_FILE).write_text(render_card(run, target, lengths))


def measure_head(
    llm: LLM, method: str, folder: Path, prompts: Sequence[TrainPrompt], tokens: int = MAX_NEW_TOKENS
) -> dict[str, list[float]]:
    """Measure the acceptance length of a head by replay after held-out prompts.

    Args:
        llm: target.
        method: drafting method of the head.
        folder: folder of the head.
        prompts: prompts in token ids.
        tokens: tokens generated per prompt. Default 128.

    Returns:
        Acceptance lengths by regime, for chains of 1, 2, ... draft tokens.
    """
    lengths_by_regime: dict[str, list[float]] = {}
    for regime, temperature in REGIMES.items():
        recording = Recording.make(llm, prompts, temperature, tokens)
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


def make_plan(run: HeadRun, target: HeadsTarget, out: Path, device: str) -> TrainPlan:
    """Make the plan of a run.

    Args:
        run: method, recipe and folders.
        target: target and training data.
        out: folder of the build, which has the target and the earlier draft models.
        device: device of training.
    """
    recipe = run.recipe
    steps = OptimizationConfig(
        steps=run.steps,
        learning_rate=recipe.learning_rate,
        optimizer=recipe.optimizer,
        batch_tokens=target.batch_tokens,
    )
    return TrainPlan(
        method=run.method,
        model=str(out / target.folder),
        out=run.folder,
        data=target.data,
        steps=steps,
        evaluation=EvaluationConfig(prompts=0),  # `measure_head` measures the figures of the card
        settings=dict(recipe.settings) | _build_boost(recipe, out),
        start=None if run.start is None else str(run.start),
        device=device,
    )


def _build_boost(recipe: HeadRecipe, out: Path) -> dict[str, str]:
    """Return the training setting for the earlier draft models; empty without any."""
    return {"boost": ",".join(str(out / name) for name in recipe.boost)} if recipe.boost else {}


def render_card(run: HeadRun, target: HeadsTarget, lengths: Mapping[str, Sequence[float]]) -> str:
    """Return the model card as Markdown.

    Args:
        run: method and recipe.
        target: target of the head.
        lengths: acceptance lengths by regime, as `measure_head` returns them.
    """
    recipe = run.recipe
    title = recipe.folder or f"{run.method} head"
    members = METHOD_SEPARATOR.join([run.method] * (1 + len(recipe.boost)))  # the drafter and those that it complements
    lines = [
        f"# Foredraft built-in {title}",
        "",
        f"Drafts for the built-in target `{target.name}`: `{target.generate} {members}`.",
        "",
        f"- Data: {target.data_description}",
        f"- Recipe: {_describe_recipe(run, target)} `foredraft zoo train` repeats it.",
        "",
        f"Acceptance length, bonus included, of its own chains of K tokens after {target.prompts_description}:",
        "output of the target, greedy and sampled at temperature 1 with shared noise (`match`), replayed through the",
        "drafter.",
        "",
        "| | " + " | ".join(f"K={k + 1}" for k in range(MAX_DRAFT_TOKENS)) + " |",
        "|---|" + "---|" * MAX_DRAFT_TOKENS,
    ]
    for regime, values in lengths.items():
        cells = [f"{value:.2f}" for value in values] + [""] * (MAX_DRAFT_TOKENS - len(values))
        lines.append(f"| {regime} | " + " | ".join(cells) + " |")
    lines.append("")
    return "\n".join(lines)


def _describe_recipe(run: HeadRun, target: HeadsTarget) -> str:
    recipe = run.recipe
    settings = "".join(f" --set {key}={value}" for key, value in recipe.settings.items())
    settings += "".join(f" --boost {name}" for name in recipe.boost)
    steps = f"--steps {recipe.steps} --optimizer {recipe.optimizer} --lr {recipe.learning_rate}"
    further = "" if run.start is None else f", then {recipe.further_steps:,} steps from its result with `--start`"
    return f"`foredraft train {run.method}{settings} {steps}`{further}, batches of {target.batch_tokens:,} tokens."
