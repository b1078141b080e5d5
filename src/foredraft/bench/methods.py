"""The methods to measure, as written on a command line: `ngram:8`, `draft_model:2:model=PATH`, `ngram:8:branches=2`,
`suffix+eagle3`, `ngram+medusa:4:ngram.branches=2`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft import zoo
from foredraft.bench.grow import grown_from_built_in
from foredraft.drafters.base import meant_by, reads_model
from foredraft.drafters.compose import AUTO, PLUS
from foredraft.errors import ForedraftError

PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """One method with its settings; the label is what was written."""

    label: str
    spec: dict[str, Any]  # in the keys of vLLM's speculative_config

    @property
    def name(self) -> str:
        return str(self.spec["method"])


def parse(text: str, known: Sequence[str]) -> Method:
    """`name`, then the draft length and `key=value` settings in any order, separated by colons."""
    name, *settings = text.strip().split(":")
    if name != AUTO and any(part not in known for part in name.split(PLUS)):
        raise ForedraftError(f"unknown method {name!r}; use one of: {', '.join(known)}; {AUTO}, or several as a{PLUS}b")
    spec: dict[str, Any] = {"method": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            key, value = "num_speculative_tokens", key
            if not value.isdecimal() or not int(value):
                raise ForedraftError(f"{text!r}: {value!r} is no draft length; write a method as {name}:8")
        spec[key] = _value(value)
    return Method(text.strip(), spec)


def parse_all(texts: Sequence[str], known: Sequence[str]) -> list[Method]:
    """Lists separated by commas, each method once."""
    found = [parse(entry, known) for text in texts for entry in text.split(",") if entry.strip()]
    return list({method.label: method for method in found}.values())


def with_models(
    methods: Sequence[Method], config: Any, spec_model: str | None, is_builtin: bool = False
) -> Iterator[Method]:
    """The methods with what they draft with: their own model, the one given to all, or that of the built-in pair."""
    for method in methods:
        parts = method.name.split(PLUS)
        models = {part: companion(part, config, spec_model if len(parts) == 1 else None, is_builtin) for part in parts}
        given: dict[str, Any] = {f"{part}.model": model for part, model in models.items() if model is not None}
        if len(parts) == 1:
            given = {} if models[method.name] is None else {"model": models[method.name]}
        elif spec_model is not None:
            given = {"model": spec_model}
        yield Method(method.label, given | method.spec)


def companion(method: str, config: Any, spec_model: str | None, is_builtin: bool = False) -> str | None:
    """The model a method drafts with beside a target of this configuration.

    A model grown from the built-in target writes its text, so what drafts for the one drafts for the other.
    """
    if not reads_model(meant_by(method)[0]):
        return None
    built_in = zoo.FIRST if is_builtin else grown_from_built_in(config)
    return spec_model or (None if built_in is None else zoo.builtin_drafter(method, built_in))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a path needs no quotes
