"""`foredraft certify`: checks that a target with a drafter produces what the target alone would produce.

The checks are in `foredraft.certify`; this file turns options into a plan and prints the certificate.
"""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from foredraft.cli.backend import CliBackend, load_llm, resolve_single_method
from foredraft.cli.options import NONE, ModelOptions, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.shell import FAILED, UsageError
from foredraft.cli.simulation import read_drafter_options

if TYPE_CHECKING:
    from foredraft.bench.report import ReportOutputs
    from foredraft.certify.certificate import Certificate

PANEL = "Checks"
PASSED_STYLE, FAILED_STYLE = Style(color="green"), Style(color="red", bold=True)
DEFAULT_SETS = ("editing", "code")  # built-in prompts of decoders; drafters that copy draft on the first
DEFAULT_SOURCE_SET = "corrections"  # built-in prompts of encoder-decoders


@dataclass(frozen=True)
class CertifyOptions(ModelOptions):
    """Options of `foredraft certify`."""

    prompts: Annotated[
        int, typer.Option(help="Number of prompts of the whole outputs.", rich_help_panel=PANEL, min=1)
    ] = 8
    questions: Annotated[
        Path | None,
        typer.Option(
            help='JSONL file of {"turns": ["..."]}, of which the first turns are used. Default: built-in prompts.',
            rich_help_panel=PANEL,
        ),
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Tokens of every whole output.", rich_help_panel=PANEL, min=2)] = 48
    samples: Annotated[
        int,
        typer.Option(
            help="Samples of each of two prompts, for each verification rule. Four times as many find half the bias.",
            rich_help_panel=PANEL,
            min=100,
        ),
    ] = 2000
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads. Default: torch's default.", rich_help_panel=PANEL, min=1)
    ] = None
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the certificate to this JSON file.", rich_help_panel=PANEL)
    ] = None
    no_color: Annotated[
        bool,
        typer.Option("--no-color", help="Print without colours, as with NO_COLOR in the environment."),
    ] = False

    def build_outputs(self) -> "ReportOutputs":
        """Return the output file. Raises ForedraftError if it cannot be written."""
        from foredraft.bench.report import ReportOutputs

        outputs = ReportOutputs(self.json)
        outputs.check()
        return outputs


@with_options(CertifyOptions)
def certify(ctx: typer.Context, options: CertifyOptions) -> None:
    """Check on this machine that drafting does not change the output of a model, and print the evidence.

    Outputs are compared with plain decoding; the distribution of sampled tokens is tested against the probabilities of
    the target. Exit code 0: passed, 1: a check failed.

    Example: foredraft certify --model Qwen/Qwen2.5-0.5B --spec-method ngram
    """
    options = read_drafter_options(options)
    backend: CliBackend = ctx.obj or CliBackend()
    if options.draft_length == 0 or options.methods == [NONE]:
        raise UsageError("certify compares drafts with plain decoding; name a drafter with --spec-method")
    method = resolve_single_method(options, backend, "a certificate")
    outputs = options.build_outputs()
    screen, progress = make_console(sys.stdout, options.no_color), make_console(sys.stderr, options.no_color)
    with contextlib.redirect_stdout(sys.stderr), ProgressBar(progress, "loading") as bar:
        certificate = _run(options, method, bar)
    print_certificate(certificate, screen)
    if outputs.json is not None:
        outputs.json.write_text(certificate.json, encoding="utf-8")
    if not certificate.is_passed:
        raise typer.Exit(FAILED)


def _run(options: CertifyOptions, method: str, bar: ProgressBar) -> "Certificate":
    import torch

    from foredraft.certify import CertifyPlan
    from foredraft.certify import certify as run

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    llm = load_llm(options, method)
    prompts = _load_prompts(options, llm.target.has_encoder)
    plan = CertifyPlan(prompts, options.max_tokens, options.samples, tuple(options.spec_model or ()))
    return run(llm, plan, lambda title: bar.advance(0, title))


def _load_prompts(options: CertifyOptions, has_encoder: bool) -> tuple[str, ...]:
    """Load the prompts of the file, or built-in ones for the kind of model."""
    from foredraft.bench.questions import load_questions

    if options.questions is not None:
        return tuple(question.turns[0] for question in load_questions(options.questions, options.prompts))
    names = (DEFAULT_SOURCE_SET,) if has_encoder else DEFAULT_SETS
    prompts: list[str] = []
    for number, name in enumerate(names):
        count = (options.prompts + len(names) - 1 - number) // len(names)
        prompts += [question.turns[0] for question in load_questions(Path(name), count)] if count else []
    return tuple(prompts)


def print_certificate(certificate: "Certificate", screen: Console) -> None:
    """Print the certificate as one page."""
    for name, value in certificate.conditions.items():
        screen.print(Text(f"{name:12} {value}"), soft_wrap=True)
    screen.print()
    for result in certificate.results:
        line = Text()
        style = PASSED_STYLE if result.is_passed else FAILED_STYLE
        line.append("passed  " if result.is_passed else "FAILED  ", style).append(result.name, Style(bold=True))
        screen.print(line)
        screen.print(Padding(Text(result.evidence), (0, 0, 0, 8)))
    screen.print()
    style = PASSED_STYLE if certificate.is_passed else FAILED_STYLE
    screen.print(Text(f"{certificate.verdict} ({certificate.seconds:.0f} s)", style))
