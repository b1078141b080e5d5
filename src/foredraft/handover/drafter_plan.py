"""The drafter of a deployment in another engine: as Foredraft's own drafter, or as the engine's counterpart of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.checkpoints.export import COMMAND_DRAFT_TOKENS
from foredraft.draft_length.length_table import LengthTable
from foredraft.drafters.counterpart import Counterpart
from foredraft.drafters.method import Method
from foredraft.drafters.registry import METHOD_SEPARATOR, list_options, number_members, parse_config, resolve_method
from foredraft.drafters.user_spec import get_max_draft_length
from foredraft.errors import ForedraftError
from foredraft.handover.deployment import Deployment, DrafterPlan
from foredraft.handover.drafter_export import export_drafter
from foredraft.handover.engine import EngineDrafter, EngineTable, Preparation
from foredraft.vllm.settings import SETTINGS_VARIABLE

MODEL_OPTIONS = ("revision",)  # options of a method's model; they are no fields of its config


@dataclass(frozen=True)
class HandoverChoices:
    """Choices of the user for a handover.

    Attributes:
        out: folder for converted files; None = nothing is written.
        is_forced: whether files in it may be overwritten.
        has_foredraft: whether Foredraft may be installed beside the engine.
    """

    out: Path | None = None
    is_forced: bool = False
    has_foredraft: bool = True


@dataclass(frozen=True)
class Member:
    """One method of a deployment's drafter, with its own options."""

    name: str  # as options of an ensemble name it
    method: Method
    options: Mapping[str, Any]


def plan_drafter(deployment: Deployment, engine: EngineTable, choices: HandoverChoices) -> DrafterPlan:
    """Return how an engine drafts like a deployment.

    Raises:
        ForedraftError: if the engine has no equal of the drafter, or the drafter cannot be exported.
    """
    if deployment.method is None:
        return _prepare_target(deployment, engine, choices)
    members = find_members(deployment)
    if engine.proposer and choices.has_foredraft and all(member.method.reads_tokens_alone for member in members):
        return _plan_proposer(deployment, engine, *engine.proposer)
    return _plan_counterparts(deployment, engine, choices, members)


