"""`foredraft train`: training of a drafter for a target, on given texts or on texts that the target writes.

The training is in `foredraft.train`; this file turns options into a plan and shows progress.
"""

import os
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

# Settings of methods that have an option besides --set.
SHORTHAND_OPTIONS = (
    "loss",
    "heads",
    "layers",
    "hidden",
    "draft_config",
    "boost",
)
DATA_PANEL, STEPS_PANEL, MEASURE_PANEL, RUN_PANEL = "Data", "Steps", "Measurement", "Run"
PROGRESS_PARTS = 20  # without a terminal, a line is printed after each twentieth of the steps


@dataclass(frozen=True)
class TrainOptions:
    """Options of `foredraft train`."""

    method: Annotated[
        str,
        typer.Argument(
            help="Drafting method to train, such as draft_model, medusa, eagle3 or ngram_lm.", show_default=False
        ),
    ] = ""
    data: Annotated[
        list[str] | None,
        _make_option(
            "Training data: a text file, .jsonl (text, prompt and completion, or messages; source and text for an "
            "encoder-decoder model), .npy of token ids, a dataset folder, or 'builtin'; repeatable.",
            "--data", "-d", panel=DATA_PANEL, metavar="PATH",
        ),
    ] = None  # fmt: skip
    out: Annotated[
        Path, _make_option("Folder for the drafter; an interrupted run in it is resumed.", "--out", "-o")
    ] = Path("drafter")
    model: Annotated[str | None, _make_option("Folder or Hub id of the target. Default: the built-in model.")] = None
    start: Annotated[
        str | None,
        _make_option("Folder of a trained drafter to start from. Default: new weights.", metavar="FOLDER"),
    ] = None
    option: Annotated[
        list[str] | None,
        _make_option("Setting of the method, such as --set heads=5; repeatable.", "--set", metavar="KEY=VALUE"),
    ] = None
    loss: Annotated[
        str | None,
        _make_option("Loss: ce, kl, reverse_kl, tv or lk; the same as --set loss=. Default: that of the method."),
    ] = None
    heads: Annotated[
        int | None, _make_option("Number of heads; the same as --set heads=. Default: that of the method.")
    ] = None
    layers: Annotated[
        int | None, _make_option("Number of layers; the same as --set layers=. Default: that of the method.")
    ] = None
    hidden: Annotated[
        int | None, _make_option("Width of the drafter; the same as --set hidden=. Default: that of the method.")
    ] = None
    draft_config: Annotated[
        str | None,
        _make_option("config.json of a new draft model; the same as --set draft_config=.", metavar="PATH"),
    ] = None
    boost: Annotated[
        list[str] | None,
        _make_option(
            "Folder of an earlier draft model; the new one learns what the earlier ones miss, to draft beside them. "
            "Repeatable; the same as --set boost=A,B.", metavar="FOLDER",
        ),
    ] = None  # fmt: skip

    context: Annotated[int, _make_option("Length of a training row, in tokens.", panel=DATA_PANEL)] = 256
    held_out: Annotated[
        list[str] | None,
        _make_option(
            "Data for measurements, never trained on; repeatable. Default: a share of --data.",
            panel=DATA_PANEL,
            metavar="PATH",
        ),
    ] = None
    held_out_share: Annotated[
        float, _make_option("Share of the texts that is held out if --held-out is not given.", panel=DATA_PANEL)
    ] = 0.02
    generate: Annotated[
        bool | None,
        typer.Option(
            "--generate/--no-generate", rich_help_panel=DATA_PANEL, show_default=False,
            help="Let the target write the texts, from the prompts in --data. Default: if it is an instruct model.",
        ),
    ] = None  # fmt: skip
    written: Annotated[int, _make_option("Most tokens that the target writes after a prompt.", panel=DATA_PANEL)] = 192
    cache: Annotated[
        str | None,
        _make_option("Folder that keeps the target's traces. Default: none.", panel=DATA_PANEL, metavar="FOLDER"),
    ] = None
    top: Annotated[
        int | None,
        _make_option(
            "Likeliest tokens to keep of the target's distribution. Default: by the size of the vocabulary.",
            panel=DATA_PANEL,
        ),
    ] = None

    steps: Annotated[
        int | None,
        _make_option("Number of updates. Default: one pass over the data, at most 1000.", panel=STEPS_PANEL),
    ] = None
    batch_tokens: Annotated[int, _make_option("Tokens per update.", panel=STEPS_PANEL)] = 2048
    parts: Annotated[
        int, _make_option("Forward and backward passes per update; more need less memory.", panel=STEPS_PANEL)
    ] = 1
    learning_rate: Annotated[
        float, _make_option("Highest learning rate.", "--learning-rate", "--lr", panel=STEPS_PANEL)
    ] = 1e-3
    warmup: Annotated[
        float, _make_option("Share of the steps over which the learning rate rises.", panel=STEPS_PANEL)
    ] = 0.04
    decay: Annotated[
        str, _make_option("Decay of the learning rate: linear, cosine or constant.", panel=STEPS_PANEL)
    ] = "cosine"
    optimizer: Annotated[
        str, _make_option("Optimizer: adamw, or muon for the matrices inside layers.", panel=STEPS_PANEL)
    ] = "adamw"
    weight_decay: Annotated[float, _make_option("Weight decay of AdamW.", panel=STEPS_PANEL)] = 0.0
    clip: Annotated[float, _make_option("Largest norm of the gradient.", panel=STEPS_PANEL)] = 1.0
    seed: Annotated[int, _make_option("Random seed; equal seeds give equal drafters.", panel=STEPS_PANEL)] = 0

    eval_every: Annotated[
        int, _make_option("Steps between measurements; 0 measures only at the end.", panel=MEASURE_PANEL)
    ] = 0
    eval_prompts: Annotated[
        int, _make_option("Number of held-out prompts to replay; 0 is none.", panel=MEASURE_PANEL)
    ] = 16
    eval_tokens: Annotated[int, _make_option("Output tokens per replayed prompt.", panel=MEASURE_PANEL)] = 64
    spec_tokens: Annotated[
        int, _make_option("Longest draft per forward pass of the target, in tokens.", panel=MEASURE_PANEL)
    ] = 5

    max_steps: Annotated[
        int | None, _make_option("Stop this run after this many steps; it can be resumed.", panel=RUN_PANEL)
    ] = None
    max_minutes: Annotated[
        float | None,
        _make_option(
            "Finish within this many minutes; the number of steps is reduced to fit. Default: no limit.",
            panel=RUN_PANEL,
        ),
    ] = None
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", rich_help_panel=RUN_PANEL, min=1)] = 200
    precision: Annotated[
        str, _make_option("Precision of training: auto, bf16 (matrix products only) or fp32.", panel=RUN_PANEL)
    ] = "auto"
    dtype: Annotated[str, _make_option("Dtype of the target: auto, bfloat16 or float32.", panel=RUN_PANEL)] = "auto"
    device: Annotated[str, _make_option("Device of training: auto, cpu or cuda.", panel=RUN_PANEL)] = "auto"
    target_url: Annotated[
        str | None,
        _make_option(
            "Address of a `foredraft serve --traces`, or of a vLLM that exports hidden states, which runs the target; "
            "only embedding and head are loaded here.",
            panel=RUN_PANEL,
            metavar="URL",
        ),
    ] = None
    target_key: Annotated[
        str | None,
        _make_option(
            "API key of --target-url. Default: the environment variable FOREDRAFT_API_KEY, else none.", panel=RUN_PANEL
        ),
    ] = None
    print_server_command: Annotated[
        Path | None,
        _make_option(
            "Print the command of the vLLM that --target-url reads, and train nothing. vLLM writes hidden states to "
            "this folder.",
            panel=RUN_PANEL,
            metavar="FOLDER",
        ),
    ] = None
    tensorboard: Annotated[bool, _make_option("Write TensorBoard files as well.", "--tensorboard", panel=RUN_PANEL)] = (
        False
    )

    @property
    def method_options(self) -> dict[str, str]:
        """Settings of the method from --set and its short forms. Raises UsageError if two values disagree."""
        return _collect_settings(self)

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
            tensorboard=self.tensorboard, target_url=self.target_url,
            target_key=self.target_key or os.environ.get("FOREDRAFT_API_KEY"),
        )  # fmt: skip


