"""`foredraft export`: conversion of a drafter to the checkpoint format of another engine.

The methods declare their formats: `foredraft.checkpoints.formats`.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.shell import UsageError, print_line
from foredraft.errors import ForedraftError

BUILTIN = "builtin"


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, or the name of a built-in one.")],
    fmt: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format to write, such as vllm, sglang or speculators; a wrong one lists all.",
            metavar="FORMAT",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the exported drafter.", metavar="DIR")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the drafter's target. Default: the target that its config names, else the "
            "built-in model."
        ),
    ] = None,
    spec_method: Annotated[
        str | None,
        typer.Option(
            help="Method of the drafter, only if it is not registered: package.module:METHOD.", metavar="METHOD"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in the folder of --out.")] = False,
) -> None:
    """Write a drafter in the format of another engine, and print the command that serves it.

    A drafter that the other engine would load with another meaning is refused.
    """
    if out.exists() and Path(drafter).expanduser().exists() and out.samefile(Path(drafter).expanduser()):
        raise UsageError(f"--out {str(out)!r} is the folder of the drafter; give another one")
    from foredraft.cli.backend import silence_transformers
    from foredraft.drafters import checkpoint_folders
    from foredraft.drafters.registry import find_method

    method = None if spec_method is None else find_method(spec_method)
    if spec_method is not None and method is None:
        raise UsageError(f"unknown method {spec_method!r}; leave --spec-method out, or give package.module:METHOD")
    formats = checkpoint_folders.list_export_formats(method)
    if fmt not in formats:
        raise UsageError(f"unknown format {fmt!r}; use one of: {', '.join(formats)}")
    silence_transformers()
    source = _find_builtin(drafter) or drafter
    stored = checkpoint_folders.list_formats(method)[checkpoint_folders.recognise(source, method)[0]]
    if not stored.exports:
        raise ForedraftError(f"{drafter} is {stored.title}{stored.no_exports}")
    target = _read_target(source, model)
    checkpoint = checkpoint_folders.read(source, target.info, method)
    exported = checkpoint_folders.export(checkpoint, fmt, out, target, force, method)
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
