"""Registry of drafting methods, and checks of their options.

A method is a folder of this package whose `method.py` has a `Method` named METHOD. There is no other list. Installed
packages add methods with the entry point group `foredraft.drafters`, and `package.module:METHOD` names one that is not
installed as such.
"""

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from foredraft.draft_length.length_table import LENGTH_FIELDS
from foredraft.drafters.method import Method
from foredraft.drafters.vllm_fields import check_missing_field
from foredraft.errors import ForedraftError, suggest

C = TypeVar("C")
log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "foredraft.drafters"
AUTO, METHOD_SEPARATOR = "auto", "+"  # in names of ensembles
ATTRIBUTE_SEPARATOR = ":"  # in package.module:METHOD
# Fields of speculative decoding as such: `user_spec.py` reads them.
COMMON_FIELDS = (*LENGTH_FIELDS, "rejection_sample_method")
COMMON_OPTIONS = ("method", *COMMON_FIELDS)  # options of every method; they are no fields of its config
COMMON_MODEL_OPTIONS = (*COMMON_OPTIONS, "model", "revision")  # the same for methods that take a model

TYPE_NAMES = {int: "whole number", float: "number", str: "string", bool: "bool"}  # for error messages


@cache
def load_methods() -> dict[str, Method]:
    """Import all methods. Returns those of this package and of installed packages, by name.

    An installed method that cannot be imported, or has the name of another, is left out with a warning.
    """
    import foredraft.drafters as package

    methods: dict[str, Method] = {}
    for info in pkgutil.iter_modules(package.__path__):
        folder = f"{package.__name__}.{info.name}"
        if info.ispkg and importlib.util.find_spec(f"{folder}.method") is not None:
            method = importlib.import_module(f"{folder}.method").METHOD
            methods[method.name] = method
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            method = import_method(entry.value)
        except ForedraftError as error:
            log.warning("the installed method %s is left out: %s", entry.name, error)
            continue
        if method.name in methods:
            log.warning("the installed method %s is left out: there is a method %s", entry.value, method.name)
            continue
        methods[method.name] = method
    return methods


def import_method(path: str) -> Method:
    """Import the method `package.module:METHOD`.

    Raises:
        ForedraftError: if the module cannot be imported, or the attribute is missing or no `Method`.
    """
    module_name, _, attribute = path.partition(ATTRIBUTE_SEPARATOR)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of others may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ForedraftError(
            f"the module {module_name!r} of the method {path!r} cannot be imported ({reason}); its folder must be in "
            "PYTHONPATH"
        ) from error
    method = getattr(module, attribute, None)
    if not isinstance(method, Method):
        found = f"is {type(method).__name__}" if hasattr(module, attribute) else "does not exist"
        raise ForedraftError(
            f"{path!r} is no method: {attribute!r} {found}; it must be a foredraft.drafters.method.Method"
        )
    return method


def is_import_path(name: str) -> bool:
    """Return whether a name has the form `package.module:METHOD`."""
    module, separator, attribute = name.partition(ATTRIBUTE_SEPARATOR)
    return bool(separator) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def find_method(name: str) -> Method | None:
    """Return the method of a name or of `package.module:METHOD`; None for an unknown name.

    Raises:
        ForedraftError: if `package.module:METHOD` cannot be imported.
    """
    return import_method(name) if is_import_path(name) else load_methods().get(name)


def resolve_method(name: object) -> tuple[Method, dict[str, Any]]:
    """Return a method, and the options that its name implies.

    Most names imply no options. `Method.parse_name` accepts more names: those of ensembles are `a+b` and `auto`.

    Raises:
        ValueError: for an unknown name.
        ForedraftError: if `package.module:METHOD` cannot be imported.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"unknown method {name!r}; give its name, several as a+b, or a model whose folder determines it"
        )
    found = find_method(name)
    if found is not None:
        return found, {}
    methods = load_methods()
    for method in methods.values():
        implied = None if method.parse_name is None else method.parse_name(name)
        if implied is not None:
            return method, implied
    raise ValueError(
        f"unknown method {name!r}; use none or one of {', '.join(sorted(methods))}; auto, several as a+b, or "
        f"package.module:METHOD{suggest(name, ['none', 'auto', *methods])}"
    )


def number_members(names: Sequence[str]) -> list[str]:
    """Return the names of an ensemble's members: that of the method, with _2, _3, ... after the first of a method.

    Args:
        names: method names as the user wrote them.
    """
    counts: dict[str, int] = {}
    members = []
    for text in names:
        method = find_method(text)
        name = text if method is None else method.name
        counts[name] = counts.get(name, 0) + 1
        members.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return members


def parse_config(method: Method, options: dict[str, Any]) -> Any:
    """Make the configuration of a method, which `create` takes.

    Args:
        method: the method. Its `configure(options)` is called if there is one, else `parse_options`.
        options: values by option name, without those of COMMON_MODEL_OPTIONS.

    Raises:
        ValueError: for an unknown option or a value of the wrong type; the message names the option.
        ForedraftError: for a field of vLLM that the method does not have; the message says what to use.
    """
    options = _translate_options(method, options)
    if method.configure is not None:
        return method.configure(options)
    common = COMMON_MODEL_OPTIONS if method.uses_model else COMMON_OPTIONS
    return parse_options(method.config, options, (*common, *method.option_aliases))


def list_options(method: Method) -> set[str]:
    """Return the names of a method's options, aliases included."""
    return {option.name for option in fields(method.config)} | set(method.option_aliases)


def _translate_options(method: Method, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with our names, without fields of vLLM that change nothing."""
    own_names = {option.name for option in fields(method.config)}
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in own_names:
            translated[name] = value
        elif name in method.option_aliases:
            ours = {} if value is None else method.option_aliases[name](value)
            if not ours.keys().isdisjoint({*translated, *options}):
                raise ValueError(
                    f"the option {name} is {' and '.join(ours)} here, which is given too; give one of them"
                )
            translated |= ours
        elif method.configure is not None or not check_missing_field(name, value):
            translated[name] = value
    return translated


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
