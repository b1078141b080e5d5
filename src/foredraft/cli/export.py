"""`foredraft export`: a drafter as vLLM, SGLang and others load it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.shell import UsageError, say
from foredraft.errors import ForedraftError

FORMATS = ("eagle3", "speculators", "medusa", "mlp_speculator", "hydra", "vllm", "sglang")
BUILTIN = "builtin"


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, or a built-in one.")],
    fmt: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.", metavar="FORMAT")],
    out: Annotated[Path, typer.Option(help="The folder to write.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub id of its target; not given: the one the drafter names.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over what is in the folder.")] = False,
) -> None:
    """Write a drafter in the layout that another engine loads; refuse what the engine would read wrongly."""
    if fmt not in FORMATS:
        raise UsageError(f"unknown format {fmt!r}; use one of: {', '.join(FORMATS)}")
    if out.exists() and Path(drafter).expanduser().exists() and out.samefile(Path(drafter).expanduser()):
        raise UsageError(f"--out {str(out)!r} is the drafter's own folder; give another one")
    from foredraft.checkpoints.export import ROUTES
    from foredraft.checkpoints.export import export as write
    from foredraft.checkpoints.read import TITLES, WHOLE_MODEL, read, recognise
    from foredraft.cli.backend import hush

    hush()
    place = _builtin(drafter) or drafter
    method = recognise(place)[0]
    if method == WHOLE_MODEL:
        raise ForedraftError(f"{drafter} is a whole language model: vLLM and SGLang load the folder as it is")
    if method not in ROUTES:
        raise ForedraftError(f"{drafter} is {TITLES[method]}, which no other engine loads")
    target = _target(place, model)
    exported = write(read(place, target.facts), fmt, out, target, force)
    for note in exported.notes:
        say(f"note: {note}")
    say(f"{drafter} is in {out}, for {target.facts.name}")
    if exported.command is not None:
        sys.stdout.write(f"{exported.command}\n")


def _builtin(name: str) -> str | None:
    """The folder of a built-in drafter, unless something by that name lies here."""
    from foredraft import zoo

    return str(zoo.path(name)) if name in zoo.names() and not Path(name).exists() else None


def _target(drafter: str, given: str | None) -> Any:
    """What --model says, else what the drafter's config says, else the built-in target."""
    from foredraft import zoo
    from foredraft.checkpoints.read import named_target
    from foredraft.checkpoints.target import look_at

    name = given or named_target(drafter) or BUILTIN
    try:
        return look_at(str(zoo.path("target")) if name == BUILTIN else name)
    except ForedraftError as error:
        if given is not None:
            raise
        raise ForedraftError(f"{drafter} is for a target that cannot be looked at: {error}; give --model") from None
