"""`foredraft generate`: text from prompts with speculative decoding, and its speed figures.

With --compare, `foredraft.cli.compare` measures every method against plain decoding.
"""

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.style import Style

from foredraft.cli import compare
from foredraft.cli.backend import (
    CliBackend,
    CliChoices,
    CliGenerator,
    CliPrompt,
    choose_default_method,
    find_model_methods,
)
from foredraft.cli.generate_options import GenerateOptions
from foredraft.cli.options import AUTO, NONE, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.prompts import read_predictions, read_prompts
from foredraft.cli.render import Screen, StreamPrinter
from foredraft.cli.shell import FAILED, UsageError, print_line
from foredraft.cli.simulation import describe_simulation, read_drafter_options
from foredraft.cli.speed_figures import SpeedFigures, encode_completion
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Origin

if TYPE_CHECKING:
    from foredraft.request_options import RequestOptions
    from foredraft.sampling.params import Sampling

FIXED_DRAFT_TOKENS = 3  # draft length in tokens of the row that --compare adds for a method that hardly drafted


@with_options(GenerateOptions)
def generate(ctx: typer.Context, options: GenerateOptions) -> None:
    """Generate text from a prompt with speculative decoding; the output is that of plain decoding.

    Decoding is greedy unless --temperature is given. The text goes to standard output, the figures to standard error.
    """
    options = read_drafter_options(options)
    screen = Screen(options.no_color)
    prompts = read_prompts(_read_prompt_argument(options), options.file)
    predictions = read_predictions(options.prediction or [], len(prompts))
    backend: CliBackend = ctx.obj or CliBackend()
    # The screen writes to the real standard output; anything that a library prints goes to standard error.
    with contextlib.redirect_stdout(sys.stderr):
        with ProgressBar(screen.err, "loading"):
            sampling, choices = options.build_sampling(), backend.list_choices()
            request_options = [options.build_request_options(prediction) for prediction in predictions]
            first = None
            if options.spec_model and not options.methods:
                first = find_model_methods(options.spec_model, backend)
            job = GenerateJob(
                backend, options, choices, prompts, sampling, request_options, screen,
                select_methods(options, choices, first),
            )  # fmt: skip
            generators = job.load()
        if not options.chat and generators[next(iter(generators))].has_chat_template:
            print_line("note: the model has a chat template; --chat applies it, `foredraft chat` is a conversation")
        completions = job.run(generators)
    errors = [c.error or "the request failed" for c in completions if c.finish_reason == "error"]
    for error in errors:
        print_line(f"error: {error}")
    if errors:
        raise typer.Exit(FAILED)


def _read_prompt_argument(options: GenerateOptions) -> str | None:
    """Return the prompt of the command line, given as an argument or with --prompt."""
    given = options.prompt_option or ()
    if options.prompt is not None and given:
        raise UsageError("the prompt is given as an argument and with --prompt; give it once")
    if len(given) > 1:
        raise UsageError("--prompt is given twice; give it once, or each prompt in a file with --file")
    return given[0] if given else options.prompt


def select_methods(options: GenerateOptions, choices: CliChoices, spec_model_method: str | None = None) -> list[str]:
    """Return the methods to run; the text of the first one is shown.

    Args:
        options: options of the command.
        choices: valid names.
        spec_model_method: method of --spec-model, used if no --spec-method is given. Default None = no --spec-model.

    Raises:
        UsageError: a name is unknown, or options contradict each other.
    """
    choices.check(options)
    methods = options.methods
    if options.logprobs is not None and not options.as_json:
        raise UsageError("--logprobs are printed with --json only; add --json")
    if options.compare and (options.prediction or options.draft_length == 0):
        raise UsageError("--compare measures drafting methods; leave --prediction and --spec-tokens 0 out")
    if options.compare and options.adapter_folders:
        raise UsageError("--compare measures drafting methods on the model itself; leave --lora out")
    if options.prediction and options.draft_length == 0:
        raise UsageError("a prediction is a draft, and --spec-tokens 0 drafts nothing; leave one of the two out")
    if len(methods) > 1 and not options.compare:
        raise UsageError("several methods need --compare; without it give one --spec-method")
    if methods:
        return methods
    spec_model_method = spec_model_method or choose_default_method(options.model, choices)
    return (
        [spec_model_method, *(name for name in choices.methods if name != spec_model_method)]
        if options.compare
        else [spec_model_method]
    )