def find_members(deployment: Deployment) -> list[Member]:
    """Return the methods of a deployment's drafter, one unless it is an ensemble.

    Raises:
        ForedraftError: for an unknown method or option, or an ensemble that is made at the start.
    """
    name = str(deployment.method)
    try:
        method, implied = resolve_method(name)
        parts = implied.get("parts", [name])
        if method.parse_name is not None and len(parts) < 2:
            raise ForedraftError(f"{name} chooses its methods when it starts; name them with --spec-method a+b")
        if len(parts) == 1:
            return [_make_member(name, method, deployment.drafter_options)]
        methods = [resolve_method(part)[0] for part in parts]
        return [
            _make_member(member, method, _select_options(member, method, deployment.drafter_options))
            for member, method in zip(number_members(parts), methods, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise ForedraftError(str(error)) from error


def _make_member(name: str, method: Method, options: Mapping[str, Any]) -> Member:
    """Return a member whose options are valid. Raises ValueError or ForedraftError if they are not."""
    parse_config(method, {key: value for key, value in options.items() if key not in MODEL_OPTIONS})
    return Member(name, method, options)


def _select_options(member: str, method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an ensemble that are those of a member."""
    own = {key.removeprefix(f"{member}."): value for key, value in options.items() if key.startswith(f"{member}.")}
    return {key: value for key, value in options.items() if key in list_options(method)} | own


def _plan_proposer(deployment: Deployment, engine: EngineTable, method: str, proposer: str) -> DrafterPlan:
    """Return the drafter of Foredraft itself, inside the engine."""
    num_tokens = deployment.lengths.most or get_max_draft_length(deployment.method)
    model = None if deployment.model is None else find_path(deployment.model)
    settings = {
        "method": deployment.method,
        **({} if model is None else {"model": model}),
        **deployment.drafter_options,
    }
    return DrafterPlan(
        engine.write_drafter(EngineDrafter((method,), proposer, num_tokens)),
        environment={SETTINGS_VARIABLE: json.dumps(settings)},
        folders=() if model is None else list_local((model,)),
        notes=(
            *_explain_lengths(deployment.lengths, engine, num_tokens, is_set=False),
            *_explain_rule(deployment, engine, is_set=False),
        ),
        needs_foredraft=True,
    )


def _plan_counterparts(
    deployment: Deployment, engine: EngineTable, choices: HandoverChoices, members: Sequence[Member]
) -> DrafterPlan:
    """Return the engine's own methods that draft alike."""
    counterparts = [find_counterpart(member.method, engine) for member in members]
    if len(members) > 1 and not engine.combines:
        raise ForedraftError(
            f"{engine.title} drafts with one method, not with {METHOD_SEPARATOR.join(m.name for m in members)}; give "
            f"one of them, such as --spec-method {members[-1].name}"
        )
    num_tokens = deployment.lengths.most or COMMAND_DRAFT_TOKENS
    notes = [f"{member.name}: {c.note}" for member, c in zip(members, counterparts, strict=True) if c.note]
    ranges = deployment.lengths.list_ranges(num_tokens) if engine.has_length_table else ()
    notes += _explain_lengths(deployment.lengths, engine, num_tokens, is_set=bool(ranges))
    settings: dict[str, Any] = {}
    for member, counterpart in zip(members, counterparts, strict=True):
        settings |= _translate_options(member, counterpart, engine, num_tokens, notes)
    model, is_head = deployment.model, False
    for member, counterpart in zip(members, counterparts, strict=True):
        if member.method.uses_model and model is not None and counterpart.export is not None:
            model, export_notes = export_drafter(
                member.method, counterpart.export, model, deployment.target, choices.out, choices.is_forced
            )
            is_head = True
            notes += export_notes
    model = None if model is None else find_path(model)
    _check_model(members, model)
    prepared = _prepare(deployment, engine, choices, model, is_head)
    if prepared is not None:
        model = prepared.model
    if deployment.rule is not None and deployment.rule.vllm_name and engine.rule_setting is not None:
        settings[engine.rule_setting] = deployment.rule.vllm_name
    drafter = EngineDrafter(tuple(c.name for c in counterparts), model, num_tokens, ranges, settings)
    return DrafterPlan(
        engine.write_drafter(drafter),
        folders=list_local((model,) if model is not None else ()),
        preparations=() if prepared is None else prepared.commands,
        target=None if prepared is None else prepared.target,
        notes=(*notes, *_explain_rule(deployment, engine, is_set=engine.rule_setting in settings)),
    )


def find_counterpart(method: Method, engine: EngineTable) -> Counterpart:
    """Return the counterpart of a method. Raises ForedraftError with the nearest equal if there is none."""
    counterpart = method.counterparts.get(engine.name)
    if counterpart is None:
        stored = method.checkpoint
        reason = None if stored is None else stored.refused_exports.get(engine.name)
        raise ForedraftError(
            f"{reason or f'{engine.title} has no equal of the method {method.name}'}; the nearest is {engine.nearest}"
        )
    return counterpart


def _translate_options(
    member: Member, counterpart: Counterpart, engine: EngineTable, num_tokens: int, notes: list[str]
) -> dict[str, Any]:
    """Return the settings of a member in the engine's names; adds a note on each option without an equal."""
    settings = dict(counterpart.settings)
    if counterpart.draft_tokens is not None:
        settings |= counterpart.draft_tokens(num_tokens)
    for name, value in member.options.items():
        if name in counterpart.options:
            settings |= counterpart.options[name](value)
        elif counterpart.export is None or name not in MODEL_OPTIONS:  # an export has read that revision
            notes.append(f"{member.name}.{name}={value}: no equal in {counterpart.name} of {engine.title}")
    return settings


def _check_model(members: Sequence[Member], model: str | None) -> None:
    readers = [member.name for member in members if member.method.uses_model]
    if readers and model is None:
        raise ForedraftError(f"the method {readers[0]} drafts with a model; give --spec-model")
    if len(readers) > 1:
        raise ForedraftError(f"another engine drafts with one model, not with those of {' and '.join(readers)}")


def _prepare(
    deployment: Deployment, engine: EngineTable, choices: HandoverChoices, model: str | None, is_head: bool
) -> Preparation | None:
    if engine.prepare is None:
        return None
    folder = str((choices.out or Path("gguf")).resolve())
    return engine.prepare(find_path(deployment.target), model, is_head, folder)


def _prepare_target(deployment: Deployment, engine: EngineTable, choices: HandoverChoices) -> DrafterPlan:
    """Return the plan of a deployment without a drafter."""
    prepared = _prepare(deployment, engine, choices, None, is_head=False)
    return DrafterPlan() if prepared is None else DrafterPlan(preparations=prepared.commands, target=prepared.target)


def _explain_lengths(lengths: LengthTable, engine: EngineTable, num_tokens: int, is_set: bool) -> tuple[str, ...]:
    """Return a note on draft lengths without an equal.

    Args:
        lengths: those of the deployment.
        engine: the other engine.
        num_tokens: longest draft there, in tokens.
        is_set: whether the engine gets the table by batch size.
    """
    if lengths.is_fixed and (is_set or lengths.is_uniform):
        return ()
    here = "the longest of each entry" if is_set else f"here {num_tokens} tokens"
    return (f"--spec-tokens {lengths}: {engine.title} has a fixed draft length, {here}",)


def _explain_rule(deployment: Deployment, engine: EngineTable, is_set: bool) -> tuple[str, ...]:
    rule = deployment.rule
    if rule is None or is_set:
        return ()
    return (f"--verify {rule.name}: no equal; {engine.title} verifies by a rule of its own, which is lossless",)


def find_path(name: str) -> str:
    """Return the absolute path of a local file or folder; a hub id as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def list_local(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are absolute paths, and not hub ids."""
    return tuple(name for name in names if Path(name).is_absolute())
