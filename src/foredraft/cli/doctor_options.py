"""Options of `foredraft doctor`, the drafters that they name, and the command that it recommends."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.backend import CliBackend, build_drafter_spec
from foredraft.cli.options import METHOD_SEPARATOR, NONE, ModelOptions, SamplingOptions
from foredraft.cli.shell import UsageError

if TYPE_CHECKING:
    from foredraft.doctor.candidate import Candidate
    from foredraft.sampling.params import Sampling

DRAFTER_FIELDS = ("spec_method", "spec_model", "spec_tokens", "speculative_config")  # given again by the specification
DRAFTER_PREFIX = "spec_"  # of the options that plain decoding has no use for


def _make_option(help: str, *names: str, panel: str, low: float | None = None, metavar: str | None = None) -> Any:  # noqa: A002
    # The parameter shadows the builtin because typer's parameter is called `help`.
    return typer.Option(*names, help=help, rich_help_panel=panel, min=low, metavar=metavar)


@dataclass(frozen=True)
class DoctorOptions(SamplingOptions, ModelOptions):
    """Options of `foredraft doctor`."""

    prompts: Annotated[
        list[str],
        _make_option(
            "File with one prompt; repeatable. Default: 20 built-in prompts.", "--prompts", "-f", panel="Measurement",
            metavar="FILE",
        ),
    ] = field(default_factory=list)  # fmt: skip
    seconds: Annotated[
        float, _make_option("Time of all measurements together, in seconds.", panel="Measurement", low=1)
    ] = 30.0
    streams: Annotated[
        str, _make_option("Numbers of concurrent requests to predict for, separated by commas.", panel="Measurement")
    ] = "1,4,16"
    check: Annotated[
        bool,
        _make_option(
            "Measure the speed-up too, for as long again, and print it beside the prediction.", "--check",
            panel="Measurement",
        ),
    ] = False  # fmt: skip
    context: Annotated[int, _make_option("Tokens of a request for the largest batch.", panel="Measurement", low=1)] = (
        2048
    )
    threads: Annotated[
        int | None, _make_option("Number of CPU threads. Default: torch's default.", panel="Measurement", low=1)
    ] = None
    as_json: Annotated[bool, _make_option("Print one JSON object on standard output.", "--json", panel="Output")] = (
        False
    )
    no_color: Annotated[
        bool, _make_option("Print without colours, as with NO_COLOR in the environment.", "--no-color", panel="Output")
    ] = False

    def parse_streams(self) -> tuple[int, ...]:
        """Return the numbers of streams, rising. Raises UsageError for anything but positive numbers."""
        parts = [part.strip() for part in self.streams.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise UsageError(f"--streams {self.streams!r}: must be numbers from 1 up, separated by ','")
        return tuple(sorted(set(map(int, parts))))

    def build_doctor_sampling(self) -> "Sampling":
        """Return the sampling parameters. Raises UsageError for settings that a measurement does not have."""
        if self.n != 1 or self.logprobs is not None:
            raise UsageError("foredraft doctor measures one output per prompt; leave --n and --logprobs out")
        if self.max_tokens < 2:
            raise UsageError("foredraft doctor needs outputs of two tokens or more; give a larger --max-tokens")
        return self.build_sampling()

    def set_threads(self) -> None:
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)


def build_candidates(options: DoctorOptions, backend: CliBackend) -> tuple["Candidate", ...]:
    """Return the drafters that the options name; () = none.

    Several --spec-model are drafters of their own, unless --spec-method is an ensemble.

    Raises:
        UsageError: the options are invalid, or a model fits none of the methods.
        ForedraftError: the method of a model is not recognised.
    """
    backend.list_choices().check(options)
    methods, models = options.methods, options.spec_model or []
    if NONE in methods or options.draft_length == 0:
        raise UsageError("foredraft doctor measures drafters; leave --spec-method none and --spec-tokens 0 out")
    if not methods:
        if options.method_options and not models:
            raise UsageError("--spec-option belongs to a drafter; give its --spec-method or --spec-model")
        return tuple(_make_candidate(options, backend.find_method(model), [model], backend) for model in models)
    return tuple(_pair_models(options, methods, models, backend))


def _pair_models(
    options: DoctorOptions, methods: Sequence[str], models: Sequence[str], backend: CliBackend
) -> Iterator["Candidate"]:
    """Yield a candidate for every method, or for every model of a method."""
    choices = backend.list_choices()
    takers = [name for name in methods if not choices.is_token_only(name)]
    if models and not takers:
        raise UsageError(f"{', '.join(methods)} draft without a model; leave --spec-model out")
    for name in methods:
        if name not in takers or not models:
            yield _make_candidate(options, name, [], backend)
        elif METHOD_SEPARATOR in name or len(takers) == 1:
            for group in [models] if METHOD_SEPARATOR in name else [[model] for model in models]:
                yield _make_candidate(options, name, group, backend)
        else:
            own = [model for model in models if backend.find_method(model) == name]
            for group in [[model] for model in own] or [[]]:
                yield _make_candidate(options, name, group, backend)


def _make_candidate(options: DoctorOptions, method: str, models: Sequence[str], backend: CliBackend) -> "Candidate":
    from foredraft.doctor.candidate import Candidate

    spec = build_drafter_spec(replace(options, spec_model=list(models) or None), method)
    assert spec is not None
    label = " ".join([method, *models])
    return Candidate(label, method, spec, models[0] if len(models) == 1 else None)


def build_command(options: DoctorOptions, spec: Mapping[str, Any], spec_tokens: str, is_server: bool) -> str:
    """Return the command that runs the target with a drafter, or with plain decoding for an empty specification."""
    words = ["foredraft", "serve" if is_server else "generate"]
    groups = (ModelOptions,) if is_server else (ModelOptions, SamplingOptions)
    defaults = DoctorOptions()
    for entry in (entry for group in groups for entry in fields(group)):
        value = getattr(options, entry.name)
        is_drafting = entry.name in DRAFTER_FIELDS or (not spec and entry.name.startswith(DRAFTER_PREFIX))
        if not is_drafting and value != getattr(defaults, entry.name):
            words += _spell_option(entry.name, value)
    if not spec:
        words += ["--spec-method", NONE]
    else:
        words += ["--spec-method", str(spec["method"])]
        models = spec.get("model", [])
        for model in [models] if isinstance(models, str) else models:
            words += ["--spec-model", str(model)]
        words += ["--spec-tokens", spec_tokens]
    return shlex.join([*words, *([] if is_server else ["Once upon a time"])])


def _spell_option(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option]
    return [word for one in (value if isinstance(value, list) else [value]) for word in (option, str(one))]
