"""The registry of drafting methods: the folder itself.

A module of this package with METHOD, Config and create is a method.
"""

import importlib
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

COMMON_OPTIONS = ("method", "num_speculative_tokens", "model")  # "model" only for methods that use one

TYPE_NAMES = {int: "whole number", float: "number", str: "string", bool: "bool"}


def load_methods() -> dict[str, ModuleType]:
    """Import every method, keyed by METHOD."""
    import foredraft.drafters as package

    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "METHOD"):
            found[module.METHOD] = module
    return found


def resolve_method(name: object) -> tuple[ModuleType, dict[str, Any]]:
    """Return the module of a method's name, and the options that the name implies.

    A module with `parse_name(name) -> options or None` accepts names beyond its METHOD, such as `a+b` and `auto`.

    Raises:
        ValueError: for an unknown name.
    """
    known = load_methods()
    if not isinstance(name, str):
        raise ValueError(f"unknown method {name!r}; give its name, several as a+b, or a model whose folder tells it")
    if name in known:
        return known[name], {}
    for module in known.values():
        implied = module.parse_name(name) if hasattr(module, "parse_name") else None
        if implied is not None:
            return module, implied
    raise ValueError(
        f"unknown method {name!r}; use none or one of {', '.join(sorted(known))}; auto, or several as a+b"
        f"{suggest(name, ['none', 'auto', *known])}"
    )


def parse_config(method: ModuleType, options: dict[str, Any]) -> Any:
    """Make a method's Config from its options. Raises ValueError that names the wrong option."""
    if hasattr(method, "configure"):
        return method.configure(options)
    return parse_options(method.Config, options, COMMON_OPTIONS if uses_model(method) else COMMON_OPTIONS[:2])


def uses_model(method: ModuleType) -> bool:
    """Return whether a method takes the option `model`; False for methods that read only tokens."""
    return bool(getattr(method, "USES_MODEL", True))


def parse_options(config: type[C], options: dict[str, Any], extra_names: Sequence[str] = ()) -> C:
    """Make a Config from a dict.

    Args:
        config: dataclass of the method's options.
        options: values by option name.
        extra_names: valid keys that were read before; they appear in the error message.

    Raises:
        ValueError: for an unknown key or a value of the wrong type; the message lists the valid names.
    """
    known = {spec.name for spec in fields(config)}  # type: ignore[arg-type]
    unknown = sorted(set(options) - known)
    if unknown:
        names = sorted({*known, *extra_names})
        raise ValueError(
            f"unknown drafter option {unknown[0]!r}; this method takes: {', '.join(names)}{suggest(unknown[0], names)}"
        )
    hints = get_type_hints(config)
    for name, value in options.items():
        if not _matches_type(value, hints[name]):
            raise ValueError(f"the option {name} takes {_describe_type(hints[name])}, got {value!r}")
    return config(**options)


def _matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value matches a type annotation. A list matches a tuple; an int matches a float."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_matches_type(value, one) for one in inner)
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_matches_type(entry, inner[0]) for entry in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _describe_type(hint: Any, article: str = "a ", plural: str = "") -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe_type(one) for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is tuple:
        return f"{article}list{plural} of {_describe_type(get_args(hint)[0], '', 's')}"
    return f"{article}{TYPE_NAMES.get(hint, str(hint))}{plural}"


@dataclass(frozen=True)
class DrafterContext:
    """Target, user options and environment for `create(config, context)` of a method."""

    vocab_size: int  # V of the target's logits; every q has this width
    target: HFModel | None = None  # lends embeddings, lm_head and its shape
    num_speculative_tokens: int = 5  # draft length K
    model: str | None = None  # folder or hub id of the draft model, as the user gave it
    loaded_model: Any = None  # loaded transformers model in place of `model`
    tokenizer: Any = None  # of the target; None if its folder has none
    target_name: str = "target"
    target_parameters: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    fused: bool = True  # run recognised draft models as native code
    builtin_drafter: str | None = None  # built-in drafter of this method for the built-in target
    builtin_drafters: Mapping[str, str] = field(default_factory=dict)  # built-in drafters by method
    sandbox: "Callable[[Drafter, str], Drafter]" = lambda drafter, name: drafter  # wraps each member of an ensemble
