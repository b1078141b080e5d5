"""`foredraft zoo`: the models that ship inside the package."""

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


def _find_folder(ctx: typer.Context, name: str) -> Path:
    folders = (ctx.obj or CliBackend()).list_zoo()
    if name not in folders:
        known = (
            f"use one of: {', '.join(folders)}"
            if folders
            else "this installation has none; run `foredraft zoo train --install`"
        )
        raise UsageError(f"unknown built-in model {name!r}; {known}")
    return folders[name]


@zoo.callback(invoke_without_command=True)
def list_by_default(ctx: typer.Context) -> None:
    """The built-in models: list, show, path, train."""
    if ctx.invoked_subcommand is None:
        list_models(ctx)


@zoo.command("list")
def list_models(ctx: typer.Context) -> None:
    """Every built-in model, its size on disk and its folder."""
    folders = (ctx.obj or CliBackend()).list_zoo()
    if not folders:
        raise ForedraftError("this installation has no built-in models; run `foredraft zoo train --install`")
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        sys.stdout.write(f"{name:<16}{size / 2**20:7.1f} MiB  {folder}\n")


@zoo.command("path")
def print_path(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help="As `foredraft zoo list` names it.")]
) -> None:
    """The folder of a built-in model, for any program that takes a Hugging Face folder."""
    sys.stdout.write(f"{_find_folder(ctx, name)}\n")


@zoo.command("show")
def print_cards(
    ctx: typer.Context, name: Annotated[str | None, typer.Argument(help="One model; all if not given.")] = None
) -> None:
    """Model cards: recipe, data, held-out loss, acceptance."""
    folders = (ctx.obj or CliBackend()).list_zoo()
    for folder in [_find_folder(ctx, name)] if name is not None else folders.values():
        card = folder / CARD_FILE
        text = (
            card.read_text(encoding="utf-8")
            if card.exists()
            else f"# {folder.name}\n\nThis model came without a card.\n"
        )
        sys.stdout.write(f"{text.rstrip()}\n\nFolder: {folder}\n")


@zoo.command("train")
def train_models(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Where the models go; a run that stopped goes on from there.")] = Path(
        "zoo"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    sources: Annotated[
        Path | None, typer.Option(help="Learn from this tree of Python files, not from library and packages.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; as many as PyTorch takes if absent.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens the target reads; 61 million if absent. Drafts in proportion.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Tokens of one step; 8,192 if absent, 65,536 on CUDA.")
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Begin the decay at the last checkpoint of the part under way.")
    ] = False,
    use_as_builtin: Annotated[
        bool, typer.Option("--install", help="Then use them as this installation's built-in models.")
    ] = False,
) -> None:
    """Train the built-in models again from the sources of the standard library and of permissively licensed packages:
    a day on two cores. Stop with Ctrl-C or SIGTERM; the same command goes on."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file; give a folder")
    if sources is not None and not sources.is_dir():
        raise UsageError(f"--sources {str(sources)!r} is not a folder; give one that holds Python files")
    backend: CliBackend = ctx.obj or CliBackend()
    screen = make_console(sys.stderr, no_color=False)
    with ProgressBar(screen, "reading the sources", total=1) as bar:
        options = ZooTrainingOptions(device, sources, threads, tokens, batch_tokens, finish)
        backend.train(out, options, ZooProgress(bar, prints_lines=not screen.is_terminal), print_line)
    if use_as_builtin:
        backend.install(out)
    print_line(
        f"the models are in {out}"
        + (", and built in from now on" if use_as_builtin else "; --install makes them the built-in ones")
    )


@dataclass
class ZooProgress:
    """Shows training on: in the bar, and where there is none as a line for every twentieth of a part."""

    bar: ProgressBar
    prints_lines: bool
    last_twentieth: tuple[str, int] = ("", -1)  # the part and the twentieth of the last line

    def __call__(self, part: str, step: int, steps: int, loss: float) -> None:
        line = f"{part}: step {step} of {steps}, loss {loss:.3f}"
        self.bar.move_to(step, steps, line)
        twentieth = (part, 20 * step // steps)
        if self.prints_lines and twentieth != self.last_twentieth:
            self.last_twentieth = twentieth
            print_line(line)