def _collect_settings(options: TrainOptions) -> dict[str, str]:
    """Return the settings of the method. Raises UsageError if two values disagree."""
    from foredraft.errors import ForedraftError
    from foredraft.train.settings import parse_pairs

    try:
        settings = parse_pairs(options.option or ())
    except ForedraftError as error:
        raise UsageError(str(error)) from None
    for name in SHORTHAND_OPTIONS:
        given = getattr(options, name)
        value = ",".join(given) if isinstance(given, list) else given
        if value is not None and settings.setdefault(name, str(value)) != str(value):
            raise UsageError(
                f"--{name.replace('_', '-')} {value} and --set {name}={settings[name]} disagree; give one of them"
            )
    return settings


@with_options(TrainOptions)
def train(ctx: typer.Context, options: TrainOptions) -> None:
    """Train a drafter for a model.

    Ctrl-C leaves a usable drafter, and the same command resumes the run.

    Example: foredraft train medusa --data builtin --out medusa --steps 600
    """
    plan = build_checked_plan(options)
    silence_transformers()
    if options.print_server_command is not None:
        from foredraft.train.server_command import make_server_command

        typer.echo(make_server_command(plan, options.print_server_command))
        return
    from foredraft.train.distributed import close_processes
    from foredraft.train.freed_memory import keep_freed_memory
    from foredraft.train.run import train as run

    keep_freed_memory()
    screen = make_console(sys.stderr, no_color=False)
    with ProgressBar(screen, "reading", total=1) as bar:
        outcome = run(plan, print_line, TrainProgress(bar, prints_lines=not screen.is_terminal))
    close_processes()
    if not outcome.is_main:
        raise typer.Exit(0 if outcome.is_done else INTERRUPTED)
    if outcome.eval_metrics:
        print_line(", ".join(_format_figures(outcome.eval_metrics)))
    # Heads fit only the target that was trained with them.
    target = "" if outcome.target is None else f"--model {outcome.target} "
    if not outcome.is_done:
        addition = "" if outcome.target is None else f" with the target in {outcome.target}"
        print_line(
            f"stopped after step {outcome.step} of {outcome.steps}; the drafter in {outcome.folder} is usable"
            f"{addition}, and the same command resumes the run"
        )
        raise typer.Exit(INTERRUPTED)
    print_line(f"done; use it with {target}--spec-method {plan.method} --spec-model {outcome.folder}")


