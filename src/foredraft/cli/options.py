"""The options of the commands, each a frozen dataclass, so that commands share them and stay short.

The words are vLLM's where vLLM has one: --spec-method, --spec-model, --spec-tokens.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foredraft.cli.shell import UsageError

if TYPE_CHECKING:
    from foredraft.sampling.params import Sampling

Options = TypeVar("Options")
NONE = "none"  # --spec-method of plain decoding...
AUTO, METHOD_SEPARATOR = "auto", "+"  # ... of the best there are, and between several


def _make_option(help: str, *names: str, panel: str | None = None, metavar: str | None = None) -> Any:  # noqa: A002
    # typer's own word is `help`
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=True)


def _parse_value(text: str) -> Any:
    """Numbers and lists as JSON; what is no JSON is a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@dataclass(frozen=True)
class ModelOptions:
    """Which models run, and where."""

    model: Annotated[
        str | None,
        _make_option(
            "Folder or Hub id of the target; the built-in model if not given.", "--model", "-m", panel="Model"
        ),
    ] = None
    spec_method: Annotated[
        list[str] | None,
        _make_option(
            "Drafting method, 'none', several together as ngram+eagle3, or 'auto', the best there are; with --compare "
            "a list, by repetition or commas. Not given: draft_model where there is a draft model, otherwise ngram.",
            panel="Model",
            metavar="METHOD",
        ),
    ] = None
    spec_model: Annotated[
        str | None,
        _make_option(
            "Folder or Hub id of the draft model or head; it says by itself which method it is.",
            "--spec-model",
            "--model-draft",
            "-md",
            panel="Model",
        ),
    ] = None
    spec_option: Annotated[
        list[str] | None,
        _make_option(
            "A further setting of the method, e.g. tree_nodes=16, or of one of several: ngram.branches=2; repeatable.",
            panel="Model",
            metavar="KEY=VALUE",
        ),
    ] = None
    quantization: Annotated[
        str | None, _make_option("int8 or int4: round the target's weights while loading.", panel="Model")
    ] = None
    spec_quantization: Annotated[str | None, _make_option("The same for the draft model.", panel="Model")] = None
    spec_vocab: Annotated[
        str | None,
        _make_option(
            "How a draft model of another vocabulary drafts: auto, tli (shared tokens alone), slem (as text).",
            panel="Model",
        ),
    ] = None
    spec_tokens: Annotated[
        str,
        _make_option(
            "Longest draft per pass; auto: as long as measurement says it pays.",
            "--spec-tokens",
            "--num-speculative-tokens",
            "--draft-max",
            panel="Model",
            metavar="auto|NUMBER",
        ),
    ] = "auto"
    verify: Annotated[str, _make_option("Rule: auto, match, reject, block; typical is lossy.", panel="Model")] = "auto"
    dtype: Annotated[str, _make_option("auto, bfloat16, float16 (or half), float32 or float64.", panel="Model")] = (
        "auto"
    )
    device: Annotated[str, _make_option("auto, cpu or cuda.", panel="Model")] = "auto"
    max_model_len: Annotated[
        int | None,
        _make_option("Context in tokens, prompt and output together; the model's own if not given.", panel="Model"),
    ] = None
    speculative_config: Annotated[
        str | None,
        _make_option(
            "The drafter as vLLM takes it: a JSON object of method, model, num_speculative_tokens and more.",
            panel="Model",
            metavar="JSON",
        ),
    ] = None
    no_fused: Annotated[
        bool, _make_option("Run the model's own modules, not native code, on CPU.", "--no-fused", panel="Model")
    ] = False

    @property
    def method_options(self) -> dict[str, Any]:
        """Further settings of the method. Raises UsageError for one that is not KEY=VALUE."""
        found = {}
        for text in self.spec_option or []:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise UsageError(f"--spec-option takes KEY=VALUE, got {text!r}")
            found[key.strip()] = _parse_value(value)
        return found

    @property
    def draft_length(self) -> int | None:
        """None = found by measurement. Raises UsageError for anything but a positive number or auto."""
        if self.spec_tokens == "auto":
            return None
        if not self.spec_tokens.isascii() or not self.spec_tokens.isdecimal() or int(self.spec_tokens) < 1:
            raise UsageError(f"--spec-tokens takes auto or a number from 1 up, got {self.spec_tokens!r}")
        return int(self.spec_tokens)

    @property
    def methods(self) -> list[str]:
        """The methods asked for, in order and once each; none = the default is wanted."""
        asked = [name.strip() for text in self.spec_method or [] for name in text.split(",")]
        return list(dict.fromkeys(name for name in asked if name))


