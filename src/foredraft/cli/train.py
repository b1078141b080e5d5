"""`foredraft train`: a drafter for a model, from text or from what the model writes itself."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.backend import silence_transformers
from foredraft.cli.options import _make_option, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.shell import INTERRUPTED, UsageError, print_line

if TYPE_CHECKING:
    from foredraft.train.config import TrainPlan
    from foredraft.train.loop import TrainStatus

SHORTHAND_OPTIONS = (
    "loss",
    "heads",
    "layers",
    "hidden",
    "draft_config",
)  # options of methods that have a word of their own
DATA_PANEL, STEPS_PANEL, MEASURE_PANEL, RUN_PANEL = "Data", "Steps", "Measurement", "Run"


@dataclass(frozen=True)
class TrainOptions:
    """Options of `foredraft train`."""

    method: Annotated[str, typer.Argument(help="What to train: draft_model, medusa, eagle3, ngram_lm, ...")]
    data: Annotated[
        list[str] | None,
        _make_option(
            "Text, .jsonl (text, prompt and completion, or messages), .npy of token ids, a dataset folder, or "
            "'builtin'; repeatable.", "--data", "-d", panel=DATA_PANEL, metavar="PATH",
        ),
    ] = None  # fmt: skip
    out: Annotated[Path, _make_option("Where the drafter goes; a run that stopped goes on there.", "--out", "-o")] = (
        Path("drafter")
    )
    model: Annotated[str | None, _make_option("Folder or Hub id of the target; the built-in model if not given.")] = (
        None
    )
    start: Annotated[str | None, _make_option("A drafter to go on from, as published.", metavar="FOLDER")] = None
    option: Annotated[
        list[str] | None,
        _make_option("An option of the method, e.g. --set heads=5; repeatable.", "--set", metavar="KEY=VALUE"),
    ] = None
    loss: Annotated[str | None, _make_option("ce, kl, reverse_kl, tv or lk; short for --set loss=.")] = None
    heads: Annotated[int | None, _make_option("Short for --set heads=.")] = None
    layers: Annotated[int | None, _make_option("Short for --set layers=.")] = None
    hidden: Annotated[int | None, _make_option("Width; short for --set hidden=.")] = None
    draft_config: Annotated[
        str | None, _make_option("config.json of a draft model; short for --set draft_config=.", metavar="PATH")
    ] = None

    context: Annotated[int, _make_option("Tokens of a row.", panel=DATA_PANEL)] = 256
    held_out: Annotated[
        list[str] | None, _make_option("Texts to measure on; repeatable.", panel=DATA_PANEL, metavar="PATH")
    ] = None
    held_out_share: Annotated[float, _make_option("Without --held-out: share of the texts.", panel=DATA_PANEL)] = 0.02
    generate: Annotated[
        bool | None,
        typer.Option(
            "--generate/--no-generate", rich_help_panel=DATA_PANEL, show_default=False,
            help="The target writes the texts itself, from the prompts in --data. Default: if it is an instruct model.",
        ),
    ] = None  # fmt: skip
    written: Annotated[int, _make_option("Tokens it writes after a prompt, at most.", panel=DATA_PANEL)] = 192
    cache: Annotated[
        str | None, _make_option("Keep the target's traces in this folder.", panel=DATA_PANEL, metavar="FOLDER")
    ] = None
    top: Annotated[
        int | None, _make_option("Likeliest tokens kept of the target's distribution.", panel=DATA_PANEL)
    ] = None

    steps: Annotated[
        int | None, _make_option("Updates; not given: one pass over the data, at most 1000.", panel=STEPS_PANEL)
    ] = None
    batch_tokens: Annotated[int, _make_option("Tokens of an update.", panel=STEPS_PANEL)] = 2048
    parts: Annotated[int, _make_option("Passes an update is made of, to save memory.", panel=STEPS_PANEL)] = 1
    learning_rate: Annotated[float, _make_option("The highest.", "--learning-rate", "--lr", panel=STEPS_PANEL)] = 1e-3
    warmup: Annotated[float, _make_option("Share of the steps over which it rises.", panel=STEPS_PANEL)] = 0.04
    decay: Annotated[str, _make_option("How it falls: linear, cosine or constant.", panel=STEPS_PANEL)] = "cosine"
    optimizer: Annotated[str, _make_option("adamw, or muon for the matrices inside.", panel=STEPS_PANEL)] = "adamw"
    weight_decay: Annotated[float, _make_option("Of AdamW.", panel=STEPS_PANEL)] = 0.0
    clip: Annotated[float, _make_option("Longest gradient.", panel=STEPS_PANEL)] = 1.0
    seed: Annotated[int, _make_option("Same seed, same drafter.", panel=STEPS_PANEL)] = 0

    eval_every: Annotated[
        int, _make_option("Steps between measurements; 0 is only at the end.", panel=MEASURE_PANEL)
    ] = 0
    eval_prompts: Annotated[int, _make_option("Held-out prompts to replay; 0 is none.", panel=MEASURE_PANEL)] = 16
    eval_tokens: Annotated[int, _make_option("Tokens after each.", panel=MEASURE_PANEL)] = 64
    spec_tokens: Annotated[int, _make_option("Longest draft per pass.", panel=MEASURE_PANEL)] = 5

    max_steps: Annotated[int | None, _make_option("Stop this run after so many steps.", panel=RUN_PANEL)] = None
    max_minutes: Annotated[
        float | None, _make_option("End this run after so long, with fewer steps.", panel=RUN_PANEL)
    ] = None
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", rich_help_panel=RUN_PANEL, min=1)] = 200
    precision: Annotated[str, _make_option("auto, bf16 (products only) or fp32.", panel=RUN_PANEL)] = "auto"
    dtype: Annotated[str, _make_option("Of the target: auto, bfloat16, float32.", panel=RUN_PANEL)] = "auto"
    device: Annotated[str, _make_option("auto, cpu or cuda.", panel=RUN_PANEL)] = "auto"
    tensorboard: Annotated[bool, _make_option("Write TensorBoard files too.", "--tensorboard", panel=RUN_PANEL)] = False

    @property
    def method_options(self) -> dict[str, str]:
        """Options of the method. Raises UsageError where one is said twice."""
        from foredraft.errors import ForedraftError
        from foredraft.train.settings import parse_pairs

        try:
            found = parse_pairs(self.option or ())
        except ForedraftError as error:
            raise UsageError(str(error)) from None
        for name in SHORTHAND_OPTIONS:
            value = getattr(self, name)
            if value is not None and found.setdefault(name, str(value)) != str(value):
                raise UsageError(
                    f"--{name.replace('_', '-')} {value} and --set {name}={found[name]} disagree; give one of them"
                )
        return found

    def build_plan(self) -> "TrainPlan":
        from foredraft.train.config import DataConfig, EvaluationConfig, OptimizationConfig, TrainPlan

        return TrainPlan(
            method=self.method,
            model=self.model or "builtin",
            out=self.out,
            data=DataConfig(
                files=tuple(self.data or ()), held_out=tuple(self.held_out or ()), held_out_share=self.held_out_share,
                context=self.context, generate=self.generate, written=self.written, cache=self.cache, top=self.top,
            ),
            steps=OptimizationConfig(
                steps=self.steps, batch_tokens=self.batch_tokens, parts=self.parts, learning_rate=self.learning_rate,
                warmup=self.warmup, decay=self.decay, optimizer=self.optimizer, weight_decay=self.weight_decay,
                clip=self.clip, seed=self.seed,
            ),
            evaluation=EvaluationConfig(self.eval_every, self.eval_prompts, self.eval_tokens, self.spec_tokens),
            settings=self.method_options, start=self.start, device=self.device, dtype=self.dtype,
            precision=self.precision,
            save_every=self.save_every, max_steps=self.max_steps, max_minutes=self.max_minutes,
            tensorboard=self.tensorboard,
        )  # fmt: skip


@with_options(TrainOptions)
def train(ctx: typer.Context, options: TrainOptions) -> None:
    """Train a drafter for a model. The same command goes on where a run stopped; Ctrl-C leaves a usable drafter.

    Example: foredraft train medusa --data builtin --out medusa --steps 600
    """
    plan = build_checked_plan(options)
    from foredraft.train.run import train as run

    silence_transformers()
    screen = make_console(sys.stderr, no_color=False)
    with ProgressBar(screen, "reading", total=1) as bar:
        outcome = run(plan, print_line, TrainProgress(bar, prints_lines=not screen.is_terminal))
    if not outcome.is_main:
        raise typer.Exit(0 if outcome.is_done else INTERRUPTED)
    if outcome.eval_metrics:
        print_line(", ".join(_format_figures(outcome.eval_metrics)))
    if not outcome.is_done:
        print_line(
            f"stopped after step {outcome.step} of {outcome.steps}; {outcome.folder} can be drafted with as it is, "
            "and the same command goes on from here"
        )
        raise typer.Exit(INTERRUPTED)
    print_line(f"done; use it with --spec-method {plan.method} --spec-model {outcome.folder}")


def build_checked_plan(options: TrainOptions) -> "TrainPlan":
    """The plan, with what is wrong in the command line found before a model is loaded."""
    from foredraft.errors import ForedraftError
    from foredraft.train.settings import find_method, parse_train_config

    plan = options.build_plan()
    try:
        plan.check()
        parse_train_config(find_method(plan.method), plan.settings or {})
    except ForedraftError as error:
        raise UsageError(str(error)) from None
    return plan


@dataclass
class TrainProgress:
    """Shows training on: in the bar, and where there is none as a line for every twentieth of it."""

    bar: ProgressBar
    prints_lines: bool
    last_twentieth: int = -1  # the twentieth of the last line

    def __call__(self, standing: "TrainStatus") -> None:
        left = round(standing.seconds_left)
        line = (
            f"step {standing.step} of {standing.steps}, loss {standing.loss:.4f}, "
            f"{standing.tokens_per_second:,.0f} tokens/s, {left // 60}:{left % 60:02} left"
        )
        line += "".join(f", {piece}" for piece in _format_figures(standing.eval_metrics or {}))
        self.bar.move_to(standing.step, standing.steps, line)
        twentieth = 20 * standing.step // standing.steps
        if self.prints_lines and twentieth != self.last_twentieth:
            self.last_twentieth = twentieth
            print_line(line)


def _format_figures(measured: Mapping[str, Any]) -> list[str]:
    """Format the last measurement: the loss, and tokens per forward pass of the target."""
    found = [f"held-out loss {measured['loss']:.3f}"] if "loss" in measured else []
    for regime, figures in measured.items():
        if isinstance(figures, dict):
            found.append(f"{regime} acceptance length {figures['length']:.2f}")
    return found
