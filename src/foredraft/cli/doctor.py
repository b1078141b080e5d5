"""`foredraft doctor`: model, drafters and machine on one page, and the speed-up to expect.

The measurements are in `foredraft.doctor`; this file turns options into a plan and prints the diagnosis.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foredraft.cli.backend import CliBackend, load_llm
from foredraft.cli.doctor_options import DoctorOptions, build_candidates, build_command
from foredraft.cli.doctor_page import build_page, print_page
from foredraft.cli.options import NONE, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.prompts import read_prompts
from foredraft.cli.render import make_console
from foredraft.cli.shell import UNFIT, UsageError
from foredraft.cli.simulation import read_drafter_options

if TYPE_CHECKING:
    from foredraft.doctor.diagnosis import Diagnosis


@with_options(DoctorOptions)
def doctor(ctx: typer.Context, options: DoctorOptions) -> None:
    """Examine model, drafter and machine: which method and settings, and what speed-up to expect.

    Measures acceptance and costs for --seconds, and predicts the speed-up by the number of streams from them. Exit code
    3 means that a given drafter cannot save time or does not fit.
    """
    options = read_drafter_options(options)
    if options.spec_simulate is not None:
        raise UsageError(
            "foredraft doctor measures drafters, and --spec-simulate has none; `foredraft bench load` measures it"
        )
    backend: CliBackend = ctx.obj or CliBackend()
    screen = make_console(sys.stdout, options.no_color)
    with (
        contextlib.redirect_stdout(sys.stderr),
        ProgressBar(make_console(sys.stderr, options.no_color), "loading") as bar,
    ):
        diagnosis = _examine(options, backend, lambda title: bar.advance(0, title))
    command = recommend_command(options, diagnosis)
    if options.as_json:
        sys.stdout.write(json.dumps(diagnosis.json | {"command": command}, ensure_ascii=False) + "\n")
    else:
        print_page(build_page(diagnosis, command), screen)
    if diagnosis.has_unfit_drafter:
        raise typer.Exit(UNFIT)


def _examine(options: DoctorOptions, backend: CliBackend, on_progress: Callable[[str], None]) -> "Diagnosis":
    sampling, streams = options.build_doctor_sampling(), options.parse_streams()
    candidates = build_candidates(options, backend)
    texts = read_prompts(None, options.prompts) if options.prompts else []
    from foredraft.bench.questions import load_questions
    from foredraft.doctor.run import DoctorPlan, run
    from foredraft.llm import MemoryLimits

    options.set_threads()
    llm = load_llm(options, NONE, MemoryLimits(max_batch=max(MemoryLimits().max_batch, *streams)))
    workload = "corrections" if llm.target.has_encoder else "code"
    plan = DoctorPlan(
        candidates=candidates,
        prompts=tuple(texts or [question.turns[0] for question in load_questions(Path(workload), None)]),
        sampling=sampling,
        seconds=options.seconds,
        streams=streams,
        is_checked=options.check,
        quantization=options.quantization,
        context=options.context,
    )
    return run(plan, llm, on_progress)


def recommend_command(options: DoctorOptions, diagnosis: "Diagnosis") -> str:
    """Return the command with the settings of the verdict: a server if several streams were examined."""
    verdict = diagnosis.verdict
    spec = {} if verdict.drafter is None else verdict.drafter.candidate.spec
    is_server = options.parse_streams() != (1,)
    return build_command(options, spec, verdict.spec_tokens, is_server)
