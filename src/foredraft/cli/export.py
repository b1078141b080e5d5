"""`foredraft export`: conversion of a drafter to the checkpoint format of another engine.

The formats are in `foredraft.checkpoints.export`.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.shell import UsageError, print_line
from foredraft.errors import ForedraftError

EXPORT_FORMATS = ("eagle3", "speculators", "medusa", "mlp_speculator", "hydra", "vllm", "sglang")
BUILTIN = "builtin"


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, or the name of a built-in one.")],
    fmt: Annotated[
        str,
        typer.Option("--format", help=f"Format to write: {', '.join(EXPORT_FORMATS)}.", metavar="FORMAT"),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the exported drafter.", metavar="DIR")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the drafter's target. Default: the target that its config names, else the "
            "built-in model."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in the folder of --out.")] = False,
) -> None:
    """Write a drafter in the format of another engine, and print the command that serves it.

    A drafter that the other engine would load with another meaning is refused.
    """
    if fmt not in EXPORT_FORMATS:
        raise UsageError(f"unknown format {fmt!r}; use one of: {', '.join(EXPORT_FORMATS)}")
    if out.exists() and Path(drafter).expanduser().exists() and out.samefile(Path(drafter).expanduser()):
        raise UsageError(f"--out {str(out)!r} is the folder of the drafter; give another one")
    from foredraft.checkpoints.export import EXPORTERS
    from foredraft.checkpoints.export import export as write
    from foredraft.checkpoints.read import TITLES, WHOLE_MODEL, read, recognise
    from foredraft.cli.backend import silence_transformers

    silence_transformers()
    source = _find_builtin(drafter) or drafter
    method = recognise(source)[0]
    if method == WHOLE_MODEL:
        raise ForedraftError(f"{drafter} is a whole language model: vLLM and SGLang load the folder as it is")
    if method not in EXPORTERS:
        raise ForedraftError(f"{drafter} is {TITLES[method]}, which no other engine loads")
    target = _read_target(source, model)
    exported = write(read(source, target.info), fmt, out, target, force)
    for note in exported.notes:
        print_line(f"note: {note}")
    print_line(f"{drafter} is in {out}, for {target.info.name}")
    if exported.command is not None:
        sys.stdout.write(f"{exported.command}\n")


def _find_builtin(name: str) -> str | None:
    """Return the folder of a built-in drafter; None if there is none or if a local path has that name."""
    from foredraft import zoo

    return str(zoo.find_folder(name)) if name in zoo.list_models() and not Path(name).exists() else None


def _read_target(drafter: str, model: str | None) -> Any:
    """Read the target: `model` (--model), else the one that the drafter's config names, else the built-in one."""
    from foredraft import zoo
    from foredraft.checkpoints.read import find_named_target
    from foredraft.checkpoints.target import read_target

    name = model or find_named_target(drafter) or BUILTIN
    try:
        return read_target(str(zoo.find_folder("target")) if name == BUILTIN else name)
    except ForedraftError as error:
        if model is not None:
            raise
        raise ForedraftError(f"{drafter} is for a target that cannot be read: {error}; give --model") from None
