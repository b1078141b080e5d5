"""Registry of drafting methods, and checks of their options.

A method is a folder of this package. Its module `method` has three names: METHOD, its name on the command line; Config,
a dataclass of its options; and create(config, context), which makes the drafter. There is no other list: the folder is
the registry.

Optional names of such a module:

- USES_MODEL (see `uses_model`), and ACCEPTS_LOADED_MODEL: a model in memory may be given in place of a folder
- parse_name (see `resolve_method`) and configure (see `parse_config`)
- AUTO_RANK or estimate_auto_rank (see below), and AUTO_TOKENS: the longest draft if the draft length adapts
- TrainConfig for a method that can be trained, with create_trainee (by gradients) or learn (by counting). With
  create_trainee, TrainConfig.read_shape returns the settings that a checkpoint to start from determines

`auto` chooses one method that reads tokens alone and one with a model. Within each of the two kinds it prefers the
highest rank: that of `estimate_auto_rank(context)` if the module has this function, else AUTO_RANK. A method without a
rank is chosen only if the user gives its model.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from foredraft.drafters.interface import Drafter
from foredraft.errors import suggest
from foredraft.models.hf import HFModel

C = TypeVar("C")

COMMON_OPTIONS = ("method", "num_speculative_tokens")  # options of every method; they are no fields of its Config
COMMON_MODEL_OPTIONS = (*COMMON_OPTIONS, "model")  # the same for methods that take a model (see `uses_model`)

TYPE_NAMES = {int: "whole number", float: "number", str: "string", bool: "bool"}  # for error messages


def load_methods() -> dict[str, ModuleType]:
    """Import every method module. Returns the modules by METHOD."""
    import foredraft.drafters as package

    methods: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(package.__path__):
        folder = f"{package.__name__}.{info.name}"
        if info.ispkg and importlib.util.find_spec(f"{folder}.method") is not None:
            module = importlib.import_module(f"{folder}.method")
            methods[module.METHOD] = module
    return methods


def resolve_method(name: object) -> tuple[ModuleType, dict[str, Any]]:
    """Return the module of a method name, and the options that the name implies.

    Most names are a METHOD and imply no options. A module with `parse_name(name)` accepts more names: it returns the
    implied options, or None for a name that it does not accept. `ensemble.py` accepts `a+b` and `auto` in this way.

    Raises:
        ValueError: for an unknown name.
    """
    methods = load_methods()
    if not isinstance(name, str):
        raise ValueError(
            f"unknown method {name!r}; give its name, several as a+b, or a model whose folder determines it"
        )
    if name in methods:
        return methods[name], {}
    for module in methods.values():
        implied = module.parse_name(name) if hasattr(module, "parse_name") else None
        if implied is not None:
            return module, implied
    raise ValueError(
        f"unknown method {name!r}; use none or one of {', '.join(sorted(methods))}; auto, or several as a+b"
        f"{suggest(name, ['none', 'auto', *methods])}"
    )


def parse_config(method: ModuleType, options: dict[str, Any]) -> Any:
    """Make the configuration of a method, which `create` takes.

    Args:
        method: module of the method. Its `configure(options)` is called if there is one, else `parse_options`.
        options: values by option name, without those of COMMON_MODEL_OPTIONS.

    Raises:
        ValueError: for an unknown option or a value of the wrong type; the message names the option.
    """
    if hasattr(method, "configure"):
        return method.configure(options)
    return parse_options(method.Config, options, COMMON_MODEL_OPTIONS if uses_model(method) else COMMON_OPTIONS)


def uses_model(method: ModuleType) -> bool:
    """Return whether a method takes the option `model`: the constant USES_MODEL of its module, by default True.

    Methods without a draft model, a head or another trained file set it to False.
    """
    return bool(getattr(method, "USES_MODEL", True))


def parse_options(config: type[C], options: dict[str, Any], extra_names: Sequence[str] = ()) -> C:
    """Make an instance of a dataclass of options.

    Args:
        config: the dataclass. Its annotations are the accepted types; lists are accepted for tuples.
        options: values by option name.
        extra_names: options that were removed from `options` before, to list them as valid in the error message.

    Raises:
        ValueError: for an unknown name or a value of the wrong type; the message lists the valid names.
    """
    field_names = {spec.name for spec in fields(config)}  # type: ignore[arg-type]
    unknown = sorted(set(options) - field_names)
    if unknown:
        names = sorted({*field_names, *extra_names})
        raise ValueError(
            f"unknown drafter option {unknown[0]!r}; this method takes: {', '.join(names)}{suggest(unknown[0], names)}"
        )
    hints = get_type_hints(config)
    for name, value in options.items():
        if not _matches_type(value, hints[name]):
            raise ValueError(f"the option {name} takes {_describe_type(hints[name])}, got {value!r}")
    return config(**options)


def _matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value matches a type annotation. A list counts as a tuple, an int as a float."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_matches_type(value, alternative) for alternative in inner)
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_matches_type(entry, inner[0]) for entry in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int | float) if hint is float else hint)


def _describe_type(hint: Any, article: str = "a ", plural: str = "") -> str:
    """Return a type annotation in words, such as "a list of whole numbers"."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe_type(alternative) for alternative in get_args(hint) if alternative is not NoneType)
    if get_origin(hint) is tuple:
        return f"{article}list{plural} of {_describe_type(get_args(hint)[0], '', 's')}"
    return f"{article}{TYPE_NAMES.get(hint, str(hint))}{plural}"


@dataclass(frozen=True)
class DrafterContext:
    """Target, user options and environment for `create(config, context)` of a method."""

    vocab_size: int  # V of the target's logits; every q has this width
    target: HFModel | None = None  # for drafters that use its embedding, output matrix or layer sizes; None in tests
    num_speculative_tokens: int = 5  # K: largest depth of a draft; of a chain, its largest number of tokens
    model: str | None = None  # folder or hub id of the draft model or head, as the user gave it
    loaded_model: Any = None  # loaded transformers model in place of `model`
    tokenizer: Any = None  # tokenizer of the target; None if its folder has none
    target_name: str = "target"  # folder or hub id of the target, for messages
    target_parameters: int = 0  # number of parameters of the target
    dtype: torch.dtype = torch.float32  # dtype for the drafter's network: that of the target
    device: torch.device = torch.device("cpu")  # device of the target  # noqa: RUF009 (immutable)
    fused: bool = True  # run draft models as native CPU code if their architecture is supported
    builtin_drafter: str | None = None  # folder of this method's drafter for the built-in target; None = there is none
    builtin_drafters: Mapping[str, str] = field(default_factory=dict)  # the same folders, by method
    # Wraps a member of an ensemble, given with its name, in a sandbox of its own, so that members fail independently.
    sandbox: "Callable[[Drafter, str], Drafter]" = lambda drafter, name: drafter
