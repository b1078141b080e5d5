"""`foredraft handover`: a command line of `foredraft serve`, for another engine.

This file turns options into a deployment; engines, translation and formats are in `foredraft.handover`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft import zoo
from foredraft.cli.backend import CliBackend, build_drafter_spec, resolve_single_method, silence_transformers
from foredraft.cli.options import METHOD_SEPARATOR, NONE, ModelOptions, _make_option, with_options
from foredraft.cli.serve import ServeOptions, apply_positional, build_settings, read_model_names
from foredraft.cli.shell import Command, UsageError, print_line
from foredraft.cli.simulation import read_drafter_options
from foredraft.draft_length.length_table import LENGTH_FIELDS

if TYPE_CHECKING:
    from foredraft.handover.deployment import Deployment

HANDOVER_PANEL = "Handover"
SEPARATOR = "--"  # between the options of the handover and a command line that is handed over
PROGRAM = ("foredraft", "serve")  # start of that command line
COMMON_KEYS = frozenset({"method", "model", *LENGTH_FIELDS})  # of a drafter's specification; all others are its options
# Options that are no equal of a flag: those of the drafter, and those that every engine has.
DRAFTER_FIELDS = frozenset(
    {
        "model",
        "spec_method",
        "spec_model",
        "spec_option",
        "spec_tokens",
        "spec_quantization",
        "spec_dtype",
        "spec_revision",
        "spec_max_model_len",
        "spec_vocab",
        "spec_simulate",
        "speculative_config",
        "verify",
        "posterior_threshold",
        "posterior_alpha",
    }
)
ADDRESS_FIELDS = frozenset({"model_argument", "host", "port", "api_key"})
LIST_FIELDS = frozenset({"models", "lora", "admin_key"})  # of a server with several models, which is not handed over


class HandoverCommand(Command):
    """Command that accepts `-- foredraft serve ...` behind its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, without the words that begin a command line of `foredraft serve`."""
        return super().parse_args(ctx, drop_program(args))


def drop_program(args: Sequence[str]) -> list[str]:
    """Return the arguments without `-- foredraft serve`, or the part of it that is given."""
    if SEPARATOR not in args:
        return list(args)
    at = list(args).index(SEPARATOR)
    rest = list(args[at + 1 :])
    for word in PROGRAM:
        if rest[:1] == [word]:
            rest = rest[1:]
    return [*args[:at], *rest]


@dataclass(frozen=True)
class HandoverOptions(ServeOptions):
    """Options of `foredraft handover`: its own, and those of `foredraft serve`."""

    engine: Annotated[
        str,
        _make_option(
            "Engine to hand over to: vllm, sglang, trtllm or llama.cpp.", panel=HANDOVER_PANEL, metavar="ENGINE"
        ),
    ] = ""
    fmt: Annotated[
        str,
        _make_option(
            "What to write: command (a shell script), compose, kubernetes, or ray (Ray Serve LLM, with vLLM).",
            "--format",
            panel=HANDOVER_PANEL,
            metavar="FORMAT",
        ),
    ] = "command"
    out: Annotated[
        Path | None,
        _make_option(
            "Folder for the file and for a drafter that the engine needs in another format.",
            panel=HANDOVER_PANEL,
            metavar="DIR",
        ),
    ] = None
    force: Annotated[bool, _make_option("Overwrite files in the folder of --out.", "--force", panel=HANDOVER_PANEL)] = (
        False
    )
    without_foredraft: Annotated[
        bool,
        _make_option(
            "Use methods of the engine alone, also where Foredraft can draft inside it.",
            "--without-foredraft",
            panel=HANDOVER_PANEL,
        ),
    ] = False


@with_options(HandoverOptions)
def handover(ctx: typer.Context, options: HandoverOptions) -> None:
    """Print what starts the same deployment in another engine.

    Options are those of foredraft serve. Comments name what has no equal there.

    Example: foredraft handover --engine vllm -- foredraft serve my-model --spec-model my-head --spec-tokens 5
    """
    from foredraft.handover.drafter_plan import HandoverChoices
    from foredraft.handover.output_format import find_format
    from foredraft.handover.plan import plan_handover
    from foredraft.handover.registry import find_engine, load_engines

    if not options.engine:
        raise UsageError(f"name the engine with --engine; one of: {', '.join(load_engines())}")
    engine, output = find_engine(options.engine), find_format(options.fmt)
    options = read_drafter_options(apply_positional(options))
    if options.has_models:
        raise UsageError(
            "a handover has one model; leave --model NAME=PATH, --lora and --admin-key out, and hand over each alone"
        )
    backend: CliBackend = ctx.obj or CliBackend()
    build_settings(options)  # report invalid options of the server
    method = resolve_single_method(options, backend, "a handover")
    silence_transformers()
    deployment = build_deployment(options, method)
    choices = HandoverChoices(options.out, options.force, not options.without_foredraft)
    text = output.write(plan_handover(deployment, engine, choices))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / output.file
        if path.exists() and not options.force:
            raise UsageError(f"{path} exists; give another folder, or --force to overwrite its files")
        path.write_text(text, encoding="utf-8")
        print_line(f"the same is in {path}")
    sys.stdout.write(text)


def build_deployment(options: HandoverOptions, method: str) -> "Deployment":
    """Return the deployment of a command line.

    Args:
        options: options of the command.
        method: name of the drafting method.

    Raises:
        UsageError: for several draft models, which no other engine takes.
    """
    from foredraft.drafters.user_spec import parse_length_table
    from foredraft.handover.deployment import CUDA, Deployment

    if isinstance(options.draft_models, list):
        raise UsageError("another engine drafts with one model; give one --spec-model")
    spec = build_drafter_spec(options, method) or {}
    return Deployment(
        target=find_target(options),
        method=None if method == NONE or options.draft_length == 0 else method,
        model=options.draft_models or find_builtin_drafter(options, method),
        lengths=parse_length_table(spec),
        drafter_options={key: value for key, value in spec.items() if key not in COMMON_KEYS},
        rule=options.find_rule(),
        server_options=list_given(options),
        host=options.host,
        port=options.port,
        has_api_key=options.api_key is not None,
        device=CUDA if options.device == "auto" else options.device,
    )


def find_target(options: ModelOptions) -> str:
    """Return the folder or hub id of the target."""
    builtin = zoo.resolve_target(options.model)
    return options.model or "" if builtin is None else str(zoo.find_target_folder(builtin))


def find_builtin_drafter(options: ModelOptions, method: str) -> str | None:
    """Return the folder of the built-in drafter for a built-in target; of an ensemble that of its first such member."""
    from foredraft.drafters.registry import find_method

    builtin = zoo.resolve_target(options.model)
    if builtin is None:
        return None
    methods = [found for name in method.split(METHOD_SEPARATOR) if (found := find_method(name)) is not None]
    folders = [zoo.find_drafter(one.built_in.folders, builtin) for one in methods]
    return next((folder for folder in folders if folder is not None), None)


def list_given(options: HandoverOptions) -> dict[str, Any]:
    """Return the options of the server that differ from their defaults, by field."""
    own = {option.name for option in fields(HandoverOptions)} - {option.name for option in fields(ServeOptions)}
    given = {
        option.name: value
        for option in fields(ServeOptions)
        if option.name not in own | DRAFTER_FIELDS | ADDRESS_FIELDS | LIST_FIELDS
        and (value := getattr(options, option.name)) != option.default
    }
    names = read_model_names(options)
    if names != (find_target(options),):  # other engines take the target's path, as it is given
        given["served_model_name"] = list(names)
    if options.kv_memory is not None:
        given["kv_memory"] = options.kv_bytes
    return given
