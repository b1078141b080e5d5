"""`foredraft batch`: requests from a file, answered into a file; an interrupted job goes on where it was.

The job is in `foredraft.batch`; this file turns options into a job and shows progress.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.adapter_options import AdapterOptions
from foredraft.cli.backend import CliBackend, load_llm, resolve_single_method
from foredraft.cli.engine_options import LOAD_PANEL, EngineOptions
from foredraft.cli.image_options import ImageInputOptions
from foredraft.cli.model_list import is_named
from foredraft.cli.options import ModelOptions, _make_option, _parse_value, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.serve import read_model_name
from foredraft.cli.shell import UsageError, print_line
from foredraft.cli.simulation import describe_simulation, read_drafter_options
from foredraft.errors import ForedraftError, format_install_command

if TYPE_CHECKING:
    from rich.console import Console

    from foredraft.batch.job import JobCounts
    from foredraft.batch.job_files import JobFiles, JobKey
    from foredraft.batch.line import BatchInput, BatchLine, LineFormat
    from foredraft.batch.processor import LineProcessor

REQUEST_PANEL, CLUSTER_PANEL = "Requests", "Cluster"
PLAIN_FIELDS = {"temperature": 0.0, "max_tokens": 128}  # of plain prompts, as in `foredraft generate`
BLOCK_LINES = 8  # lines of a block on a cluster for each request that runs at a time: a block ends with few
PROGRESS_PARTS = 20  # without a terminal, a line is printed after each twentieth of the lines
INSTALL_ERROR = f"foredraft batch needs the packages of the server: {format_install_command('serve')}"
# Options that do not change the results.
NEUTRAL_OPTIONS = frozenset(
    f.name for f in fields(ModelOptions) if f.name.startswith("spec_") or f.name == "speculative_config"
)


@dataclass(frozen=True, kw_only=True)
class BatchOptions(ImageInputOptions, EngineOptions, AdapterOptions):
    """Options of `foredraft batch`."""

    source: Annotated[
        Path,
        typer.Argument(
            help="File of requests: OpenAI's batch format, prompts or messages as JSON lines, or *.txt with a prompt "
            "per line.",
            metavar="IN.jsonl",
        ),
    ]
    out: Annotated[Path, typer.Argument(help="File of the results, one line for each request.", metavar="OUT.jsonl")]
    max_tokens: Annotated[
        int | None,
        _make_option(
            "Longest output of requests that name none, in tokens. Default: 128 for prompts, else OpenAI's.",
            panel=REQUEST_PANEL,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _make_option(
            "Sampling temperature of requests that name none. Default: 0 for prompts, else 1, as OpenAI's.",
            panel=REQUEST_PANEL,
        ),
    ] = None
    field: Annotated[
        list[str] | None,
        _make_option(
            "Further field of requests that leave it out, such as top_p=0.9; repeatable.",
            panel=REQUEST_PANEL,
            metavar="KEY=VALUE",
        ),
    ] = None
    chat: Annotated[
        bool, _make_option("A plain prompt is a message to the chat template.", "--chat", panel=REQUEST_PANEL)
    ] = False
    seed: Annotated[
        int,
        _make_option(
            "Seed of the job: a request without a seed gets this one plus its line number.", panel=REQUEST_PANEL
        ),
    ] = 0
    served_model_name: Annotated[
        str | None,
        _make_option(
            "Name of the model in requests and results. Default: the folder's name or Hub id.", panel=REQUEST_PANEL
        ),
    ] = None
    unordered: Annotated[
        bool, _make_option("Write results as they come, not in the order of the requests.", "--unordered")
    ] = False
    threads: Annotated[
        int | None,
        typer.Option(
            help="Number of CPU threads, of each replica with --ray. Default: all cores.",
            rich_help_panel=LOAD_PANEL,
            min=1,
        ),
    ] = None
    ray: Annotated[
        bool,
        _make_option(
            "Run on the cluster of the environment variable RAY_ADDRESS, else on Ray on this machine.",
            "--ray",
            panel=CLUSTER_PANEL,
        ),
    ] = False
    replicas: Annotated[
        int | None,
        typer.Option(
            help="With --ray: models that run at the same time. Default: one for each GPU, or for each machine.",
            rich_help_panel=CLUSTER_PANEL,
            min=1,
        ),
    ] = None

    def build_format(self) -> "LineFormat":
        """Return how lines are read. Raises UsageError for a field that is not KEY=VALUE."""
        from foredraft.batch.line import TEXT_SUFFIXES, LineFormat

        given: dict[str, Any] = {}
        for text in self.field or []:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise UsageError(f"--field takes KEY=VALUE, got {text!r}")
            given[key.strip()] = _parse_value(value)
        for name in ("max_tokens", "temperature"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.chosen_adapter is not None:
            given.setdefault("model", self.chosen_adapter)
        is_text = self.source.suffix.lower() in TEXT_SUFFIXES
        return LineFormat(is_text, self.chat, PLAIN_FIELDS, given, self.seed)

    def build_key(self, examined: "BatchInput", line_format: "LineFormat") -> "JobKey":
        """Return what the results depend on."""
        from foredraft.batch.job_files import JobKey

        model = {f.name: getattr(self, f.name) for f in fields(ModelOptions) if f.name not in NEUTRAL_OPTIONS}
        settings = model | {
            "fields": line_format.fields, "seed": self.seed, "chat": self.chat, "name": self.read_name()
        }  # fmt: skip
        if self.adapter_folders:  # not otherwise, so that jobs of earlier versions go on
            settings["lora"] = self.adapter_folders
        if self.max_images:
            settings |= {"max_images": self.max_images, "media_folder": self.media_folder}
        created = int(self.source.stat().st_mtime)
        return JobKey(examined.digest, json.dumps(settings, sort_keys=True), not self.unordered, created)

    def read_name(self) -> str:
        """Return the name of the model in requests and results."""
        return self.served_model_name or read_model_name(self.model)


@with_options(BatchOptions)
def batch(ctx: typer.Context, options: BatchOptions) -> None:
    """Answer all requests of a file, as the server would, and write one line for each.

    Results have the order of the requests. A job that was interrupted, even by kill -9, goes on with the same command.

    Example: foredraft batch prompts.txt results.jsonl
    """
    options = read_drafter_options(options)
    if options.read_name() in options.adapter_folders:
        raise UsageError(f"--lora gives the name of the model, {options.read_name()}; choose another one")
    if options.model is not None and is_named(options.model):
        raise UsageError("a batch has one model; give --model PATH, and its name with --served-model-name")
    backend: CliBackend = ctx.obj or CliBackend()
    method = resolve_single_method(options, backend, "a batch")
    kv_memory, _ = options.kv_bytes, options.media_folder  # errors of options come first
    if options.draft_length == 0:
        raise UsageError("--spec-tokens 0 is for one call; a batch without drafts has --spec-method none")
    if options.replicas is not None and not options.ray:
        raise UsageError("--replicas is for --ray; add it, or leave --replicas out")
    try:
        from foredraft.batch.job import JobCounts
        from foredraft.batch.job_files import JobFiles
        from foredraft.batch.line import examine_input, read_lines
    except ModuleNotFoundError as error:
        if str(error.name).startswith("foredraft"):
            raise
        raise ForedraftError(INSTALL_ERROR) from None
    if options.spec_simulate is not None:
        print_line(f"note: {describe_simulation(options.spec_simulate)}")
    line_format = options.build_format()
    examined = examine_input(options.source, line_format)
    files, counts = JobFiles(options.out, options.build_key(examined, line_format)), JobCounts()
    with contextlib.redirect_stdout(sys.stderr), files.open():
        left = examined.num_lines - len(files.done)
        if files.done:
            print_line(f"{len(files.done)} of {examined.num_lines} results are there already")
        if left:
            lines = read_lines(options.source, line_format)
            _run(options, partial(load_processor, options, method, kv_memory), lines, BatchRun(files, counts, left))
        files.finish()
    failed = f"; {counts.num_failed} failed, with an error in their lines" if counts.num_failed else ""
    print_line(f"{examined.num_lines} results in {options.out}, {counts.num_tokens} output tokens in this run{failed}")


@dataclass(frozen=True)
class BatchRun:
    """Files and counts of a run, and the number of lines without a result."""

    files: "JobFiles"
    counts: "JobCounts"
    left: int


def _run(
    options: BatchOptions,
    load: "Callable[[int | None], LineProcessor]",
    lines: "Iterable[BatchLine]",
    run: BatchRun,
) -> None:
    """Process all lines that have no result, in this process or on a cluster."""
    from foredraft.batch.job import BatchJob

    console = make_console(sys.stderr, False)
    if options.ray:
        from foredraft.batch.ray_job import RayOptions, process_with_ray

        with ProgressBar(console, "answering", run.left, has_time_left=True) as bar:
            job = BatchJob(run.files, run.counts, _make_report(bar, run.left, console))
            asked = RayOptions(options.replicas, options.threads, options.device)
            block = BLOCK_LINES * options.max_batch
            for result in process_with_ray(job.select_pending(lines), load, asked, block, not options.unordered):
                job.add(result)
        return
    with ProgressBar(console, "loading"):
        processor = load(options.threads)
    with contextlib.closing(processor), ProgressBar(console, "answering", run.left, has_time_left=True) as bar:
        job = BatchJob(run.files, run.counts, _make_report(bar, run.left, console))
        asyncio.run(job.run(lines, processor))


def load_processor(options: BatchOptions, method: str, kv_memory: int | None, threads: int | None) -> "LineProcessor":
    """Load the model in the process that is to run it.

    Args:
        options: options of the command.
        method: drafting method.
        kv_memory: bytes of the KV cache; None = chosen.
        threads: CPU threads; None = torch's default.
    """
    import torch

    from foredraft.batch.processor import LineProcessor
    from foredraft.llm import MemoryLimits

    if threads is not None:
        torch.set_num_threads(threads)
    kv_limit: dict[str, Any] = {} if kv_memory is None else {"kv_memory": kv_memory}
    llm = load_llm(options, method, MemoryLimits(max_batch=options.max_batch, **kv_limit))
    if llm.is_adaptive:
        llm.calibrate()
    return LineProcessor(llm, options.read_name(), options.make_limits(), options.media_folder)


def _make_report(bar: ProgressBar, total: int, console: "Console") -> "Callable[[JobCounts], None]":
    """Return a function that shows progress: on the bar, or as lines without a terminal."""
    step = max(1, total // PROGRESS_PARTS)

    def report(counts: "JobCounts") -> None:
        bar.advance(1)
        if not console.is_terminal and counts.num_written % step == 0:
            print_line(f"{counts.num_written} of {total} results, {counts.num_failed} failed")

    return report
