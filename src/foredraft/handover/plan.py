"""Translation of a deployment to another engine."""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.handover.deployment import Deployment, Handover
from foredraft.handover.drafter_plan import HandoverChoices, find_path, list_local, plan_drafter
from foredraft.handover.engine import EngineTable
from foredraft.handover.server_flag import ServerFlag


def plan_handover(deployment: Deployment, engine: EngineTable, choices: HandoverChoices) -> Handover:
    """Return what starts the same in another engine.

    Args:
        deployment: what runs here.
        engine: the other engine.
        choices: choices of the user. A drafter is exported to `choices.out` if the engine needs another format.

    Raises:
        ForedraftError: if the engine has no equal of the drafter, or the drafter cannot be exported.
    """
    drafter = plan_drafter(deployment, engine, choices)
    target = drafter.target or find_path(deployment.target)
    flags: list[str] = []
    config: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    folders, notes = [target], [engine.note] if engine.note else []
    names = deployment.server_options.get("served_model_name") or [deployment.target]
    for name, value in deployment.server_options.items():
        flag = find_flag(engine, name)
        note = _explain(name, value, flag, engine)
        if note is not None:
            notes.append(note)
        if not _is_accepted(flag, value):
            continue
        flags += _write_flag(flag, value)
        _merge(config, flag.config(value) if flag.config is not None else {})
        if flag.argument is not None:
            arguments[flag.argument] = flag.convert(value) if flag.argument_value is None else flag.argument_value
        if flag.is_folder:
            folders.append(find_path(value))
    _merge(config, drafter.arguments.config)
    return Handover(
        engine=engine,
        target=target,
        flags=(*flags, *drafter.arguments.flags),
        config=config,
        engine_arguments=arguments | dict(drafter.arguments.engine_arguments),
        model_name=names[0],
        deployment=deployment,
        drafter=drafter,
        folders=list_local((*dict.fromkeys(folders), *drafter.folders)),
        notes=(*notes, *_explain_key(deployment, engine), *drafter.notes),
    )


def find_flag(engine: EngineTable, name: str) -> ServerFlag:
    """Return the equal of an option of `foredraft serve`, by its field."""
    if name not in engine.flags:
        raise ForedraftError(f"there is no entry for the option {name} in the table of {engine.title}")
    return engine.flags[name]


def _is_accepted(flag: ServerFlag, value: Any) -> bool:
    return flag.is_equal and (flag.values is None or value in flag.values)


def _explain(name: str, value: Any, flag: ServerFlag, engine: EngineTable) -> str | None:
    """Return what differs about an option, or why it has no equal; None = it is the same."""
    option = f"--{name.replace('_', '-')}"
    if flag.values is not None and value not in flag.values:
        return f"{option} {value}: {engine.title} takes {', '.join(sorted(map(str, flag.values)))}"
    if not flag.is_equal:
        return f"{option}: no equal in {engine.title}; {flag.note}"
    if isinstance(value, list) and len(value) > 1 and flag.convert(value) is value and not flag.takes_several:
        return f"{option}: {engine.title} takes one; the first is used"
    return f"{option}: {flag.note}" if flag.note else None


def _list_values(flag: ServerFlag, value: Any) -> list[Any]:
    """Return the values that stand behind a flag."""
    value = flag.convert(value)
    if not isinstance(value, list | tuple):
        return [value]
    return list(value) if flag.takes_several else [value[0]]


def _write_flag(flag: ServerFlag, value: Any) -> list[str]:
    if flag.flag is None:
        return []
    if flag.is_switch:
        return [flag.flag]
    values = map(str, _list_values(flag, value))
    return [flag.flag, *(map(find_path, values) if flag.is_folder else values)]


def _merge(config: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Add entries to a configuration; entries of equal sections are joined."""
    for key, value in entries.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value


def _explain_key(deployment: Deployment, engine: EngineTable) -> tuple[str, ...]:
    if not deployment.has_api_key or engine.api_key_flag is not None:
        return ()
    return (f"--api-key: no equal in {engine.title}; check keys in a proxy",)
