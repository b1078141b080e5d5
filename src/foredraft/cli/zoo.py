"""`foredraft zoo`: the models that are part of the package."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.backend import CliBackend, ZooTrainingOptions
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.shell import UsageError, print_line
from foredraft.errors import ForedraftError

zoo = typer.Typer()
CARD_FILE = "README.md"
PROGRESS_PARTS = 20  # without a terminal, a line is printed after each twentieth of the steps of a model


def _find_folder(ctx: typer.Context, name: str) -> Path:
    folders = (ctx.obj or CliBackend()).list_zoo()
    if name not in folders:
        advice = (
            f"use one of: {', '.join(folders)}"
            if folders
            else "this installation has none; run `foredraft zoo train --install`"
        )
        raise UsageError(f"unknown built-in model {name!r}; {advice}")
    return folders[name]


@zoo.callback(invoke_without_command=True)
def list_by_default(ctx: typer.Context) -> None:
    """List, show, locate or train the built-in models."""
    if ctx.invoked_subcommand is None:
        list_models(ctx)


@zoo.command("list")
def list_models(ctx: typer.Context) -> None:
    """List the built-in models with their size on disk and their folder."""
    folders = (ctx.obj or CliBackend()).list_zoo()
    if not folders:
        raise ForedraftError("this installation has no built-in models; run `foredraft zoo train --install`")
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        sys.stdout.write(f"{name:<16}{size / 2**20:7.1f} MiB  {folder}\n")


@zoo.command("path")
def print_path(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a built-in model, as printed by `foredraft zoo list`.")],
) -> None:
    """Print the folder of a built-in model, for programs that read a Hugging Face folder."""
    sys.stdout.write(f"{_find_folder(ctx, name)}\n")


@zoo.command("show")
def print_cards(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a built-in model. Default: all models.")] = None,
) -> None:
    """Print model cards: recipe, data, held-out loss and acceptance length."""
    folders = (ctx.obj or CliBackend()).list_zoo()
    for folder in [_find_folder(ctx, name)] if name is not None else folders.values():
        card = folder / CARD_FILE
        text = card.read_text(encoding="utf-8") if card.exists() else f"# {folder.name}\n\nThis model has no card.\n"
        sys.stdout.write(f"{text.rstrip()}\n\nFolder: {folder}\n")


@zoo.command("train")
def train_models(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the models; an interrupted run in it is resumed.")] = Path(
        "zoo"
    ),
    device: Annotated[str, typer.Option(help="Device of training: cpu or cuda.")] = "cpu",
    sources: Annotated[
        Path | None,
        typer.Option(
            help="Folder of Python files to train on. Default: the standard library and the installed packages with a "
            "permissive licence."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads. Default: torch's default.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training tokens of the target; the draft models change in proportion. Default: 73 million."
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Tokens per step. Default: 8,192 on CPU, 65,536 on CUDA.")
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Begin the decay of the learning rate at the last checkpoint of the current model."
        ),
    ] = False,
    is_compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the steps of target and draft model: a quarter faster on CPU, needs a C++ compiler.",
        ),
    ] = False,
    undistilled: Annotated[
        bool,
        typer.Option(
            "--undistilled", help="Also train a draft model without the target, for `foredraft reproduce distillation`."
        ),
    ] = False,
    use_as_builtin: Annotated[
        bool, typer.Option("--install", help="Install the trained models as the built-in models.")
    ] = False,
) -> None:
    """Train the built-in models again, which takes a day on two CPU cores.

    The data are the sources of the standard library and of installed packages with a permissive licence. Ctrl-C or
    SIGTERM stops the run, and the same command resumes it.
    """
    _check_folders(out, sources)
    backend: CliBackend = ctx.obj or CliBackend()
    screen = make_console(sys.stderr, no_color=False)
    with ProgressBar(screen, "reading the sources", total=1) as bar:
        options = ZooTrainingOptions(device, sources, threads, tokens, batch_tokens, finish, is_compiled, undistilled)
        backend.train(out, options, ZooProgress(bar, prints_lines=not screen.is_terminal), print_line)
    print_line(f"the models are in {out}" + ("" if use_as_builtin else "; --install makes them the built-in models"))
    if use_as_builtin:
        _install(backend, out)


def _check_folders(out: Path, sources: Path | None) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file; give a folder")
    if sources is not None and not sources.is_dir():
        raise UsageError(f"--sources {str(sources)!r} is not a folder; give a folder of Python files")


@zoo.command("install")
def install_models(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder of `foredraft zoo train`.")] = Path("zoo"),
) -> None:
    """Make the finished models of a training run the built-in models of this installation; it may be unfinished."""
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is not a folder; give the --out of `foredraft zoo train`")
    _install(ctx.obj or CliBackend(), folder)


def _install(backend: CliBackend, folder: Path) -> None:
    """Install the finished models of a folder, and print which they are and which stay as they are."""
    installed, missing = backend.install(folder)
    print_line(f"built-in models from {folder}: {', '.join(installed) or 'none'}")
    if missing:
        print_line(f"not finished there, so left as they are: {', '.join(missing)}")


@dataclass
class ZooProgress:
    """Progress callback of training: moves the bar and, if `prints_lines`, prints a line per twentieth of a model."""

    bar: ProgressBar
    prints_lines: bool
    last_twentieth: tuple[str, int] = ("", -1)  # model and twentieth of its steps at the last line

    def __call__(self, part: str, step: int, steps: int, loss: float) -> None:
        line = f"{part}: step {step} of {steps}, loss {loss:.3f}"
        self.bar.move_to(step, steps, line)
        twentieth = (part, PROGRESS_PARTS * step // steps)
        if self.prints_lines and twentieth != self.last_twentieth:
            self.last_twentieth = twentieth
            print_line(line)
