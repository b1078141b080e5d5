"""`foredraft zoo`: the models that ship inside the package."""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.backend import Backend
from foredraft.cli.shell import UsageError
from foredraft.errors import ForedraftError

zoo = typer.Typer()
CARD = "README.md"


def _folder(ctx: typer.Context, name: str) -> Path:
    folders = (ctx.obj or Backend()).zoo()
    if name not in folders:
        known = (
            f"use one of: {', '.join(folders)}" if folders else "this installation has none; run `foredraft zoo train`"
        )
        raise UsageError(f"unknown built-in model {name!r}; {known}")
    return folders[name]


@zoo.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """The built-in models: list, show, path, train."""
    if ctx.invoked_subcommand is None:
        list_models(ctx)


@zoo.command("list")
def list_models(ctx: typer.Context) -> None:
    """Every built-in model, its size on disk and its folder."""
    folders = (ctx.obj or Backend()).zoo()
    if not folders:
        raise ForedraftError("this installation has no built-in models; run `foredraft zoo train`")
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        sys.stdout.write(f"{name:<12}{size / 2**20:7.1f} MiB  {folder}\n")


@zoo.command("path")
def path(ctx: typer.Context, name: Annotated[str, typer.Argument(help="As `foredraft zoo list` names it.")]) -> None:
    """The folder of a built-in model, for any program that takes a Hugging Face folder."""
    sys.stdout.write(f"{_folder(ctx, name)}\n")


@zoo.command("show")
def show(
    ctx: typer.Context, name: Annotated[str | None, typer.Argument(help="One model; all if not given.")] = None
) -> None:
    """Model cards: recipe, data, held-out loss, acceptance."""
    folders = (ctx.obj or Backend()).zoo()
    for folder in [_folder(ctx, name)] if name is not None else folders.values():
        card = folder / CARD
        text = (
            card.read_text(encoding="utf-8")
            if card.exists()
            else f"# {folder.name}\n\nThis model came without a card.\n"
        )
        sys.stdout.write(f"{text.rstrip()}\n\nFolder: {folder}\n")


@zoo.command("train")
def train(
    out: Annotated[Path, typer.Option(help="Where the models go; a run that stopped goes on from there.")] = Path(
        "zoo"
    ),
) -> None:
    """Train the built-in models again from the standard library's sources: hours on two cores."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file; give a folder")
    importlib.import_module("foredraft.zoo.build").build_all(out)
