"""`foredraft export`: a drafter as vLLM, SGLang and others load it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.shell import UsageError, print_line
from foredraft.errors import ForedraftError

EXPORT_FORMATS = ("eagle3", "speculators", "medusa", "mlp_speculator", "hydra", "vllm", "sglang")
BUILTIN = "builtin"


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, or a built-in one.")],
    fmt: Annotated[str, typer.Option("--format", help=f"{', '.join(EXPORT_FORMATS)}.", metavar="FORMAT")],
    out: Annotated[Path, typer.Option(help="The folder to write.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub id of its target; not given: the one the drafter names.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over what is in the folder.")] = False,
) -> None:
    """Write a drafter in the layout that another engine loads; refuse what the engine would read wrongly."""
    if fmt not in EXPORT_FORMATS:
        raise UsageError(f"unknown format {fmt!r}; use one of: {', '.join(EXPORT_FORMATS)}")
    if out.exists() and Path(drafter).expanduser().exists() and out.samefile(Path(drafter).expanduser()):
        raise UsageError(f"--out {str(out)!r} is the drafter's own folder; give another one")
    from foredraft.checkpoints.export import EXPORTERS
    from foredraft.checkpoints.export import export as write
    from foredraft.checkpoints.read import TITLES, WHOLE_MODEL, read, recognise
    from foredraft.cli.backend import silence_transformers

    silence_transformers()
    place = _find_builtin(drafter) or drafter
    method = recognise(place)[0]
    if method == WHOLE_MODEL:
        raise ForedraftError(f"{drafter} is a whole language model: vLLM and SGLang load the folder as it is")
    if method not in EXPORTERS:
        raise ForedraftError(f"{drafter} is {TITLES[method]}, which no other engine loads")
    target = _read_target(place, model)
    exported = write(read(place, target.info), fmt, out, target, force)
    for note in exported.notes:
        print_line(f"note: {note}")
    print_line(f"{drafter} is in {out}, for {target.info.name}")
    if exported.command is not None:
        sys.stdout.write(f"{exported.command}\n")


def _find_builtin(name: str) -> str | None:
    """The folder of a built-in drafter, unless something by that name lies here."""
    from foredraft import zoo

    return str(zoo.find_folder(name)) if name in zoo.list_models() and not Path(name).exists() else None


def _read_target(drafter: str, given: str | None) -> Any:
    """Read the target: that of --model, else of the drafter's config, else the built-in one."""
    from foredraft import zoo
    from foredraft.checkpoints.read import find_named_target
    from foredraft.checkpoints.target import read_target

    name = given or find_named_target(drafter) or BUILTIN
    try:
        return read_target(str(zoo.find_folder("target")) if name == BUILTIN else name)
    except ForedraftError as error:
        if given is not None:
            raise
        raise ForedraftError(f"{drafter} is for a target that cannot be looked at: {error}; give --model") from None
