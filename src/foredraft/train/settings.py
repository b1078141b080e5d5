"""Parser of `key=value` options into the frozen dataclass of a method's training settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from foredraft.drafters.losses import check_loss
from foredraft.drafters.method import Method, Training
from foredraft.drafters.registry import find_method, load_methods, parse_options
from foredraft.errors import ForedraftError, suggest


def list_trainable_methods() -> dict[str, Method]:
    """Return the methods that can be trained, by name."""
    return {name: method for name, method in load_methods().items() if method.training is not None}


def require_training(method: Method) -> Training:
    """Return the training of a method. Raises ForedraftError if it has none."""
    if method.training is None:
        raise ForedraftError(f"{method.name!r} cannot be trained")
    return method.training


def find_trainable(name: str | None) -> Method:
    """Return a method that can be trained, by name or as `package.module:METHOD`.

    Raises:
        ForedraftError: if there is no such method; the message lists those that exist.
    """
    methods = list_trainable_methods()
    if not name:
        raise ForedraftError(f"no method; use one of {', '.join(sorted(methods))}")
    method = find_method(name)
    if method is None or method.training is None:
        raise ForedraftError(
            f"{name!r} cannot be trained; use one of {', '.join(sorted(methods))}{suggest(name, methods)}"
        )
    return method


def parse_pairs(settings: Sequence[str]) -> dict[str, str]:
    """Parse `key=value` strings. Dashes in keys become underscores.

    Raises:
        ForedraftError: if a string has no key or no equals sign.
    """
    pairs = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise ForedraftError(f"--set takes key=value, got {setting!r}")
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def parse_train_config(training: Training, settings: Mapping[str, str]) -> Any:
    """Make the settings of a training from text.

    Args:
        training: Training of the method.
        settings: Option values as strings, by name.

    Raises:
        ForedraftError: if an option is unknown, or its value has the wrong type.
    """
    config_class = training.config
    hints = get_type_hints(config_class)
    names = [option.name for option in fields(config_class)]
    unknown = [key for key in settings if key not in names]
    if unknown:
        raise ForedraftError(
            f"unknown training option {unknown[0]!r}; this method takes: {', '.join(sorted(names)) or 'none'}"
            f"{suggest(unknown[0], names)}"
        )
    try:
        config: Any = parse_options(
            config_class, {key: _convert_value(key, value, hints[key]) for key, value in settings.items()}
        )
    except ValueError as error:
        raise ForedraftError(str(error)) from None
    if "loss" in names:
        check_loss(config.loss)
    return config


def _convert_value(key: str, text: str, hint: Any) -> Any:
    """Convert the text of an option to the first type of its annotation that fits."""
    if hint is str:
        return text
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_list = any(get_origin(kind) is tuple for kind in kinds)
    value = _parse_literal(f"[{text}]" if is_list and "," in text and not text.startswith("[") else text)
    for kind in kinds:
        origin = get_origin(kind) or kind
        if origin is type(None) and value is None:
            return None
        if origin is bool and isinstance(value, bool):
            return value
        if origin in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            if origin is float or value == int(value):
                return origin(value)
        elif origin is tuple and get_args(kind)[0] is str:
            names = tuple(name.strip() for name in text.split(","))
            if all(names):
                return names
        elif origin is tuple and isinstance(value, list | int):
            return _freeze(value if isinstance(value, list) else [value])
        elif origin is str and isinstance(value, str):
            return value
    expected = " or ".join(_describe_type(key, kind) for kind in kinds)
    raise ForedraftError(f"the training option {key} takes {expected}, got {text!r}")


def _parse_literal(text: str) -> Any:
    """Parse JSON, or Python's None, True and False; any other text stays a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _describe_type(key: str, kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is type(None):
        return "None"
    if origin is tuple and get_args(kind)[0] is str:
        return f"names with commas between them ({key}=a,b)"
    if origin is tuple:
        return f"numbers with commas between them ({key}=1,3,5)"
    return str(getattr(origin, "__name__", origin))


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
