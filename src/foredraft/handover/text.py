"""Text that all formats share: YAML, comments, and the arguments of the server."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from foredraft.handover.deployment import Handover
from foredraft.handover.engine import EngineTable

INDENT = "  "
CONFIG_NAME = "engine.yaml"  # configuration file of an engine that has one


def to_yaml(value: Any, depth: int = 0) -> str:
    """Return a value as lines of YAML: mappings, lists, texts, numbers and booleans.

    A text is quoted as in JSON, which YAML contains; one of several lines is a block.
    """
    lead = INDENT * depth
    if isinstance(value, dict):
        return "".join(f"{lead}{key}:{_to_entry(one, depth)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return "".join(f"{lead}-{_to_item(one, depth)}" for one in value)
    return f"{lead}{_to_scalar(value)}\n"


def _to_entry(value: Any, depth: int) -> str:
    """Return what follows a key or a dash."""
    if isinstance(value, dict | list | tuple) and value:
        return "\n" + to_yaml(value, depth + 1)
    if isinstance(value, str) and "\n" in value:
        return " |\n" + "".join(f"{INDENT * (depth + 1)}{line}\n" for line in value.splitlines())
    return f" {_to_scalar(value)}\n"


def _to_item(value: Any, depth: int) -> str:
    """Return what follows the dash of a list; the first entry of a mapping stands beside it."""
    if isinstance(value, dict) and value:
        return " " + to_yaml(value, depth + 1).removeprefix(INDENT * (depth + 1))
    return _to_entry(value, depth)


def _to_scalar(value: Any) -> str:
    return json.dumps(value if not isinstance(value, tuple) else list(value))


def to_comments(lines: Iterable[str]) -> str:
    """Return lines as comments of a shell script or of YAML."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def describe(handover: Handover, further: Sequence[str] = ()) -> str:
    """Return the comments at the top: the engine, what has no equal, and what comes first."""
    engine = handover.engine
    lines = [f"{engine.title}, by its version {engine.version}"]
    lines += [f"note: {note}" for note in (*handover.notes, *further)]
    if handover.drafter.needs_foredraft:
        lines.append(f"note: the drafter is Foredraft's own; {engine.title} needs it installed: pip install foredraft")
    return to_comments(lines)


def list_arguments(handover: Handover, host: str, api_key: str, config_path: str) -> list[str]:
    """Return the arguments of the server.

    Args:
        handover: what to start.
        host: address to listen on.
        api_key: what stands for the API key.
        config_path: path of the engine's configuration file, if it needs one.
    """
    engine, deployment = handover.engine, handover.deployment
    arguments = [engine.target_flag] if engine.target_flag else []
    arguments += [handover.target, "--host", host, "--port", str(deployment.port), *handover.flags]
    if deployment.has_api_key and engine.api_key_flag is not None:
        arguments += [engine.api_key_flag, api_key]
    if handover.config and engine.config_flag is not None:
        arguments += [engine.config_flag, config_path]
    return arguments


def find_image(handover: Handover) -> str | None:
    """Return the container image for the device; None if the engine has none."""
    return handover.engine.images.get(handover.deployment.device)


def name_service(engine: EngineTable) -> str:
    """Return the name of an engine's container, which may have letters, digits and dashes."""
    return engine.name.replace(".", "-")
