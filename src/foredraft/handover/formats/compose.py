"""A compose file with the engine as its one service."""

from typing import Any

from foredraft.errors import ForedraftError
from foredraft.handover.deployment import CUDA, Handover
from foredraft.handover.output_format import API_KEY_VARIABLE, OutputFormat
from foredraft.handover.text import CONFIG_NAME, describe, find_image, list_arguments, name_service, to_yaml

LOCAL_CACHE, CACHE = "${HOME}/.cache/huggingface", "/root/.cache/huggingface"
CONFIG_PATH = f"/etc/{CONFIG_NAME}"


def write(handover: Handover) -> str:
    """Return the file. Folders have the same paths inside the container as outside."""
    name = name_service(handover.engine)
    content: dict[str, Any] = {"services": {name: _make_service(handover)}}
    if handover.config:
        content["configs"] = {"engine": {"content": _escape(to_yaml(handover.config))}}
    first = [f"first: {command}" for command in handover.drafter.preparations]
    return describe(handover, first) + to_yaml(content)


def _make_service(handover: Handover) -> dict[str, Any]:
    engine, deployment = handover.engine, handover.deployment
    image = find_image(handover)
    if image is None:
        raise ForedraftError(f"{engine.title} has no image for {deployment.device} here; use --format command")
    key = f"${{{API_KEY_VARIABLE}:?}}"
    arguments = list_arguments(handover, "0.0.0.0", key, CONFIG_PATH)
    service: dict[str, Any] = {"image": image}
    if handover.drafter.needs_foredraft:
        service = {"build": {"dockerfile_inline": f"FROM {image}\nRUN pip install foredraft\n"}}
    if engine.entrypoint:
        service["entrypoint"] = list(engine.entrypoint)
    service["command"] = [argument if argument == key else _escape(argument) for argument in arguments]
    service["ports"] = [f"{deployment.host}:{deployment.port}:{deployment.port}"]
    service["volumes"] = [f"{LOCAL_CACHE}:{CACHE}", *(f"{path}:{path}:ro" for path in handover.folders)]
    if handover.drafter.environment:
        service["environment"] = {key: _escape(value) for key, value in handover.drafter.environment.items()}
    if handover.config:
        service["configs"] = [{"source": "engine", "target": CONFIG_PATH}]
    service["ipc"] = "host"
    if deployment.device == CUDA:
        device = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _escape(text: str) -> str:
    """Return a text in which compose puts no variables."""
    return text.replace("$", "$$")


FORMAT = OutputFormat("compose", "compose.yaml", write)
