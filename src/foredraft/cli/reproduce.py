"""`foredraft reproduce`: claims of the literature, each measured by one command.

The measurements are in `foredraft.reproduce`; this file turns options into a run and prints the findings.
"""

import contextlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.backend import silence_transformers
from foredraft.cli.options import with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.shell import UsageError, print_line

if TYPE_CHECKING:
    from foredraft.reproduce.claim import Claim
    from foredraft.reproduce.record import ClaimRecord
    from foredraft.reproduce.workbench import ReproduceOptions

ALL = "all"  # in place of names: every claim that the options allow
DEFAULT_OUT = Path("figures")


@dataclass(frozen=True)
class ReproduceArguments:
    """Arguments and options of `foredraft reproduce`."""

    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of claims, or 'all' for every claim that the options allow. Default: list them."),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder of tables, JSON files, plots and the overview.")] = DEFAULT_OUT
    quick: Annotated[
        bool, typer.Option("--quick", help="Check in seconds that the command works; the figures mean nothing.")
    ] = False
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or Hub id of the target. Default: the built-in models.")
    ] = None
    spec_model: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the draft model or head for --model. Default: built-in.")
    ] = None
    heads: Annotated[
        str | None, typer.Option(help="Folder of Medusa heads for the claim medusa_heads. Default: the built-in ones.")
    ] = None
    undistilled: Annotated[
        str | None,
        typer.Option(
            help="Folder of a draft model trained without the target, for the claim distillation; "
            "`foredraft zoo train --undistilled` writes zoo/draft-undistilled."
        ),
    ] = None
    questions: Annotated[
        Path | None, typer.Option(help="Question file, or the name of a built-in workload. Default: code.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads. Default: torch's default.")] = None

    def build_options(self) -> "ReproduceOptions":
        """Build the options of the measurements."""
        from foredraft.reproduce.workbench import ReproduceOptions

        return ReproduceOptions(self.model, self.spec_model, self.heads, self.undistilled, self.questions, self.quick)

    def format_command(self, claim: "Claim") -> str:
        """Format the command of one claim, without the parents of folders: pages name no paths of a machine."""
        words = ["foredraft", "reproduce", claim.name]
        for name in ("model", "spec_model", *filter(None, [claim.extra]), "questions"):
            value = getattr(self, name)
            if value is not None:
                text = Path(value).name if Path(value).exists() else str(value)
                words += [f"--{name.replace('_', '-')}", text]
        if self.threads is not None:
            words += ["--threads", str(self.threads)]
        if self.quick:
            words += ["--quick"]
        return shlex.join([*words, "--out", self.out.name if self.out.is_absolute() else str(self.out)])


@with_options(ReproduceArguments)
def reproduce(ctx: typer.Context, options: ReproduceArguments) -> None:
    """Measure claims of the literature on speculative decoding, and write a table and a plot of each.

    Without names it lists the claims with their papers and expected minutes on two cores. Models that a claim needs are
    made of the built-in ones, unless --model and --spec-model give others.
    """
    names = options.names or []
    if not names:
        _print_claims()
        return
    import torch

    from foredraft.reproduce.registry import find_claim
    from foredraft.reproduce.runner import ReproduceRun, select_possible

    settings = options.build_options()
    if ALL in names and len(names) > 1:
        raise UsageError("'all' stands for every claim; give it alone")
    claims = select_possible(settings) if names == [ALL] else tuple(map(find_claim, dict.fromkeys(names)))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    silence_transformers()
    with contextlib.redirect_stdout(sys.stderr), ProgressBar(make_console(sys.stderr, False), "loading") as bar:
        run = ReproduceRun(
            claims, settings, options.out, options.format_command, lambda title: bar.advance(0, title), _print_record
        )
        run.run()
    print_line(f"tables, figures and the overview README.md are in {options.out}")


def _print_claims() -> None:
    from foredraft.reproduce.registry import CLAIMS

    for claim in CLAIMS:
        papers = ", ".join(source.paper for source in claim.sources)
        sys.stdout.write(f"{claim.name:<14}{claim.minutes:>3g} min  {claim.statement} ({papers})\n")


def _print_record(record: "ClaimRecord") -> None:
    print_line(f"{record.name}: {record.seconds / 60:.1f} minutes")
    for finding in record.findings:
        print_line(f"  {finding}")
