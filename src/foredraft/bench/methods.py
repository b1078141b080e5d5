"""The methods to measure, as written on a command line: `ngram:8`, `draft_model:2:model=PATH`, `ngram:8:branches=2`,
`suffix+eagle3`, `ngram+medusa:4:ngram.branches=2`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft import zoo
from foredraft.bench.grow import find_built_in_origin
from foredraft.drafters.ensemble import AUTO, METHOD_SEPARATOR
from foredraft.drafters.registry import resolve_method, uses_model
from foredraft.errors import ForedraftError

PLAIN = "plain"


@dataclass(frozen=True)
class BenchMethod:
    """One method with its settings; the label is what was written."""

    label: str
    spec: dict[str, Any]  # in the keys of vLLM's speculative_config

    @property
    def name(self) -> str:
        return str(self.spec["method"])


def parse(text: str, method_names: Sequence[str]) -> BenchMethod:
    """`name`, then the draft length and `key=value` settings in any order, separated by colons."""
    name, *settings = text.strip().split(":")
    if name != AUTO and any(part not in method_names for part in name.split(METHOD_SEPARATOR)):
        raise ForedraftError(
            f"unknown method {name!r}; use one of: {', '.join(method_names)}; {AUTO}, or several as "
            f"a{METHOD_SEPARATOR}b"
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


def parse_all(texts: Sequence[str], method_names: Sequence[str]) -> list[BenchMethod]:
    """Lists separated by commas, each method once."""
    found = [parse(entry, method_names) for text in texts for entry in text.split(",") if entry.strip()]
    return list({method.label: method for method in found}.values())


def attach_models(
    methods: Sequence[BenchMethod], config: Any, spec_model: str | None, is_builtin: bool = False
) -> Iterator[BenchMethod]:
    """The methods with what they draft with: their own model, the one given to all, or that of the built-in pair."""
    for method in methods:
        parts = method.name.split(METHOD_SEPARATOR)
        models = {
            part: find_draft_model(part, config, spec_model if len(parts) == 1 else None, is_builtin) for part in parts
        }
        given: dict[str, Any] = {f"{part}.model": model for part, model in models.items() if model is not None}
        if len(parts) == 1:
            given = {} if models[method.name] is None else {"model": models[method.name]}
        elif spec_model is not None:
            given = {"model": spec_model}
        yield BenchMethod(method.label, given | method.spec)


def find_draft_model(method: str, config: Any, spec_model: str | None, is_builtin: bool = False) -> str | None:
    """The model a method drafts with beside a target of this configuration.

    A model grown from the built-in target writes its text, so what drafts for the one drafts for the other.
    """
    if not uses_model(resolve_method(method)[0]):
        return None
    built_in = zoo.DEFAULT_TARGET if is_builtin else find_built_in_origin(config)
    return spec_model or (None if built_in is None else zoo.find_drafter(method, built_in))


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a path needs no quotes
