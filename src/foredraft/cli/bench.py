"""`foredraft bench`: how fast it is, measured so that the figures can be believed."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.backend import hush
from foredraft.cli.shell import UsageError, say

bench = typer.Typer(no_args_is_help=False)


@bench.callback()
def root() -> None:
    """Measure: each method against plain decoding, other programs on the same weights, kernels."""


@bench.command("grow")
def grow(
    params: Annotated[str, typer.Option(help="Parameters to reach, as 430M or 1.5B.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub id of a Llama model; the built-in target if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights that nothing reads.")] = 0,
) -> None:
    """Enlarge the built-in target to a model of the same function: real acceptance at a real cost, no download.

    Whatever is measured with such a model says so.
    """
    from foredraft.bench import grow as growth

    size = growth.parse_size(params)
    hush()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {str(out)!r} exists and is not an empty folder; give another")
    shape = growth.grow_to(model, size, out, seed)
    say(
        f"{out}: {shape.parameters / 1e6:.1f}M parameters, hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.heads} heads on {shape.kv_heads}, {shape.layers} layers; it writes the text of "
        f"{model or 'the built-in target'}"
    )
