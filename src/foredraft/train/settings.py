"""Words of the command line as the options of a method: `key=value` into the frozen dataclass it calls TrainConfig."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from foredraft.drafters.losses import check_loss
from foredraft.drafters.registry import load_methods, parse_options
from foredraft.errors import ForedraftError, suggest


def list_trainable_methods() -> dict[str, ModuleType]:
    """The methods that can be trained, by name."""
    return {name: module for name, module in load_methods().items() if hasattr(module, "TrainConfig")}


def find_method(name: str | None) -> ModuleType:
    """Raises ForedraftError naming those there are."""
    found = list_trainable_methods()
    if not name:
        raise ForedraftError(f"no method; use one of {', '.join(sorted(found))}")
    if name not in found:
        raise ForedraftError(f"{name!r} cannot be trained; use one of {', '.join(sorted(found))}{suggest(name, found)}")
    return found[name]


def parse_pairs(settings: Sequence[str]) -> dict[str, str]:
    """From key=value."""
    found = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise ForedraftError(f"--set takes key=value, got {setting!r}")
        found[key.strip().replace("-", "_")] = value.strip()
    return found


def parse_train_config(module: Any, settings: Mapping[str, str]) -> Any:
    """The method's TrainConfig. Raises ForedraftError for an option it does not have or a value of another type."""
    kind = module.TrainConfig
    hints = get_type_hints(kind)
    known = [spec.name for spec in fields(kind)]
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ForedraftError(
            f"unknown training option {unknown[0]!r}; this method takes: {', '.join(sorted(known)) or 'none'}"
            f"{suggest(unknown[0], known)}"
        )
    try:
        config = parse_options(kind, {key: _convert_value(key, value, hints[key]) for key, value in settings.items()})
    except ValueError as error:
        raise ForedraftError(str(error)) from None
    if "loss" in known:
        check_loss(config.loss)
    return config


def _convert_value(key: str, text: str, hint: Any) -> Any:
    if hint is str:
        return text
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_list = any(get_origin(kind) is tuple for kind in kinds)
    value = _parse_literal(f"[{text}]" if is_list and "," in text and not text.startswith("[") else text)
    for one in kinds:
        plain = get_origin(one) or one
        if plain is type(None) and value is None:
            return None
        if plain is bool and isinstance(value, bool):
            return value
        if plain in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            if plain is float or value == int(value):
                return plain(value)
        elif plain is tuple and isinstance(value, list | int):
            return _freeze(value if isinstance(value, list) else [value])
        elif plain is str and isinstance(value, str):
            return value
    wanted = " or ".join(_describe_type(key, kind) for kind in kinds)
    raise ForedraftError(f"the training option {key} takes {wanted}, got {text!r}")


def _parse_literal(text: str) -> Any:
    """JSON, or Python's words; anything else is a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _describe_type(key: str, kind: Any) -> str:
    plain = get_origin(kind) or kind
    if plain is type(None):
        return "None"
    if plain is tuple:
        return f"numbers with commas between them ({key}=1,3,5)"
    return str(getattr(plain, "__name__", plain))


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
