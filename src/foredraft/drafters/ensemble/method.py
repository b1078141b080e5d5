"""The method `compose`: an ensemble of drafters, by name (`suffix+eagle3`) or by rank (`auto`).

This file parses names and options and makes the members. drafter.py is the drafter, selector.py chooses the
members of a step, and tree_merge.py and verification/rules.py explain why merged trees are lossless.

Reference: SpecInfer merges trees of several drafters (2305.09781); suffix decoding falls back to a head (2411.04975).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

from foredraft.drafters.checkpoint_folders import recognise
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.selector import SELECTION_MODES, SelectionMode
from foredraft.drafters.ensemble.variants import VARIANTS
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.registry import (
    AUTO,
    METHOD_SEPARATOR,
    find_method,
    list_options,
    load_methods,
    number_members,
    parse_config,
    parse_options,
)
from foredraft.drafters.vllm_fields import check_missing_field
from foredraft.errors import ForedraftError
from foredraft.files.hub import find_revision

log = logging.getLogger(__name__)
MethodOptions = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Options of an ensemble.

    Options of a member have its name as the key: `{"ngram": {...}}` or `{"ngram.prompt_lookup_max": 3}`. Further
    members of one method are numbered: `draft_model`, `draft_model_2`.

    Attributes:
        parts: method names of the members; the first is preferred among equals. A method may have several members, with
            different models or options. None = the best method that reads
            tokens alone and the best that uses a model, of those available for this target.
        mode: "merge" = all members draft, and the drafts become one tree. "sequence" = one member drafts for a
            request, and a token member extends its draft. "auto" = the choice with the most expected tokens per
            second, request by request.
    """

    parts: tuple[str, ...] | None = None
    mode: str = "auto"


@dataclass(frozen=True)
class EnsembleOptions:
    """Options of an ensemble, split by the member that they belong to."""

    config: Config
    member_options: Mapping[str, MethodOptions]  # by name of the member
    shared_options: MethodOptions  # options without a member's name; each goes to the member that has it


def parse_name(name: str) -> MethodOptions | None:
    """Return the options for `auto` or for method names joined by +; None for any other name."""
    if name == AUTO:
        return {}
    if METHOD_SEPARATOR not in name:
        return None
    return {"parts": [part.strip() for part in name.split(METHOD_SEPARATOR)]}


def configure(options: MethodOptions) -> EnsembleOptions:
    """Split options by member. The options of a member are checked when the member is made.

    Raises:
        ValueError: for a wrong option of the ensemble itself.
    """
    config_names = {spec.name for spec in fields(Config)}
    ensemble_values: MethodOptions = {}
    shared: MethodOptions = {}
    member_values: dict[str, MethodOptions] = {}
    for name, value in options.items():
        part, dot, option = name.partition(".")
        if dot and part and option:
            member_values.setdefault(part, {})[option] = value
        elif isinstance(value, dict):
            member_values.setdefault(name, {}).update(value)
        else:
            (ensemble_values if name in config_names else shared)[name] = value
    return EnsembleOptions(parse_options(Config, ensemble_values), member_values, shared)


def create(config: EnsembleOptions | Config, context: DrafterContext) -> EnsembleDrafter:
    """Make the members and the ensemble.

    Raises:
        ForedraftError: for an unknown method, a method that does not fit this target, or an unknown option.
    """
    ensemble_options = config if isinstance(config, EnsembleOptions) else EnsembleOptions(config, {}, {})
    mode, names = ensemble_options.config.mode, ensemble_options.config.parts
    if mode not in SELECTION_MODES:
        raise ForedraftError(f"unknown mode {mode!r} of an ensemble; use one of: {', '.join(SELECTION_MODES)}")
    members = (
        _create_auto_members(ensemble_options, context)
        if names is None
        else _create_named_members(tuple(names), ensemble_options, context)
    )
    for name in ensemble_options.member_options:
        if name not in members:
            raise ForedraftError(f"options for {name!r}, which is no member of the ensemble: {', '.join(members)}")
    title = METHOD_SEPARATOR.join(members)
    if names is None:
        log.info("auto picked %s", title)
    return EnsembleDrafter(list(members.values()), _parse_mode(mode), f"{AUTO}: {title}" if names is None else title)


def _parse_mode(name: str) -> SelectionMode:
    return next(mode for mode in SELECTION_MODES if mode == name)


def _create_named_members(
    names: Sequence[str], ensemble_options: EnsembleOptions, context: DrafterContext
) -> dict[str, EnsembleMember]:
    """Make the members in `names`, with the options and the model of each."""
    methods: dict[str, Method] = {}  # by name of the member
    for text, member in zip(names, number_members(names), strict=True):
        method = find_method(text)
        if method is None or method is METHOD:
            usable = ", ".join(sorted(set(load_methods()) - {METHOD.name}))
            raise ForedraftError(f"unknown method {text!r} in {METHOD_SEPARATOR.join(names)}; use some of: {usable}")
        methods[member] = method
    if len(methods) < 2:
        raise ForedraftError(f"an ensemble needs two or more different methods, got {METHOD_SEPARATOR.join(names)!r}")
    options = {name: dict(ensemble_options.member_options.get(name, {})) for name in methods}
    _check_differences(methods, options, context)
    if context.model is not None:
        options[_find_model_member(context.model, methods, options)]["model"] = context.model
    for option, value in ensemble_options.shared_options.items():
        for name in _find_option_members(option, value, methods):
            options[name].setdefault(option, value)
    return {name: _create_member(name, method, options[name], context) for name, method in methods.items()}


