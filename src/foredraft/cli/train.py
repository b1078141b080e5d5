"""`foredraft train`: a drafter for a model, from text or from what the model writes itself."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.backend import hush
from foredraft.cli.options import _option, takes
from foredraft.cli.progress import Bar
from foredraft.cli.render import console
from foredraft.cli.shell import INTERRUPTED, UsageError, say

if TYPE_CHECKING:
    from foredraft.train.loop import Standing
    from foredraft.train.plan import Plan

SHORT = ("loss", "heads", "layers", "hidden", "draft_config")  # options of methods that have a word of their own
DATA, STEPS, MEASURE, RUN = "Data", "Steps", "Measurement", "Run"


@dataclass(frozen=True)
class TrainOptions:
    """What `foredraft train` takes."""

    method: Annotated[str, typer.Argument(help="What to train: draft_model, medusa, eagle3, ngram_lm, ...")]
    data: Annotated[
        list[str] | None,
        _option(
            "Text, .jsonl (text, prompt and completion, or messages), .npy of token ids, a dataset folder, or "
            "'builtin'; repeatable.", "--data", "-d", panel=DATA, metavar="PATH",
        ),
    ] = None  # fmt: skip
    out: Annotated[Path, _option("Where the drafter goes; a run that stopped goes on there.", "--out", "-o")] = Path(
        "drafter"
    )
    model: Annotated[str | None, _option("Folder or Hub id of the target; the built-in model if not given.")] = None
    start: Annotated[str | None, _option("A drafter to go on from, as published.", metavar="FOLDER")] = None
    option: Annotated[
        list[str] | None,
        _option("An option of the method, e.g. --set heads=5; repeatable.", "--set", metavar="KEY=VALUE"),
    ] = None
    loss: Annotated[str | None, _option("ce, kl, reverse_kl, tv or lk; short for --set loss=.")] = None
    heads: Annotated[int | None, _option("Short for --set heads=.")] = None
    layers: Annotated[int | None, _option("Short for --set layers=.")] = None
    hidden: Annotated[int | None, _option("Width; short for --set hidden=.")] = None
    draft_config: Annotated[
        str | None, _option("config.json of a draft model; short for --set draft_config=.", metavar="PATH")
    ] = None

    context: Annotated[int, _option("Tokens of a row.", panel=DATA)] = 256
    held_out: Annotated[list[str] | None, _option("Texts to measure on; repeatable.", panel=DATA, metavar="PATH")] = (
        None
    )
    held_out_share: Annotated[float, _option("Without --held-out: share of the texts.", panel=DATA)] = 0.02
    generate: Annotated[
        bool | None,
        typer.Option(
            "--generate/--no-generate", rich_help_panel=DATA, show_default=False,
            help="The target writes the texts itself, from the prompts in --data. Default: if it is an instruct model.",
        ),
    ] = None  # fmt: skip
    written: Annotated[int, _option("Tokens it writes after a prompt, at most.", panel=DATA)] = 192
    cache: Annotated[str | None, _option("Keep the target's traces in this folder.", panel=DATA, metavar="FOLDER")] = (
        None
    )
    top: Annotated[int | None, _option("Likeliest tokens kept of the target's law.", panel=DATA)] = None

    steps: Annotated[int | None, _option("Updates; not given: one pass over the data, at most 1000.", panel=STEPS)] = (
        None
    )
    batch_tokens: Annotated[int, _option("Tokens of an update.", panel=STEPS)] = 2048
    parts: Annotated[int, _option("Passes an update is made of, to save memory.", panel=STEPS)] = 1
    learning_rate: Annotated[float, _option("The highest.", "--learning-rate", "--lr", panel=STEPS)] = 1e-3
    warmup: Annotated[float, _option("Share of the steps over which it rises.", panel=STEPS)] = 0.04
    decay: Annotated[str, _option("How it falls: linear, cosine or constant.", panel=STEPS)] = "cosine"
    optimizer: Annotated[str, _option("adamw, or muon for the matrices inside.", panel=STEPS)] = "adamw"
    weight_decay: Annotated[float, _option("Of AdamW.", panel=STEPS)] = 0.0
    clip: Annotated[float, _option("Longest gradient.", panel=STEPS)] = 1.0
    seed: Annotated[int, _option("Same seed, same drafter.", panel=STEPS)] = 0

    eval_every: Annotated[int, _option("Steps between measurements; 0 is only at the end.", panel=MEASURE)] = 0
    eval_prompts: Annotated[int, _option("Held-out prompts to replay; 0 is none.", panel=MEASURE)] = 16
    eval_tokens: Annotated[int, _option("Tokens after each.", panel=MEASURE)] = 64
    spec_tokens: Annotated[int, _option("Longest draft per pass.", panel=MEASURE)] = 5

    max_steps: Annotated[int | None, _option("Stop this run after so many steps.", panel=RUN)] = None
    max_minutes: Annotated[float | None, _option("End this run after so long, with fewer steps.", panel=RUN)] = None
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", rich_help_panel=RUN, min=1)] = 200
    precision: Annotated[str, _option("auto, bf16 (products only) or fp32.", panel=RUN)] = "auto"
    dtype: Annotated[str, _option("Of the target: auto, bfloat16, float32.", panel=RUN)] = "auto"
    device: Annotated[str, _option("auto, cpu or cuda.", panel=RUN)] = "auto"
    tensorboard: Annotated[bool, _option("Write TensorBoard files too.", "--tensorboard", panel=RUN)] = False

    @property
    def settings(self) -> dict[str, str]:
        """Options of the method. Raises UsageError where one is said twice."""
        from foredraft.errors import ForedraftError
        from foredraft.train.settings import pairs

        try:
            found = pairs(self.option or ())
        except ForedraftError as error:
            raise UsageError(str(error)) from None
        for name in SHORT:
            value = getattr(self, name)
            if value is not None and found.setdefault(name, str(value)) != str(value):
                raise UsageError(
                    f"--{name.replace('_', '-')} {value} and --set {name}={found[name]} disagree; give one of them"
                )
        return found

    def plan(self) -> "Plan":
        from foredraft.train.plan import Data, Evaluation, Plan, Steps

        return Plan(
            method=self.method,
            model=self.model or "builtin",
            out=self.out,
            data=Data(
                files=tuple(self.data or ()), held_out=tuple(self.held_out or ()), held_out_share=self.held_out_share,
                context=self.context, generate=self.generate, written=self.written, cache=self.cache, top=self.top,
            ),
            steps=Steps(
                steps=self.steps, batch_tokens=self.batch_tokens, parts=self.parts, learning_rate=self.learning_rate,
                warmup=self.warmup, decay=self.decay, optimizer=self.optimizer, weight_decay=self.weight_decay,
                clip=self.clip, seed=self.seed,
            ),
            evaluation=Evaluation(self.eval_every, self.eval_prompts, self.eval_tokens, self.spec_tokens),
            settings=self.settings, start=self.start, device=self.device, dtype=self.dtype, precision=self.precision,
            save_every=self.save_every, max_steps=self.max_steps, max_minutes=self.max_minutes,
            tensorboard=self.tensorboard,
        )  # fmt: skip


@takes(TrainOptions)
def train(ctx: typer.Context, options: TrainOptions) -> None:
    """Train a drafter for a model. The same command goes on where a run stopped; Ctrl-C leaves a usable drafter.

    Example: foredraft train medusa --data builtin --out medusa --steps 600
    """
    plan = checked(options)
    from foredraft.train.run import train as run

    hush()
    screen = console(sys.stderr, no_color=False)
    with Bar(screen, "reading", total=1) as bar:
        outcome = run(plan, say, Watch(bar, is_written=not screen.is_terminal))
    if not outcome.is_main:
        raise typer.Exit(0 if outcome.is_done else INTERRUPTED)
    if outcome.figures:
        say(", ".join(_figures(outcome.figures)))
    if not outcome.is_done:
        say(f"stopped after step {outcome.step} of {outcome.steps}; {outcome.folder} can be drafted with as it is, "
            "and the same command goes on from here")  # fmt: skip
        raise typer.Exit(INTERRUPTED)
    say(f"done; use it with --spec-method {plan.method} --spec-model {outcome.folder}")


def checked(options: TrainOptions) -> "Plan":
    """The plan, with what is wrong in the command line found before a model is loaded."""
    from foredraft.errors import ForedraftError
    from foredraft.train.settings import config_of, method_of

    plan = options.plan()
    try:
        plan.check()
        config_of(method_of(plan.method), plan.settings or {})
    except ForedraftError as error:
        raise UsageError(str(error)) from None
    return plan


@dataclass
class Watch:
    """Shows training on: in the bar, and where there is none as a line for every twentieth of it."""

    bar: Bar
    is_written: bool
    written: int = -1  # the twentieth of the last line

    def __call__(self, standing: "Standing") -> None:
        left = round(standing.seconds_left)
        line = (
            f"step {standing.step} of {standing.steps}, loss {standing.loss:.4f}, "
            f"{standing.tokens_per_second:,.0f} tokens/s, {left // 60}:{left % 60:02} left"
        )
        line += "".join(f", {piece}" for piece in _figures(standing.figures or {}))
        self.bar.move_to(standing.step, standing.steps, line)
        twentieth = 20 * standing.step // standing.steps
        if self.is_written and twentieth != self.written:
            self.written = twentieth
            say(line)


def _figures(measured: Mapping[str, Any]) -> list[str]:
    """Of the last measurement: the loss, and tokens per pass of the target."""
    found = [f"held-out loss {measured['loss']:.3f}"] if "loss" in measured else []
    for regime, figures in measured.items():
        if isinstance(figures, dict):
            found.append(f"{regime} acceptance length {figures['length']:.2f}")
    return found