@dataclass
class GenerateJob:
    """One call of `foredraft generate`: loads the generators, shows the text, prints the figures."""

    backend: CliBackend
    options: GenerateOptions
    choices: CliChoices
    prompts: list[str]
    sampling: "Sampling"
    request_options: "Sequence[RequestOptions]"  # one per prompt
    screen: Screen
    methods: list[str]
    skipped: dict[str, str] = field(default_factory=dict)
    origins: Counter[Origin] = field(default_factory=Counter)

    def load(self) -> dict[str, CliGenerator]:
        """Load the generators by method name; with --compare also plain decoding."""
        if not self.options.compare:
            return {self.methods[0]: self.backend.load(self.options, self.methods[0])}
        plain = self.backend.load(self.options, NONE)
        generators = {compare.PLAIN: plain}
        for name in self.methods:
            try:
                if name != NONE:
                    generators[name] = self.backend.load_with_method(plain, self._build_method_options(name), name)
            except ForedraftError as error:
                if self.options.methods:  # an error of a method given by name ends the command
                    raise
                self.skipped[name] = str(error)
        return generators

    def _build_method_options(self, name: str) -> GenerateOptions:
        """Return the options of one method.

        Without --spec-method, --spec-model and --spec-option are for the first method only: another method could not
        read them.
        """
        keeps_settings = bool(self.options.methods) or name == self.methods[0]
        options = self.options if keeps_settings else replace(self.options, spec_model=None, spec_option=None)
        has_several = len(self.methods) > 1
        return replace(options, spec_model=None) if has_several and self.choices.is_token_only(name) else options

    def run(self, generators: dict[str, CliGenerator]) -> list[Completion]:
        """Show the text of the first loaded method, measure all methods with --compare, and print the figures."""
        shown = next((name for name in self.methods if name in generators), compare.PLAIN)
        completions, figures = self._show_text(generators[shown])
        rows = self._measure_methods(generators) if self.options.compare else []
        if self.options.as_json:
            self._print_json(completions, rows)
        else:
            self._print_figures(shown, figures, rows, generators[shown].drafter_name)
        return completions

    def _show_text(self, generator: CliGenerator) -> tuple[list[Completion], SpeedFigures]:
        """Generate once and print the text as it arrives; with --json nothing is printed here."""
        printer = StreamPrinter(self.screen, self.prompts, self.sampling.n)
        is_text = not self.options.as_json
        max_total_tokens = len(self.prompts) * self.sampling.n * self.sampling.max_tokens
        completed: dict[int, Completion] = {}
        began = time.perf_counter()
        stream = generator.stream(self._render_prompts(generator), self.sampling, options=self.request_options)
        with (
            ProgressBar(self.screen.err, "generating", max_total_tokens)
            if not self.screen.is_live
            else contextlib.nullcontext() as bar
        ):
            try:
                if is_text:
                    printer.open()
                for delta in stream:
                    self.origins.update(delta.origins)
                    if is_text:
                        printer.show(delta)
                    if bar:
                        bar.advance(len(delta.token_ids))
                    if delta.completion is not None:
                        completed[delta.index] = delta.completion
            finally:
                if is_text:
                    printer.close()
        completions = [completed[index] for index in sorted(completed)]
        return completions, SpeedFigures.from_completions(completions, time.perf_counter() - began)

    def _render_prompts(self, generator: CliGenerator) -> list[CliPrompt]:
        """Return the prompts as the model reads them: with --chat, token ids of the chat template."""
        images = self.options.image or []
        if images and not self.options.chat:
            from foredraft.image_prompt import ImagePrompt

            return [ImagePrompt(prompt, images) for prompt in self.prompts]
        if not self.options.chat:
            return list(self.prompts)
        if not generator.has_chat_template:
            raise ForedraftError(
                "the model has no chat template; leave --chat out, or use `foredraft chat`, which takes --chat-template"
            )
        if images:
            parts = [{"type": "image", "image": path} for path in images]
            contents = [[*parts, {"type": "text", "text": prompt}] for prompt in self.prompts]
            return [generator.encode_image_chat([{"role": "user", "content": content}]) for content in contents]
        return [generator.encode_chat([{"role": "user", "content": prompt}]) for prompt in self.prompts]

    def _measure_methods(self, generators: dict[str, CliGenerator]) -> list[compare.MethodRow]:
        runs = len(generators) * (self.options.repeats + 1)
        with ProgressBar(self.screen.err, "measuring", runs) as bar:
            measured = compare.measure(
                generators,
                self._render_prompts(generators[compare.PLAIN]),
                self.sampling,
                self.options.repeats,
                lambda name: bar.advance(1, f"measuring {name}"),
            )
        rows = compare.build_rows(measured, self.skipped, self.sampling, self.choices.rules)
        return self._add_fixed_length_rows(generators, rows)

    def _add_fixed_length_rows(
        self, generators: dict[str, CliGenerator], rows: list[compare.MethodRow]
    ) -> list[compare.MethodRow]:
        """Add a row with a fixed draft length for every method given by name that hardly drafted.

        A new head would otherwise show acceptance length 1.00, as if it were broken. All rows are measured again, so
        that every speed-up is the ratio of two rates in the table.
        """
        named_methods = self.options.methods or (self.methods[:1] if self.options.spec_model else [])
        idle = [row.method for row in rows if row.method in named_methods and row.is_idle]
        if not idle or self.options.draft_length is not None:
            return rows
        plain = generators[compare.PLAIN]
        all_generators = dict(generators)
        for name in idle:
            options = replace(self._build_method_options(name), spec_tokens=str(FIXED_DRAFT_TOKENS))
            all_generators[f"{name}:{FIXED_DRAFT_TOKENS}"] = self.backend.load_with_method(plain, options, name)
        measured = compare.measure(
            all_generators, self._render_prompts(plain), self.sampling, self.options.repeats, lambda _: None
        )
        return compare.build_rows(measured, self.skipped, self.sampling, self.choices.rules)

    def _print_figures(
        self, shown: str, figures: SpeedFigures, rows: Sequence[compare.MethodRow], drafter: str
    ) -> None:
        if self.screen.is_live:
            self.screen.print_legend(self.origins)
        line = figures.summary
        if rows:
            self.screen.print_table(rows)
            for note in compare.build_notes(rows):
                self.screen.print_note(note, Style(dim=True))
            row = next(row for row in rows if row.method == shown)
            line = f"{shown}: {row.figures.summary}" if row.figures else line
            if row.speed_up is not None:
                line += f" · {row.speed_up:.2f}x plain decoding"
        if shown == AUTO:  # the drafter's name lists the methods that `auto` chose
            line += f" · {drafter}"
        rule = self.choices.rules.get(self.options.verify)  # None = "auto", which chooses lossless rules
        if rule is not None and not rule.is_lossless:
            line += f" · lossy rule {rule.name}"
        if self.options.spec_simulate is not None:
            line += f" · {describe_simulation(self.options.spec_simulate)}"
        self.screen.print_note(line, Style(bold=True))

    def _print_json(self, completions: Sequence[Completion], rows: Sequence[compare.MethodRow]) -> None:
        result: dict[str, Any] = {"completions": [encode_completion(c, self.choices.rules) for c in completions]}
        if self.options.compare:
            result["compare"] = [row.json for row in rows]
        self.screen.out.file.write(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")
