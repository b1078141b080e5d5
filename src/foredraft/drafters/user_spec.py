"""Parsing of the user's drafter specification: method, model, options and draft length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from foredraft.draft_length.length_table import DISABLE_FIELDS, TABLE_FIELD, TOKENS_FIELD, LengthTable
from foredraft.drafters.checkpoint_folders import recognise
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DEFAULT_AUTO_TOKENS
from foredraft.drafters.registry import COMMON_FIELDS, METHOD_SEPARATOR, find_method, number_members, parse_config
from foredraft.errors import ForedraftError, suggest
from foredraft.files.hub import find_revision
from foredraft.verification.registry import find_rule, find_vllm_rule
from foredraft.verification.rule import Rule

UserDrafterSpec = None | str | dict[str, Any] | Drafter
AUTO = "auto"  # draft length chosen by measurement
DraftLength = int | str | None
RULE_FIELD = "rejection_sample_method"


@dataclass(frozen=True)
class MethodSpec:
    """A drafter by method name, not yet made."""

    method: Any  # method name, checked by the registry
    model: str | None  # folder or hub id
    options: dict[str, Any]  # of the method
    loaded_model: Any | None = None  # a loaded transformers model in place of `model`

    @classmethod
    def parse(cls, spec: str | dict[str, Any]) -> "MethodSpec":
        """Parse a method name or a dict with the keys of vLLM's speculative_config.

        Without a method, the checkpoint under `model` determines it. A list of models makes an ensemble, see
        `assign_models`.

        Raises:
            ForedraftError: if there is no method and no model, if the model is no folder, hub id or loaded model, or if
                its checkpoint is not recognised.
        """
        options = {"method": spec} if isinstance(spec, str) else dict(spec)
        method, model = options.pop("method", None), options.pop("model", None)
        revision = options.pop("revision", None)
        for field in COMMON_FIELDS:
            options.pop(field, None)
        if isinstance(model, list | tuple):
            if len(model) != 1:
                if revision is not None:
                    raise ForedraftError("several models have a revision each; give it as draft_model.revision")
                method, model_options = assign_models(method, model)
                return cls(method, None, options | model_options)
            [model] = model
        if isinstance(model, nn.Module):
            if method is None:
                raise ForedraftError("a loaded draft model needs its method beside it, as in {'method': 'draft_model'}")
            return cls(method, None, options, model)
        if model is not None and not isinstance(model, str | Path):
            raise ForedraftError(
                f"a drafter's model is a folder, a hub id or a loaded model; {type(model).__name__} is none of them"
            )
        name = None if model is None else find_revision(str(model), revision)
        if name is None and revision is not None:
            raise ForedraftError("a revision is that of a model; give the hub id of the model too")
        if method is None and name is None:
            hints = (suggest(key, ("method", "model")) for key in options)
            raise ForedraftError(
                "the drafter names no method; give 'method', or a 'model' whose folder determines it"
                + next(filter(None, hints), "")
            )
        if method is None and name is not None:
            method = recognise(name)[0]
        return cls(method, name, options)


def assign_models(method: Any, models: Sequence[Any]) -> tuple[str, dict[str, str]]:
    """Return the ensemble of several models: its method name, and the option `model` of each member.

    Args:
        method: one method, which drafts with every model; an ensemble whose members take the models in order; or None =
            each model's folder determines the method.
        models: folders or hub ids.

    Raises:
        ForedraftError: if the number of models is not that of the members with a model.
    """
    for model in models:
        if not isinstance(model, str | Path):
            raise ForedraftError(f"a list of draft models takes folders or hub ids, got {type(model).__name__}")
    if not models:
        raise ForedraftError("the list of draft models is empty")
    texts = list(map(str, models))
    names = [recognise(text)[0] for text in texts] if method is None else str(method).split(METHOD_SEPARATOR)
    if len(names) == 1:
        names *= len(texts)
    methods = [find_method(name.strip()) for name in names]
    members = number_members([name.strip() for name in names])
    readers = [member for member, found in zip(members, methods, strict=True) if found is None or found.uses_model]
    if len(readers) != len(texts):
        raise ForedraftError(
            f"{len(texts)} draft models are given, and {len(readers)} of {METHOD_SEPARATOR.join(members)} take one"
        )
    return METHOD_SEPARATOR.join(names), {f"{one}.model": text for one, text in zip(readers, texts, strict=True)}


def names_method(spec: UserDrafterSpec) -> bool:
    """Return whether the user names a method or a model, and gives no drafter object."""
    return isinstance(spec, (str, dict))


def parse_length_table(spec: UserDrafterSpec, requested: DraftLength = None) -> LengthTable:
    """Parse the draft lengths by batch size, in tokens.

    Args:
        spec: specification of the drafter. Its field num_speculative_tokens is used if `requested` is "auto" or None.
            Its fields of vLLM's names narrow the lengths.
        requested: lengths as `LengthTable.parse` takes them.

    Raises:
        ForedraftError: for values of another form, or two tables.
    """
    fields = spec if isinstance(spec, dict) else {}
    own = LengthTable.parse(fields.get(TOKENS_FIELD) if requested in (AUTO, None) else requested)
    table, max_requests = fields.get(TABLE_FIELD), [fields[name] for name in DISABLE_FIELDS if name in fields]
    if len(max_requests) > 1:
        raise ForedraftError(f"{' and '.join(DISABLE_FIELDS)} are one field; give one of them")
    if table is not None and not own.is_uniform:
        raise ForedraftError(f"{TOKENS_FIELD} {own} and {TABLE_FIELD} are two tables; give one of them")
    return own.narrow(LengthTable.parse_vllm(table, next(iter(max_requests), None)))


def parse_rule(spec: UserDrafterSpec, verify: str | Rule | None) -> Rule | None:
    """Return the verification rule of an LLM; None = chosen for every request.

    Args:
        spec: specification of the drafter. Its field rejection_sample_method is used if `verify` is "auto" or None.
        verify: a rule, its name, "auto" or None.

    Raises:
        ForedraftError: for an unknown rule, or a rule that is given twice.
    """
    given = find_rule(AUTO if verify is None else verify)
    value = spec.get(RULE_FIELD) if isinstance(spec, dict) else None
    if value is None:
        return given
    rule = find_vllm_rule(value)
    if given not in (None, rule):
        raise ForedraftError(f"{RULE_FIELD} is {value!r} and verify is another rule; give one of them")
    return rule


def make_drafter_rule(spec: UserDrafterSpec) -> Rule | None:
    """Return the rule that a method declares for its own drafts; None = the rule follows from the request.

    Raises:
        ForedraftError: for invalid options of such a method.
    """
    name = spec.get("method") if isinstance(spec, dict) else spec
    method = find_method(name) if isinstance(name, str) else None
    if method is None or method.make_rule is None or not isinstance(spec, str | dict):
        return None
    try:
        return method.make_rule(parse_config(method, MethodSpec.parse(spec).options))
    except (TypeError, ValueError) as error:
        raise ForedraftError(str(error)) from error


def get_max_draft_length(spec: UserDrafterSpec) -> int:
    """Return the longest draft for a measured length, in tokens: that of the method if the user names one."""
    name = spec.get("method") if isinstance(spec, dict) else spec
    method = find_method(name) if isinstance(name, str) else None
    return DEFAULT_AUTO_TOKENS if method is None else method.auto_tokens
