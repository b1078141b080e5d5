"""`foredraft bench`: measurements of methods, load, other programs and kernels.

The measurements are in `foredraft.bench`; this file turns options into plans and prints reports.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.style import Style
from rich.text import Text

from foredraft.cli.backend import silence_transformers
from foredraft.cli.bench_options import CompareOptions, LatencyOptions, LoadOptions, MicroOptions
from foredraft.cli.options import with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.shell import Command, UsageError, print_line
from foredraft.cli.tables import Grid, print_grid

if TYPE_CHECKING:
    from foredraft.bench.compare_report import CompareBench as CompareJob
    from foredraft.bench.latency_report import LatencyBench
    from foredraft.bench.load_report import LoadBench as LoadJob
    from foredraft.bench.report import BenchReport

bench = typer.Typer(no_args_is_help=False)


@bench.callback()
def describe_group() -> None:
    """Measure speed: drafting methods, concurrent requests, other programs, kernels."""


@bench.command("grow")
def grow_model(
    params: Annotated[str, typer.Option(help="Number of parameters of the enlarged model, such as 430M or 1.5B.")],
    out: Annotated[Path, typer.Option(help="Folder for the enlarged model; it must be new or empty.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id of a Llama or T5 model, or builtin-seq2seq. Default: the built-in target."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the added random weights; they do not change the output.")] = 0,
) -> None:
    """Enlarge a Llama or T5 model so that it computes the same function at the cost of a larger model.

    The acceptance rate is that of the original model. Reports on an enlarged model name its origin.
    """
    from foredraft.bench import grow as growth

    size = growth.parse_size(params)
    silence_transformers()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {str(out)!r} exists and is not an empty folder; give another")
    shape = growth.grow_to(model, size, out, seed)
    print_line(
        f"{out}: {shape.parameters / 1e6:.1f}M parameters, {shape}; it writes the text of "
        f"{model or 'the built-in target'}"
    )


@bench.command("latency", cls=Command)
@with_options(LatencyOptions)
def measure_latency(ctx: typer.Context, options: LatencyOptions) -> None:
    """Measure drafting methods against plain decoding, one request at a time.

    All methods use the same weights and prompts, and alternate prompt by prompt.
    """
    screen = make_console(sys.stdout, options.no_color)
    progress = make_console(sys.stderr, options.no_color)
    with contextlib.redirect_stdout(sys.stderr):
        outputs = options.build_outputs()
        with ProgressBar(progress, "loading") as bar:
            options.set_threads()
            job = _build_latency_job(options, lambda title: bar.advance(0, title))
            report = job.run()
    print_report(report, screen)
    outputs.write(report, job.save_plot)


def _build_latency_job(options: LatencyOptions, step: Callable[[str], None]) -> "LatencyBench":
    from foredraft.bench import latency_report, methods, questions, verify_cost
    from foredraft.drafters.registry import load_methods as registered
    from foredraft.llm import LLM

    method_names = sorted(registered())
    plan = latency_report.LatencyBenchPlan(
        methods=tuple(methods.parse_all(options.methods or method_names, method_names)),
        is_default=not options.methods,
        questions=() if options.prompts == 0 else tuple(questions.load_questions(options.questions, options.prompts)),
        sampling=options.build_sampling(),
        rounds=options.rounds,
        spec_model=options.spec_model,
        quantization=options.quantization,
        verify_rows=tuple(verify_cost.parse_rows(options.verify_cost)) if options.verify_cost else (),
        context=options.context,
    )
    if not plan.questions and not plan.verify_rows:
        raise UsageError("--prompts 0 leaves nothing to measure; add --verify-cost 1,2,4,8,16")
    silence_transformers()
    llm = LLM(
        options.model or "builtin",
        None,
        dtype=options.dtype,
        device=options.device,
        verify=options.verify,
        **options.llm_options,
    )
    return latency_report.LatencyBench(plan, llm, step)


@bench.command("compare", cls=Command)
@with_options(CompareOptions)
def compare_programs(ctx: typer.Context, options: CompareOptions) -> None:
    """Measure transformers, llama.cpp and vLLM beside Foredraft, each in its own Python environment.

    All programs decode the same prompts greedily with the same weights, in turn. A program without a given Python is
    reported as absent, and a program that fails as failed.
    """
    screen = make_console(sys.stdout, options.no_color)
    progress = make_console(sys.stderr, options.no_color)
    with contextlib.redirect_stdout(sys.stderr):
        outputs = options.build_outputs()
        with ProgressBar(progress, "loading") as bar:
            job = _build_compare_job(options, lambda title: bar.advance(0, title))
            report = job.run()
    print_report(report, screen)
    outputs.write(report, job.save_plot)


def _build_compare_job(options: CompareOptions, step: Callable[[str], None]) -> "CompareJob":
    from foredraft.bench import compare_report, methods, questions, stream_speeds, verify_cost
    from foredraft.bench.participants import PeerPythons
    from foredraft.drafters.registry import load_methods as registered

    method_names = sorted(registered())
    quantizations = options.parse_quantizations()
    silence_transformers()
    own = Path(sys.executable)
    plan = compare_report.CompareBenchPlan(
        model=options.model,
        spec_model=options.spec_model,
        pythons=PeerPythons(own, options.transformers or own, options.llama_cpp, options.vllm),
        methods=tuple(methods.parse_all(options.methods or method_names, method_names)),
        questions=() if options.prompts == 0 else tuple(questions.load_questions(options.questions, options.prompts)),
        dtype=options.dtype,
        threads=options.set_threads(),
        max_tokens=options.max_tokens,
        draft_tokens=options.spec_tokens,
        lookup=(options.lookup_tokens, options.lookup_match),
        quantizations=quantizations,
        verify_rows=tuple(verify_cost.parse_rows(options.verify_cost)) if options.verify_cost else (),
        context=options.context,
        settings=options.llm_options,
        streams=stream_speeds.StreamsPlan(stream_speeds.parse_streams(options.streams) if options.streams else ()),
    )
    if not plan.questions and not plan.verify_rows and not plan.streams.counts:
        raise UsageError("--prompts 0 leaves nothing to measure; add --verify-cost 1,2,4,8,16 or --streams 8,16,32,64")
    return compare_report.CompareBench(plan, step)


@bench.command("load", cls=Command)
@with_options(LoadOptions)
def measure_load(ctx: typer.Context, options: LoadOptions) -> None:
    """Measure throughput and latency by the number of concurrent requests.

    Adaptive draft lengths, fixed draft lengths and plain decoding run in turn. Latency is the time to the first token
    and the time between tokens. The engine runs in this process, or in a server given by --url.
    """
    screen = make_console(sys.stdout, options.no_color)
    progress = make_console(sys.stderr, options.no_color)
    with contextlib.redirect_stdout(sys.stderr):
        outputs = options.build_outputs()
        with ProgressBar(progress, "loading") as bar:
            options.set_threads()
            job = _build_load_job(options, lambda title: bar.advance(0, title))
            report = job.run()
    print_report(report, screen)
    outputs.write(report, job.save_plot)


def _build_load_job(options: LoadOptions, step: Callable[[str], None]) -> "LoadJob":
    from foredraft.bench import load_report, methods
    from foredraft.drafters.registry import load_methods as registered
    from foredraft.llm import LLM, MemoryLimits

    plan = options.build_plan()
    method = methods.parse(options.method, sorted(registered()))
    if "num_speculative_tokens" in method.spec:
        raise UsageError(f"--method {options.method!r} names a draft length; give lengths with --fixed and --more")
    if options.url is not None and options.worker:
        raise UsageError("--worker is for an engine in this process, --url for a server; give one of them")
    silence_transformers()
    limits = MemoryLimits(max_batch=max(plan.concurrency))
    llm = LLM(options.model or "builtin", None, dtype=options.dtype, device=options.device, limits=limits)
    (method,) = methods.attach_models([method], llm.target.model.config, options.spec_model, llm.is_builtin)
    job = load_report.LoadBench(plan, llm, dict(method.spec), step)
    if options.url is not None:
        return job.with_server(options.url, options.api_key)
    return job.with_workers() if options.worker else job


@bench.command("micro")
@with_options(MicroOptions)
def measure_kernels(ctx: typer.Context, options: MicroOptions) -> None:
    """Measure the native kernels: matrix products and attention, against memory bandwidth and torch."""
    from foredraft.bench import micro as kernels
    from foredraft.bench.report import ReportOutputs

    outputs = ReportOutputs(options.json, options.markdown)
    outputs.check()
    options.set_threads()
    with ProgressBar(make_console(sys.stderr, options.no_color), "measuring") as bar:
        report = kernels.run(options.build_plan(), lambda title: bar.advance(0, title))
    print_report(report, make_console(sys.stdout, options.no_color))
    outputs.write(report, lambda path: None)


def print_report(report: "BenchReport", screen: Console) -> None:
    """Print tables if the output is a terminal, otherwise Markdown."""
    if not screen.is_terminal:
        screen.file.write(report.markdown)
        return
    for table in report.tables:
        print_grid(screen, Grid(table.header, table.rows, table.num_name_columns, table.title))
    for note in report.notes:
        screen.print(Text(f"· {note}", Style(dim=True)))