def _check_differences(
    methods: Mapping[str, Method], options: Mapping[str, MethodOptions], context: DrafterContext
) -> None:
    """Raise ForedraftError if two members of one method have the same model and options."""
    models = {
        name: options[name].get("model", _find_builtin_drafter(name, method, context))
        for name, method in methods.items()
    }
    for (one, method), (other, same) in combinations(methods.items(), 2):
        if method is same and options[one] == options[other] and models[one] == models[other]:
            key = "model" if method.uses_model else "OPTION"
            raise ForedraftError(
                f"an ensemble needs two or more different methods, or members of one method that differ; {one} and "
                f"{other} are equal, give {other}.{key}"
            )


def _find_builtin_drafter(name: str, method: Method, context: DrafterContext) -> str | None:
    """Return the built-in drafter of a member: its own if it has one, else that of the method."""
    return context.builtin_drafters.get(name) or context.builtin_drafters.get(method.name)


def _find_model_member(model: str, methods: Mapping[str, Method], options: Mapping[str, MethodOptions]) -> str:
    """Return the member that the common option `model` belongs to."""
    readers = [name for name, method in methods.items() if method.uses_model and "model" not in options[name]]
    if len(readers) > 1:
        found = recognise(model)[0]
        readers = [name for name in readers if methods[name].name == found] or readers
    if len(readers) != 1:
        options_text = ", ".join(f"{name}.model" for name in methods if methods[name].uses_model)
        raise ForedraftError(
            f"the model {model!r} fits no member of {METHOD_SEPARATOR.join(methods)}; leave it out"
            if not options_text
            else f"the model {model!r} needs the name of its member; give {options_text}"
        )
    return readers[0]


def _find_option_members(option: str, value: Any, methods: Mapping[str, Method]) -> list[str]:
    """Return the member that has an option, or all of one method; for `quantization`, all members that have it."""
    matching_names = [name for name, method in methods.items() if option in list_options(method)]
    if not matching_names:
        if check_missing_field(option, value):
            return []
        raise ForedraftError(
            f"unknown drafter option {option!r}; {METHOD_SEPARATOR.join(methods)} takes mode, and options of its "
            f"members as {next(iter(methods))}.OPTION"
        )
    if len({methods[name].name for name in matching_names}) > 1 and option != "quantization":
        raise ForedraftError(
            f"several members have the option {option}; give "
            + " or ".join(f"{name}.{option}" for name in matching_names)
        )
    return matching_names


def _create_member(name: str, method: Method, options: MethodOptions, context: DrafterContext) -> EnsembleMember:
    """Make one member. Raises ForedraftError whose message begins with the member's name."""
    rest = dict(options)
    model, length = rest.pop("model", None), rest.pop("num_speculative_tokens", context.num_speculative_tokens)
    revision = rest.pop("revision", None)
    if model is not None and not method.uses_model:
        raise ForedraftError(f"the method {method.name} drafts from the tokens alone; leave its model {model!r} out")
    if method.make_rule is not None:
        raise ForedraftError(f"{name}: its drafts have a verification rule of their own; name it alone")
    member_context = replace(
        context,
        model=None if model is None else find_revision(str(model), revision),
        num_speculative_tokens=length,
        builtin_drafter=_find_builtin_drafter(name, method, context),
    )
    try:
        drafter = create_drafter(method, parse_config(method, rest), member_context)
    except ForedraftError as error:
        raise ForedraftError(f"{name}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ForedraftError(f"{name}: {error}") from error
    return EnsembleMember(name, drafter, context.sandbox(drafter, name))


def _create_auto_members(ensemble_options: EnsembleOptions, context: DrafterContext) -> dict[str, EnsembleMember]:
    """Make the best member that reads tokens alone and the best that uses a model, if such methods are available.

    `Method.get_auto_rank` orders the methods of a kind. A method without a rank is never selected. A model that the
    user gave is always used.
    """
    found: dict[str, EnsembleMember] = {}
    required = None if context.model is None else recognise(context.model)[0]
    for is_token_only in (True, False):
        candidates = {
            name: m for name, m in load_methods().items() if m is not METHOD and m.uses_model is not is_token_only
        }
        ranks = {name: rank for name, m in candidates.items() if (rank := m.get_auto_rank(context)) is not None}
        if not is_token_only and required is not None:
            ranks = {required: 0.0}
        for name in sorted(ranks, key=lambda name: (-ranks[name], name)):
            options = dict(ensemble_options.member_options.get(name, {}))
            if name == required:
                options["model"] = context.model
            options |= {o: v for o, v in ensemble_options.shared_options.items() if o in list_options(candidates[name])}
            try:
                found[name] = _create_member(name, candidates[name], options, context)
                break
            except ForedraftError as error:
                if name == required:
                    raise
                log.debug("auto leaves %s out: %s", name, error)
    for option, value in ensemble_options.shared_options.items():
        _find_option_members(option, value, {name: load_methods()[name] for name in found})
    if not found:
        raise ForedraftError("auto found no method for this target; name one with --spec-method")
    return found


METHOD = Method(
    name="compose", config=Config, create=create, parse_name=parse_name, configure=configure, variants=VARIANTS
)
