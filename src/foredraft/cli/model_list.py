"""Options for several models of one server, and the texts NAME=PATH[,KEY=VALUE...] that describe each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from foredraft.cli.options import AUTO, COMMAND_LINE, _make_option
from foredraft.cli.replicas import ReplicaOptions
from foredraft.cli.shell import UsageError

if TYPE_CHECKING:
    from foredraft.server.served_models import ServedModels

MODELS_PANEL = "Several models"
ADMIN_KEY_VARIABLE = "FOREDRAFT_ADMIN_KEY"
WEIGHT_KEY, MAX_WEIGHT = "weight", 1e6
SPEC_KEYS = (
    "spec-method", "spec-model", "spec-option", "spec-tokens", "spec-quantization", "spec-dtype", "spec-revision",
    "spec-max-model-len", "spec-vocab",
)  # fmt: skip
MESSAGE_KEYS = ("chat-template", "tool-call-parser", "reasoning-parser")  # formats of messages, outside the engine
COMMON_KEYS = (
    *SPEC_KEYS, "verify", "tokenizer", "max-model-len", "max-batch", *MESSAGE_KEYS,
)  # fmt: skip
OWN_KEYS = (*SPEC_KEYS, "verify", "tokenizer", "max-model-len", "quantization", "revision")  # belong to one model
TARGET_KEYS = ("quantization", "revision", "dtype", "device")  # of a model of its own; an adapter has those of its base
_TEXT_PATTERN = re.compile(r"(?P<name>[^=,]+)=(?P<rest>.+)", re.DOTALL)

Options = TypeVar("Options", bound="ModelListOptions")


@dataclass(frozen=True)
class ModelListOptions(ReplicaOptions):
    """Options of the models of a server. `model` is the model of a server with one, and no option of its own."""

    model: str | None = field(default=None, metadata={COMMAND_LINE: False})
    models: Annotated[
        list[str] | None,
        _make_option(
            "Folder, Hub id or GGUF file of the target. For several models NAME=PATH, repeatable, with options of the "
            "model behind commas: NAME=PATH,weight=2,spec-model=PATH. Default: the built-in model.",
            "--model",
            "-m",
            panel="Model",
            metavar="PATH|NAME=PATH[,KEY=VALUE...]",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        _make_option(
            "LoRA adapter that is served as a model, NAME=FOLDER, repeatable; with several models BASE/NAME=FOLDER. It "
            "runs in the engine of its base, unless it has a weight or drafter options.",
            "--lora",
            "--lora-modules",
            panel=MODELS_PANEL,
            metavar="NAME=FOLDER[,KEY=VALUE...]",
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        _make_option(
            "Key of the routes /admin/models, which load and unload models. Default: the environment variable "
            f"{ADMIN_KEY_VARIABLE}, else there are no such routes.",
            panel=MODELS_PANEL,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _make_option(
            "Name of the model in requests and responses; repeatable. Default: the folder's name or Hub id.",
            panel="Server",
        ),
    ] = None

    @property
    def has_models(self) -> bool:
        """Whether the server has more than one model, or may get more."""
        return bool(self.models or self.lora or self.admin_key is not None)

    def check_models(self) -> None:
        """Raise UsageError for options that are for a server with one model."""
        if not self.has_models:
            return
        which = "--model NAME=PATH" if self.models else "--lora" if self.lora else "--admin-key"
        if self.replicas is not None:
            raise UsageError(f"--replicas serves one model; leave {which} out, or start a server for each model")
        if self.tensor_parallel_size > 1:
            raise UsageError(
                f"--tensor-parallel-size splits the only model of a server; leave {which} out, or start a server for "
                "each model"
            )
        if self.models and self.served_model_name:
            raise UsageError("--served-model-name is for one model; with several, the name stands in --model NAME=PATH")


@dataclass(frozen=True)
class NamedModel:
    """Model or adapter of a server: one --model, one --lora, or one request to /admin/models."""

    name: str
    path: str
    is_adapter: bool
    weight: float = 1.0
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)  # options of `foredraft serve`, without dashes
    kv_memory: int | None = None  # bytes beside the memory of all models; None = a share of it
    has_weight: bool = False  # whether the weight was given

    @property
    def shares_engine(self) -> bool:
        """Whether this is an adapter without options that need an engine of its own."""
        is_own = self.has_weight or self.kv_memory is not None or not set(self.options) <= set(MESSAGE_KEYS)
        return self.is_adapter and not is_own

    @property
    def title(self) -> str:
        """Option and name, for errors."""
        return f"{'--lora' if self.is_adapter else '--model'} {self.name}"


def resolve_models(options: Options) -> Options:
    """Move the only --model to the field `model`, unless it is NAME=PATH.

    Raises:
        UsageError: for several models without names.
    """
    texts = options.models or []
    if not texts:
        return replace(options, models=None)
    if len(texts) == 1 and not is_named(texts[0]):
        return replace(options, model=texts[0], models=None)
    for text in texts:
        if not is_named(text):
            raise UsageError(f"--model is given {len(texts)} times; name each model: --model NAME={text}")
    return options


def is_named(text: str) -> bool:
    """Return whether a text is NAME=PATH; a path that exists may have the same form."""
    return _TEXT_PATTERN.fullmatch(text) is not None and not Path(text).expanduser().exists()


def parse_named_model(text: str, is_adapter: bool) -> NamedModel:
    """Parse NAME=PATH[,KEY=VALUE...]. Values contain no comma, and a key may be repeated if its option may.

    Raises:
        UsageError: for another form, an invalid name, an unknown key or a weight that is no number above 0.
    """
    from foredraft.errors import ForedraftError
    from foredraft.server.model_names import check_model_name

    option = "--lora" if is_adapter else "--model"
    match = _TEXT_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} takes NAME={'FOLDER' if is_adapter else 'PATH'}, got {text!r}")
    path, *pairs = match["rest"].split(",")
    try:
        name = check_model_name(match["name"].strip())
    except ForedraftError as error:
        raise UsageError(f"{option}: {error}") from None
    if not path.strip():
        raise UsageError(f"{option} {name} has no path; give NAME=PATH")
    found = NamedModel(name, path.strip(), is_adapter)
    options: dict[str, list[str]] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{found.title}: {pair!r} is not KEY=VALUE; a value cannot have a comma")
        options.setdefault(key.strip().replace("_", "-"), []).append(value.strip())
    has_weight = WEIGHT_KEY in options
    weights = options.pop(WEIGHT_KEY, ["1"])
    found = replace(found, weight=_parse_weight(weights[-1], found), options=options, has_weight=has_weight)
    check_keys(found)
    return found


def check_keys(model: NamedModel) -> None:
    """Raise UsageError for a key that is no option of this model."""
    known = COMMON_KEYS if model.is_adapter else (*COMMON_KEYS, *TARGET_KEYS)
    for key in model.options:
        if model.is_adapter and key in TARGET_KEYS:
            raise UsageError(f"{model.title}: {key} is that of the base; leave it out")
        if key not in known:
            raise UsageError(f"{model.title}: unknown key {key!r}; use one of: {', '.join((WEIGHT_KEY, *known))}")


def _parse_weight(text: str, model: NamedModel) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MAX_WEIGHT:
        raise UsageError(f"{model.title}: weight takes a number above 0, got {text!r}")
    return weight


def describe_models(models: "ServedModels", url: str, drafts: str | None) -> str:
    """Return the line that a server prints when its first models are loaded.

    Args:
        models: models of the server.
        url: its address.
        drafts: option that decides how its only model drafts. None = the models have names of their own in the options.
    """
    if drafts is None:
        listed = ", ".join(f"{each.settings.model_names[0]} ({each.llm.drafter_name})" for each in models.services)
        return f"serving {listed} at {url}"
    # the drafter's name lists the methods that `auto` chose
    drafter = f" ({models.services[0].llm.drafter_name})" if drafts == f"--spec-method {AUTO}" else ""
    return f"serving {models.names[0]} at {url} with {drafts}{drafter}"
