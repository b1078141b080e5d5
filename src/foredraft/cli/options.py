"""Options of the commands as frozen dataclasses, so that several commands share them.

Options that vLLM has too keep vLLM's names: --spec-method, --spec-model, --spec-tokens.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foredraft.cli.draft_length import parse_draft_length
from foredraft.cli.shell import UsageError
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.request_options import RequestOptions
    from foredraft.sampling.params import Sampling
    from foredraft.verification.rule import Rule

Options = TypeVar("Options")
NONE = "none"  # value of --spec-method for plain decoding
AUTO = "auto"  # value of --spec-method for an ensemble of the best methods that exist for the target
COMMAND_LINE = "command_line"  # key of a field's metadata; False = the field is no option of the command line
METHOD_SEPARATOR = "+"  # between the members of an ensemble in --spec-method


def _make_option(help: str, *names: str, panel: str | None = None, metavar: str | None = None) -> Any:  # noqa: A002
    # The parameter shadows the builtin because typer's parameter is called `help`.
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=True)


def _parse_value(text: str) -> Any:
    """Parse a number, list or other JSON value; return any other text unchanged."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _parse_settings(texts: list[str]) -> dict[str, Any]:
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--spec-option takes KEY=VALUE, got {text!r}")
        settings[key.strip()] = _parse_value(value)
    return settings


def _name_option(message: str, options: object) -> str:
    """Return a message that begins with the name of a field, with the name of its option instead."""
    name, _, rest = message.partition(" ")
    return f"--{name.replace('_', '-')} {rest}" if hasattr(options, name) else message