def build_checked_plan(options: TrainOptions) -> "TrainPlan":
    """Return the plan of the run, checked before a model is loaded. Raises UsageError for an invalid option."""
    from foredraft.errors import ForedraftError
    from foredraft.train.settings import find_trainable, parse_train_config, require_training

    if options.target_key is not None and options.target_url is None:
        raise UsageError("--target-key goes with --target-url; give both, or leave it out")
    plan = options.build_plan()
    try:
        plan.check()
        parse_train_config(require_training(find_trainable(plan.method)), plan.settings or {})
    except ForedraftError as error:
        raise UsageError(str(error)) from None
    return plan


@dataclass
class TrainProgress:
    """Progress callback of training: moves the bar and, if `prints_lines`, prints a line per twentieth of the steps."""

    bar: ProgressBar
    prints_lines: bool
    last_twentieth: int = -1  # twentieth of the steps at the last line

    def __call__(self, status: "TrainStatus") -> None:
        left = round(status.seconds_left)
        line = (
            f"step {status.step} of {status.steps}, loss {status.loss:.4f}, "
            f"{status.tokens_per_second:,.0f} tokens/s, {left // 60}:{left % 60:02} left"
        )
        line += "".join(f", {figure}" for figure in _format_figures(status.eval_metrics or {}))
        self.bar.move_to(status.step, status.steps, line)
        twentieth = PROGRESS_PARTS * status.step // status.steps
        if self.prints_lines and twentieth != self.last_twentieth:
            self.last_twentieth = twentieth
            print_line(line)


def _format_figures(metrics: Mapping[str, Any]) -> list[str]:
    """Return the held-out loss and the acceptance length by regime as text."""
    texts = [f"held-out loss {metrics['loss']:.3f}"] if "loss" in metrics else []
    if "target_kl" in metrics:
        texts.append(f"target moved by KL {metrics['target_kl']:.4f} to loss {metrics['target_ce']:.3f}")
    for regime, figures in metrics.items():
        if isinstance(figures, dict):
            texts.append(f"{regime} acceptance length {figures['length']:.2f}")
    return texts
