"""A deployment of Foredraft, and the same deployment of another engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.draft_length.length_table import AUTO_LENGTHS, LengthTable
from foredraft.handover.engine import DrafterArguments, EngineTable
from foredraft.verification.rule import Rule

CUDA = "cuda"  # device of a deployment that names none


@dataclass(frozen=True)
class Deployment:
    """Server of Foredraft.

    Attributes:
        target: folder or hub id.
        method: name of the drafting method; None = plain decoding.
        model: folder or hub id of the draft model or head; None = the method needs none.
        lengths: draft lengths by batch size, in tokens. Default = chosen from measured times.
        drafter_options: options of the method.
        rule: verification rule that is given; None = chosen for every request.
        server_options: options of `foredraft serve` that are given, by field.
        host: address to listen on.
        port: its port.
        has_api_key: whether clients send an API key.
        device: "cuda" or "cpu".
    """

    target: str
    method: str | None
    model: str | None = None
    lengths: LengthTable = AUTO_LENGTHS
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule | None = None
    server_options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    has_api_key: bool = False
    device: str = CUDA


@dataclass(frozen=True)
class DrafterPlan:
    """Drafter of a deployment in another engine.

    Attributes:
        arguments: what the engine needs on its command line.
        environment: variables of its process.
        folders: local folders that it reads.
        preparations: shell commands before it starts.
        target: target as the engine reads it; None = as it is.
        notes: what differs, for the user.
        needs_foredraft: whether Foredraft must be installed beside the engine.
    """

    arguments: DrafterArguments = field(default_factory=DrafterArguments)
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    preparations: tuple[str, ...] = ()
    target: str | None = None
    notes: tuple[str, ...] = ()
    needs_foredraft: bool = False


@dataclass(frozen=True)
class Handover:
    """Deployment of another engine that does the same. `formats/` writes it.

    Attributes:
        engine: the engine.
        target: target as the engine reads it.
        flags: arguments of its server, without target, address and API key.
        config: content of its configuration file; empty = it needs none.
        engine_arguments: arguments of the engine itself, for Ray Serve.
        model_name: name of the model in requests.
        deployment: what runs here.
        drafter: the drafter there.
        folders: local files and folders that it reads.
        notes: what has no equal or differs, for the user.
    """

    engine: EngineTable
    target: str
    flags: tuple[str, ...]
    config: Mapping[str, Any]
    engine_arguments: Mapping[str, Any]
    model_name: str
    deployment: Deployment
    drafter: DrafterPlan
    folders: tuple[str, ...]
    notes: tuple[str, ...]
