"""The ways to start the server in deploy/: its arguments there, and the time that it has to stop."""

import configparser
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
import yaml

from foredraft.cli.commands import app
from tests.support.dockerfile import parse_dockerfile

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = parse_dockerfile((DEPLOY / "Dockerfile").read_text("utf-8"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PLACEHOLDERS = ("${FOREDRAFT_OPTIONS:-}", "$FOREDRAFT_OPTIONS")


@dataclass(frozen=True)
class Deployment:
    """One way to start the server."""

    name: str
    arguments: list[str]  # after `foredraft serve`
    grace: float  # seconds between the order to stop and SIGKILL
    pause: float = 0  # seconds of them before SIGTERM

    @cached_property
    def options(self) -> dict[str, Any]:
        """All options of the server, parsed by the command line; an unknown one raises."""
        command: Any = typer.main.get_command(app)
        return dict(command.commands["serve"].make_context("serve", list(self.arguments)).params)


def read_yaml(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text("utf-8"))


def read_manifests() -> dict[str, dict[str, Any]]:
    """Return the objects of foredraft.yaml by kind."""
    text = (DEPLOY / "kubernetes" / "foredraft.yaml").read_text("utf-8")
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def read_unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "systemd" / "foredraft.service").read_text("utf-8"))
    return unit


def read_entry_point(target: str) -> list[str]:
    """Return the arguments of an image after `foredraft serve`."""
    words = json.loads(DOCKERFILE.find_last(target, "ENTRYPOINT") or "[]")
    assert words[:2] == ["foredraft", "serve"]
    return words[2:]


def split_words(command: str) -> list[str]:
    """Split a command without the options that the user adds."""
    for placeholder in PLACEHOLDERS:
        command = command.replace(placeholder, "")
    return shlex.split(command)


def list_deployments() -> list[Deployment]:
    service = read_yaml("compose.yaml")["services"]["foredraft"]
    compose_words, compose_grace = split_words(service["command"]), float(service["stop_grace_period"].rstrip("s"))
    pod = read_manifests()["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [patch] = read_yaml("kubernetes/cuda.yaml")["spec"]["template"]["spec"]["containers"]
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    kubernetes_grace = pod["terminationGracePeriodSeconds"]
    unit = read_unit()["Service"]
    program, command, *words = split_words(unit["ExecStart"])
    assert (Path(program).name, command) == ("foredraft", "serve")
    cpu, cuda = read_entry_point("cpu"), read_entry_point("cuda")
    return [
        Deployment("compose", cpu + compose_words, compose_grace),
        Deployment("compose-cuda", cuda + compose_words, compose_grace),
        Deployment("kubernetes", cpu + container["args"], kubernetes_grace, float(pause)),
        Deployment("kubernetes-cuda", cuda + patch["args"], kubernetes_grace, float(pause)),
        Deployment("systemd", words, float(unit["TimeoutStopSec"])),
    ]