class ModelParts:
    """Parts of a target beside its text part, for which only some commands have options."""

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of LoRA adapters by name."""
        return {}

    @property
    def num_images(self) -> int:
        """Images of a request at most."""
        return 0


@dataclass(frozen=True)
class ModelOptions(ModelParts):
    """Options of the target, the drafter and the device."""

    model: Annotated[
        str | None,
        _make_option(
            "Folder, Hub id or GGUF file of the target. Default: the built-in model.", "--model", "-m", panel="Model"
        ),
    ] = None
    spec_method: Annotated[
        list[str] | None,
        _make_option(
            "Drafting method; 'none' for plain decoding, ngram+eagle3 for an ensemble, 'auto' for an ensemble of the "
            "best methods available. With --compare: a list, repeated or separated by commas. Default: the method of "
            "--spec-model, else the best one of a built-in target, else ngram.",
            panel="Model",
            metavar="METHOD",
        ),
    ] = None
    spec_model: Annotated[
        list[str] | None,
        _make_option(
            "Folder or Hub id of the draft model or head. Its method is read from its files. Repeatable for several "
            "models, which draft together.",
            "--spec-model",
            "--model-draft",
            "-md",
            panel="Model",
        ),
    ] = None
    spec_option: Annotated[
        list[str] | None,
        _make_option(
            "Setting of the method, such as tree_nodes=16, or of a member of an ensemble, such as ngram.branches=2; "
            "repeatable.",
            panel="Model",
            metavar="KEY=VALUE",
        ),
    ] = None
    quantization: Annotated[
        str | None, _make_option("Round the target's weights to int8 or int4. Default: off.", panel="Model")
    ] = None
    spec_quantization: Annotated[
        str | None, _make_option("Round the draft model's weights to int8 or int4. Default: off.", panel="Model")
    ] = None
    spec_dtype: Annotated[
        str | None,
        _make_option(
            "Dtype of the draft model: a --dtype, or auto for the stored one. Default: that of the target.",
            panel="Model",
        ),
    ] = None
    spec_revision: Annotated[
        str | None, _make_option("Branch, tag or commit of the Hub id in --spec-model. Default: main.", panel="Model")
    ] = None
    spec_max_model_len: Annotated[
        int | None,
        _make_option(
            "Longest sequence that the draft model drafts for, in tokens. Default: its context.", panel="Model"
        ),
    ] = None
    spec_vocab: Annotated[
        str | None,
        _make_option(
            "Method for a draft model with another vocabulary: tli (shared tokens only), slem (through text) or auto. "
            "Default: auto.",
            panel="Model",
        ),
    ] = None
    spec_tokens: Annotated[
        str,
        _make_option(
            "Draft per forward pass of the target, in tokens; auto chooses it at every step from measured times, "
            "possibly 0, and 2-6 from 2 to 6. By requests in a step: 1:6,4:2-4,32:0 (from 32 on none). 0 is plain "
            "decoding, with the drafter loaded.",
            "--spec-tokens",
            "--num-speculative-tokens",
            "--draft-max",
            panel="Model",
            metavar="auto|NUMBER|RANGE|TABLE",
        ),
    ] = "auto"
    spec_simulate: Annotated[
        float | None,
        _make_option(
            "Accept drafts at this simulated rate, 0 to 1, for load tests; the text is simulated too.", panel="Model"
        ),
    ] = None
    verify: Annotated[
        str,
        _make_option(
            "Verification rule: auto, match, reject, block or spectr; typical, which is lossy.", panel="Model"
        ),
    ] = "auto"
    posterior_threshold: Annotated[
        float | None,
        _make_option(
            "With --verify typical: probability above which every draft token is accepted. Default: 0.09.",
            panel="Model",
        ),
    ] = None
    posterior_alpha: Annotated[
        float | None,
        _make_option(
            "With --verify typical: factor of exp(-entropy), above which a draft token is accepted too. Default: 0.3.",
            panel="Model",
        ),
    ] = None
    revision: Annotated[
        str | None, _make_option("Branch, tag or commit of the Hub id in --model. Default: main.", panel="Model")
    ] = None
    tokenizer: Annotated[
        str, _make_option("Folder or Hub id of the tokenizer; auto is that of the model.", panel="Model")
    ] = "auto"
    dtype: Annotated[
        str, _make_option("Dtype of the models: auto, bfloat16, float16 (or half), float32 or float64.", panel="Model")
    ] = "auto"
    device: Annotated[str, _make_option("Device of the models: auto, cpu or cuda.", panel="Model")] = "auto"
    tensor_parallel_size: Annotated[
        int,
        _make_option(
            "Number of processes on this machine over which the target is split, one GPU each.",
            "--tensor-parallel-size",
            "-tp",
            panel="Model",
        ),
    ] = 1
    max_model_len: Annotated[
        int | None,
        _make_option(
            "Longest sequence in tokens, prompt and output together. Default: the context length of the model.",
            panel="Model",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        _make_option(
            "Drafter in the format of vLLM: a JSON object with method, model, num_speculative_tokens and settings of "
            "the method.",
            panel="Model",
            metavar="JSON",
        ),
    ] = None
    no_fused: Annotated[
        bool, _make_option("Run the model's PyTorch modules, not the native CPU code.", "--no-fused", panel="Model")
    ] = False
    kv_dtype: Annotated[
        str, _make_option("Dtype of keys and values: auto, or int8 for half the memory on CPU.", panel="Model")
    ] = "auto"
    exact: Annotated[
        bool, _make_option("Require the same bits with drafts and without; slower on a GPU.", "--exact", panel="Model")
    ] = False

    @property
    def method_options(self) -> dict[str, Any]:
        """Settings of the method from --spec-option. Raises UsageError for one that is not KEY=VALUE."""
        return _parse_settings(self.spec_option or [])

    @property
    def draft_models(self) -> str | list[str] | None:
        """Value of --spec-model, or a list of its values if there are several."""
        return self.spec_model[0] if self.spec_model and len(self.spec_model) == 1 else self.spec_model or None

    @property
    def draft_length(self) -> int | str | None:
        """Draft length in tokens, or a range or table as text; None = measured. Raises UsageError for another value."""
        return parse_draft_length(self.spec_tokens)

    @property
    def rule_settings(self) -> dict[str, float]:
        """Settings of the verification rule, without those that are not given."""
        settings = {"posterior_threshold": self.posterior_threshold, "posterior_alpha": self.posterior_alpha}
        return {name: value for name, value in settings.items() if value is not None}

    def find_rule(self) -> "Rule | None":
        """Return the verification rule; None = "auto". Raises UsageError for an unknown one and for its settings."""
        from foredraft.verification.registry import find_rule

        try:
            return find_rule(self.verify, self.rule_settings)
        except ForedraftError as error:
            raise UsageError(_name_option(str(error), self)) from None

    def build_request_options(self, prediction: str = "") -> "RequestOptions":
        """Return the options of a request with a prediction; default none. --spec-tokens 0 means no draft."""
        from foredraft.request_options import RequestOptions

        return RequestOptions(num_speculative_tokens=0 if self.draft_length == 0 else None, prediction=prediction)

    @property
    def methods(self) -> list[str]:
        """Names in --spec-method, in order and once each; empty = the default method."""
        names = [name.strip() for text in self.spec_method or [] for name in text.split(",")]
        return list(dict.fromkeys(name for name in names if name))


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of `Sampling`, with equal names. Commands decode greedily by default: temperature 0, not 1."""

    temperature: Annotated[float, _make_option("Sampling temperature; 0 is greedy decoding.", panel="Sampling")] = 0.0
    top_k: Annotated[int, _make_option("Sample from this many likeliest tokens; 0 is off.", panel="Sampling")] = 0
    top_p: Annotated[
        float,
        _make_option("Sample from the smallest set of tokens with this total probability; 1 is off.", panel="Sampling"),
    ] = 1.0
    min_p: Annotated[
        float,
        _make_option(
            "Remove tokens whose probability is below this share of the likeliest token's; 0 is off.", panel="Sampling"
        ),
    ] = 0.0
    typical_p: Annotated[
        float, _make_option("Total probability of locally typical sampling; 1 is off.", panel="Sampling")
    ] = 1.0
    repetition_penalty: Annotated[
        float, _make_option("Penalty on tokens of the prompt and the output; 1 is off.", panel="Sampling")
    ] = 1.0
    presence_penalty: Annotated[
        float, _make_option("Penalty on tokens that the output contains; 0 is off.", panel="Sampling")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _make_option("Penalty on tokens, times their count in the output; 0 is off.", panel="Sampling")
    ] = 0.0
    seed: Annotated[
        int | None,
        _make_option(
            "Random seed; equal seeds give equal text, with and without speculation. Default: none.", panel="Sampling"
        ),
    ] = None
    n: Annotated[
        int,
        _make_option(
            "Number of outputs per prompt. The -n of llama.cpp is --max-tokens.", "--n", "-n", panel="Sampling"
        ),
    ] = 1
    max_tokens: Annotated[int, _make_option("Longest output, in tokens.", panel="Sampling")] = 128
    min_tokens: Annotated[int, _make_option("Shortest output, in tokens.", panel="Sampling")] = 0
    stop: Annotated[
        list[str] | None,
        _make_option("End an output before this literal text; repeatable.", panel="Sampling", metavar="TEXT"),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        _make_option("End an output at this token id; repeatable.", panel="Sampling", metavar="ID"),
    ] = None
    ignore_eos: Annotated[
        bool, _make_option("Continue an output after the end-of-text token.", "--ignore-eos", panel="Sampling")
    ] = False
    logprobs: Annotated[
        int | None,
        _make_option(
            "Print log-probabilities of the output tokens and of this many likeliest tokens; needs --json. "
            "Default: off.",
            panel="Sampling",
        ),
    ] = None

    def build_sampling(self) -> "Sampling":
        """Return the sampling parameters. Raises UsageError for a value out of range."""
        from foredraft.sampling.params import Sampling

        values = {spec.name: getattr(self, spec.name) for spec in fields(SamplingOptions)}
        values["stop"] = tuple(values["stop"] or ())
        values["stop_token_ids"] = tuple(values.pop("stop_token_id") or ())
        try:
            return Sampling(**values)
        except ValueError as error:
            raise UsageError(_name_option(str(error), self)) from None


def with_options(options: type[Options]) -> Callable[[Callable[[typer.Context, Options], None]], Callable[..., None]]:
    """Return a decorator that turns a command of (context, options) into a function that typer can inspect.

    The function has a keyword parameter for each field of the dataclass `options`.
    """

    def wrap(command: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
        def run(ctx: typer.Context, **values: Any) -> None:
            command(ctx, options(**values))

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        for spec in fields(options):  # type: ignore[arg-type]
            if not spec.metadata.get(COMMAND_LINE, True):
                continue
            is_required = spec.default is MISSING and spec.default_factory is MISSING
            default = inspect.Parameter.empty if is_required else None if spec.default is MISSING else spec.default
            parameters.append(inspect.Parameter(spec.name, kind, default=default, annotation=spec.type))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return wrap
