"""Sources of the models of a server, from options and from requests to load a model."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol

from foredraft.cli.engine_options import parse_size
from foredraft.cli.model_list import (
    OWN_KEYS,
    SPEC_KEYS,
    ModelListOptions,
    NamedModel,
    Options,
    check_keys,
    parse_named_model,
)
from foredraft.cli.named_options import parse_named_options
from foredraft.cli.shell import UsageError

if TYPE_CHECKING:
    from foredraft.engine.worker import WorkerLimits
    from foredraft.llm import LLM
    from foredraft.server.admin import LoadModelRequest
    from foredraft.server.kv_shares import KVShare
    from foredraft.server.model_host import ModelSource
    from foredraft.server.settings import ServerSettings

ADMIN_FIELDS = frozenset({"name", "model", "lora", "weight", "kv_memory"})  # of a request; the others are options


class OptionLoader(Protocol):
    """Loader of the model that options describe."""

    @property
    def method(self) -> str: ...

    def load(self, share: "KVShare", base: "LLM | None") -> "LLM":
        """Load the model with a share of the KV memory, and with weights of the LLM of its base."""


class SourceBuilder(Generic[Options]):
    """Builder of sources. It keeps the options of the models, which adapters of them need.

    Args:
        options: of the command; they hold for every model that has none of its own.
        make_settings: returns the settings of a server with the options of one model.
        make_loader: returns the loader of a model, from its options and the folder of its adapter or None.
        limits: of each model's queue.
        command: function with the options of the command, which checks those of a model.
    """

    def __init__(
        self,
        options: Options,
        make_settings: "Callable[[Options], ServerSettings]",
        make_loader: Callable[[Options, str | None], OptionLoader],
        limits: "WorkerLimits",
        command: Callable[..., Any],
    ) -> None:
        self._options, self._limits, self._command = options, limits, command
        # Without names in --model, the drafter of the command belongs to its only model.
        self._common = options if options.models else replace(options, **_list_defaults(OWN_KEYS))
        self._make_settings, self._make_loader = make_settings, make_loader
        self._base_options: dict[str, Options] = {}  # of models that adapters may have as their base, by name

    def build_first(self) -> "list[ModelSource]":
        """Build the sources of the command's models and adapters.

        Raises:
            UsageError: for an invalid option, or a name that is given twice.
        """
        texts = self._options.models
        models = [parse_named_model(text, is_adapter=False) for text in texts or ()]
        adapters = [parse_named_model(text, is_adapter=True) for text in self._options.lora or ()]
        sources = [self._build_own(model) for model in models] if models else [self._build_only()]
        bases = list(self._base_options)
        sources += [self._build_adapter(adapter, bases) for adapter in adapters]
        names = [name for source in sources for name in source.settings.model_names]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"the name {name!r} is given twice; give each model and adapter its own")
        return sources

    def build_requested(self, request: "LoadModelRequest", names: Sequence[str]) -> "ModelSource":
        """Build the source of a request to load a model.

        Args:
            request: body of the request.
            names: names of the loaded models.

        Raises:
            ForedraftError: for an invalid option.
        """
        given = request.model_dump(exclude=set(ADMIN_FIELDS), exclude_none=True)
        model = NamedModel(
            request.name,
            request.model or request.lora or "",
            is_adapter=request.model is None,
            weight=request.weight,
            options={name.replace("_", "-"): _list_texts(value) for name, value in given.items()},
            kv_memory=None if request.kv_memory is None else parse_size(request.kv_memory),
            has_weight="weight" in request.model_fields_set,
        )
        check_keys(model)
        if model.is_adapter:
            return self._build_adapter(model, [name for name in names if name in self._base_options])
        return self._build_own(model)

    def _build_only(self) -> "ModelSource":
        """Build the source of the model that has no name in --model."""
        settings = self._make_settings(self._options)
        for name in settings.model_names:
            self._base_options[name] = self._options
        return self._make_source(settings, self._options, None, 1.0)

    def _build_own(self, model: NamedModel) -> "ModelSource":
        options = self._apply(replace(self._common, model=model.path, models=None, lora=None), model)
        source = self._make_source(self._make_settings(options), options, None, model.weight, kv_memory=model.kv_memory)
        self._base_options[model.name] = options
        return source

    def _build_adapter(self, adapter: NamedModel, bases: Sequence[str]) -> "ModelSource":
        from foredraft.models.lora import check_lora_folder
        from foredraft.server.adapter_service import AdapterLoader
        from foredraft.server.model_host import ModelSource
        from foredraft.server.model_names import find_base_name

        base_name = find_base_name(adapter.name, bases)
        check_lora_folder(adapter.path)
        options = self._apply(self._base_options[base_name], adapter)
        settings = self._make_settings(options)
        if adapter.shares_engine:
            loader = AdapterLoader(adapter.name, adapter.path)
            return ModelSource(settings, loader.load, base_name=base_name, shares_engine=True)
        return self._make_source(settings, options, adapter.path, adapter.weight, base_name, adapter.kv_memory)

    def _make_source(
        self,
        settings: "ServerSettings",
        options: Options,
        lora: str | None,
        weight: float,
        base_name: str | None = None,
        kv_memory: int | None = None,
    ) -> "ModelSource":
        from foredraft.server.model_host import ModelSource

        loader = self._make_loader(options, lora)
        return ModelSource(settings, loader.load, self._limits, weight, kv_memory, base_name)

    def _apply(self, options: Options, model: NamedModel) -> Options:
        """Return options with those of a model. One of its drafter replaces all options of the drafter."""
        try:
            parsed = parse_named_options(self._command, model.options)
        except UsageError as error:
            raise UsageError(f"{model.title}: {error}") from None
        changes: dict[str, Any] = {name: parsed[name] for name in map(_name_field, model.options)}
        if any(key in SPEC_KEYS for key in model.options):
            changes = _list_defaults(SPEC_KEYS) | changes
        return replace(options, served_model_name=[model.name], **changes)


def _name_field(key: str) -> str:
    return key.replace("-", "_")


def _list_defaults(keys: Sequence[str]) -> dict[str, Any]:
    names = set(map(_name_field, keys))
    return {option.name: option.default for option in fields(ModelListOptions) if option.name in names}


def _list_texts(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]
