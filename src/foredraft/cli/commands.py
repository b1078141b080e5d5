"""Registration of all commands.

No module imported here imports torch at the top, so that --help answers at once.
"""

import contextlib
import sys
from typing import Annotated

import typer

import foredraft
from foredraft.cli import shell
from foredraft.cli.batch import batch
from foredraft.cli.bench import bench
from foredraft.cli.certify import certify
from foredraft.cli.chat import chat
from foredraft.cli.doctor import doctor
from foredraft.cli.export import export
from foredraft.cli.generate import generate
from foredraft.cli.handover import HandoverCommand, handover
from foredraft.cli.reproduce import reproduce
from foredraft.cli.serve import serve
from foredraft.cli.train import train
from foredraft.cli.version import print_version
from foredraft.cli.zoo import zoo

app = typer.Typer(
    cls=shell.RootGroup,
    name="foredraft",
    help="Lossless speculative decoding: several tokens per forward pass, with the output of plain decoding.",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        sys.stdout.write(f"foredraft {foredraft.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def run_root(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Print the help if no command is given. `--help` prints the `help` of `app` instead of this docstring."""
    if ctx.invoked_subcommand is None:
        with contextlib.redirect_stdout(sys.stderr):  # typer itself prints the help, if Rich is installed
            ctx.get_help()
        raise typer.Exit(shell.MISUSED)


app.command("batch", cls=shell.Command)(batch)
app.command("certify", cls=shell.Command)(certify)
app.command("chat", cls=shell.Command)(chat)
app.command("doctor", cls=shell.Command)(doctor)
app.command("export")(export)
app.command("generate", cls=shell.Command)(generate)
app.command("handover", cls=HandoverCommand)(handover)
app.command("reproduce", cls=shell.Command)(reproduce)
app.command("serve", cls=shell.Command)(serve)
app.command("train")(train)
app.command("version")(print_version)
app.add_typer(bench, name="bench")
app.add_typer(zoo, name="zoo")
