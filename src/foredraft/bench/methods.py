"""Methods to measure, parsed from the command line.

Examples: `ngram:8`, `draft_model:2:model=PATH`, `ngram:8:branches=2`, `suffix+eagle3`,
`ngram+medusa:4:ngram.branches=2`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft import zoo
from foredraft.bench.grow import find_built_in_origin
from foredraft.drafters.registry import ATTRIBUTE_SEPARATOR, AUTO, METHOD_SEPARATOR, is_import_path, resolve_method
from foredraft.errors import ForedraftError

PLAIN = "plain"  # label of plain decoding


@dataclass(frozen=True)
class BenchMethod:
    """One method with its settings."""

    label: str  # the method as written on the command line
    spec: dict[str, Any]  # in the keys of vLLM's speculative_config

    @property
    def name(self) -> str:
        return str(self.spec["method"])


def parse(text: str, method_names: Sequence[str]) -> BenchMethod:
    """Parse a method: its name, then a draft length and `key=value` settings in any order, separated by colons.

    Raises:
        ForedraftError: the method is unknown, or the draft length is no positive number.
    """
    name, settings = _split_settings(text.strip(), method_names)
    members = name.split(METHOD_SEPARATOR)
    if name != AUTO and any(part not in method_names and not is_import_path(part) for part in members):
        raise ForedraftError(
            f"unknown method {name!r}; use one of: {', '.join(method_names)}; {AUTO}, several as "
            f"a{METHOD_SEPARATOR}b, or package.module{ATTRIBUTE_SEPARATOR}METHOD"
        )
    spec: dict[str, Any] = {"method": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            key, value = "num_speculative_tokens", key
            if not value.isdecimal() or not int(value):
                raise ForedraftError(f"{text!r}: {value!r} is no draft length; write a method as {name}:8")
        spec[key] = _parse_value(value)
    return BenchMethod(text.strip(), spec)


def _split_settings(text: str, method_names: Sequence[str]) -> tuple[str, list[str]]:
    """Split a method's name from its settings. The name package.module:METHOD has a colon itself."""
    name, *settings = text.split(":")
    last = name.rpartition(METHOD_SEPARATOR)[2]
    if last not in (*method_names, AUTO) and settings and settings[0].split(METHOD_SEPARATOR)[0].isidentifier():
        rest = ":".join(settings[1:])
        tail, tail_settings = _split_settings(settings[0] + (f":{rest}" if rest else ""), (*method_names, settings[0]))
        return f"{name}{ATTRIBUTE_SEPARATOR}{tail}", tail_settings
    return name, settings


def parse_all(texts: Sequence[str], method_names: Sequence[str]) -> list[BenchMethod]:
    """Parse comma-separated lists of methods; duplicates are dropped.

    Raises:
        ForedraftError: an entry is no method.
    """
    methods = [parse(entry, method_names) for text in texts for entry in text.split(",") if entry.strip()]
    return list({method.label: method for method in methods}.values())


def attach_models(
    methods: Sequence[BenchMethod], config: Any, spec_model: str | None, is_builtin: bool = False
) -> Iterator[BenchMethod]:
    """Add draft models to the settings of methods.

    A model in the settings of a method has precedence, then `spec_model`, then the drafter of the built-in target.

    Args:
        methods: methods as parsed.
        config: configuration of the target.
        spec_model: model for all methods, or None.
        is_builtin: True if the target is the built-in one.
    """
    for method in methods:
        members = method.name.split(METHOD_SEPARATOR)
        models = {
            member: find_draft_model(member, config, spec_model if len(members) == 1 else None, is_builtin)
            for member in members
        }
        model_settings: dict[str, Any] = {
            f"{member}.model": model for member, model in models.items() if model is not None
        }
        if len(members) == 1:
            model_settings = {} if models[method.name] is None else {"model": models[method.name]}
        elif spec_model is not None:
            model_settings = {"model": spec_model}
        yield BenchMethod(method.label, model_settings | method.spec)


def find_draft_model(method: str, config: Any, spec_model: str | None, is_builtin: bool = False) -> str | None:
    """Find the draft model of a method for a target.

    A model grown from a built-in target has the same output, so drafters of the built-in target fit it.

    Args:
        method: name of one method.
        config: configuration of the target.
        spec_model: given model, or None.
        is_builtin: True if the target is the built-in one.

    Returns:
        Path or name of the model; None if the method needs none or none is known.
    """
    resolved, _ = resolve_method(method)
    if not resolved.uses_model:
        return None
    built_in = zoo.DEFAULT_TARGET if is_builtin else find_built_in_origin(config)
    return spec_model or (None if built_in is None else zoo.find_drafter(resolved.built_in.folders, built_in))


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # plain text, such as a path, needs no quotes