@dataclass(frozen=True)
class SamplingOptions:
    """The fields of Sampling under their own names; the command is greedy by default."""

    temperature: Annotated[float, _make_option("0 is greedy.", panel="Sampling")] = 0.0
    top_k: Annotated[int, _make_option("Draw from this many likeliest tokens; 0 is off.", panel="Sampling")] = 0
    top_p: Annotated[float, _make_option("Draw from the smallest set of this probability.", panel="Sampling")] = 1.0
    min_p: Annotated[float, _make_option("Drop tokens below this share of the likeliest one.", panel="Sampling")] = 0.0
    typical_p: Annotated[float, _make_option("Locally typical sampling.", panel="Sampling")] = 1.0
    repetition_penalty: Annotated[float, _make_option("On prompt and output; 1 is off.", panel="Sampling")] = 1.0
    presence_penalty: Annotated[float, _make_option("On tokens already put out; 0 is off.", panel="Sampling")] = 0.0
    frequency_penalty: Annotated[float, _make_option("On their counts; 0 is off.", panel="Sampling")] = 0.0
    seed: Annotated[
        int | None, _make_option("Same seed, same text, with or without speculation.", panel="Sampling")
    ] = None
    n: Annotated[
        int,
        _make_option(
            "Samples of each prompt. The -n of llama.cpp is --max-tokens here.", "--n", "-n", panel="Sampling"
        ),
    ] = 1
    max_tokens: Annotated[int, _make_option("Longest output.", panel="Sampling")] = 128
    min_tokens: Annotated[int, _make_option("Shortest output.", panel="Sampling")] = 0
    stop: Annotated[
        list[str] | None,
        _make_option("End before this text, taken literally; repeatable.", panel="Sampling", metavar="TEXT"),
    ] = None
    stop_token_id: Annotated[
        list[int] | None, _make_option("End at this token; repeatable.", panel="Sampling", metavar="ID")
    ] = None
    ignore_eos: Annotated[bool, _make_option("Go on past the end of text.", "--ignore-eos", panel="Sampling")] = False
    logprobs: Annotated[
        int | None, _make_option("With --json: log-probabilities, with this many of the likeliest.", panel="Sampling")
    ] = None

    def build_sampling(self) -> "Sampling":
        """Raises UsageError on impossible values."""
        from foredraft.sampling.params import Sampling

        values = {spec.name: getattr(self, spec.name) for spec in fields(SamplingOptions)}
        values["stop"] = tuple(values["stop"] or ())
        values["stop_token_ids"] = tuple(values.pop("stop_token_id") or ())
        try:
            return Sampling(**values)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            raise UsageError(f"--{name.replace('_', '-')} {rest}" if hasattr(self, name) else str(error)) from None


@dataclass(frozen=True)
class OutputOptions:
    """Options of the output."""

    compare: Annotated[
        bool, _make_option("Measure against plain decoding, method by method.", "--compare", panel="Output")
    ] = False
    repeats: Annotated[int, typer.Option(help="Timed runs of each method.", rich_help_panel="Output", min=1)] = 3
    as_json: Annotated[bool, _make_option("One JSON object on standard output.", "--json", panel="Output")] = False
    no_color: Annotated[bool, _make_option("No colours; NO_COLOR does the same.", "--no-color", panel="Output")] = False


@dataclass(frozen=True)
class GenerateOptions(OutputOptions, SamplingOptions, ModelOptions):
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; '-' is standard input.")] = None
    prompt_option: Annotated[
        str | None, _make_option("The same as an option, as in llama.cpp.", "--prompt", "-p", metavar="TEXT")
    ] = None
    chat: Annotated[
        bool, _make_option("Put each prompt into the model's chat template, as one user message.", "--chat")
    ] = False
    file: Annotated[
        list[str],
        _make_option("Read a prompt from this file; repeatable, one prompt each.", "--file", "-f", metavar="PATH"),
    ] = field(default_factory=list)


def with_options(options: type[Options]) -> Callable[[Callable[[typer.Context, Options], None]], Callable[..., None]]:
    """Turn a command of (context, options) into what typer reads: one keyword for every field."""

    def wrap(command: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
        def run(ctx: typer.Context, **values: Any) -> None:
            command(ctx, options(**values))

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        for spec in fields(options):  # type: ignore[arg-type]
            default = None if spec.default is MISSING else spec.default
            parameters.append(inspect.Parameter(spec.name, kind, default=default, annotation=spec.type))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return wrap
