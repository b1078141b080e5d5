"""Table of another engine: its server, its images, and how it is given a drafter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.handover.server_flag import ServerFlag


@dataclass(frozen=True)
class EngineDrafter:
    """Drafter as an engine is given it.

    Attributes:
        names: names of its methods there, in order of preference; several only for engines that combine them.
        model: folder or hub id that it loads; None = it has none.
        num_tokens: longest draft in tokens.
        ranges: (first, last, tokens) by batch size, for engines with `has_length_table`; empty = no table.
        settings: further settings with the engine's own names.
    """

    names: tuple[str, ...]
    model: str | None
    num_tokens: int
    ranges: tuple[tuple[int, int, int], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterArguments:
    """Arguments of an engine for a drafter.

    Attributes:
        flags: arguments of the command.
        config: entries of the engine's configuration file.
        engine_arguments: arguments of the engine itself, for Ray Serve.
    """

    flags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparation:
    """Commands that convert a model before the engine can load it.

    Attributes:
        commands: shell commands.
        target: path of the converted target.
        model: path of the converted drafter; None = there is none.
    """

    commands: tuple[str, ...]
    target: str
    model: str | None


@dataclass(frozen=True)
class EngineTable:
    """Another engine.

    Attributes:
        name: value of --engine.
        title: name in messages.
        version: version whose sources or documentation the table was read from.
        program: start of the command.
        target_flag: flag of the target; "" = the target is the first argument.
        flags: equals of the options of `foredraft serve`, by field of its options.
        write_drafter: arguments for a drafter.
        images: container images, by device.
        entrypoint: start of the command in the image; () = that of the image.
        nearest: what to use instead of a method without an equal.
        health_path: path that answers when the model is loaded.
        api_key_flag: flag of the API key; None = there is none.
        config_flag: flag of the engine's configuration file; None = there is none.
        proposer: its method for a drafter in Python code, and the class of Foredraft's; None = it takes none.
        combines: True if it drafts with several methods at once.
        prepare: conversion of target and drafter; None = it loads the folders as they are. Arguments: target, drafter
            or None, whether the drafter is a head of the target, folder of the converted files.
        has_length_table: whether a drafter takes `EngineDrafter.ranges`. Default False.
        rule_setting: setting of a drafter that names the verification rule as vLLM does; None = there is none.
        has_ray: True if Ray Serve LLM runs it.
        note: what always holds for a handover to this engine; "" = nothing.
    """

    name: str
    title: str
    version: str
    program: tuple[str, ...]
    target_flag: str
    flags: Mapping[str, ServerFlag]
    write_drafter: Callable[[EngineDrafter], DrafterArguments]
    images: Mapping[str, str]
    nearest: str
    entrypoint: tuple[str, ...] = ()
    health_path: str = "/health"
    api_key_flag: str | None = None
    config_flag: str | None = None
    proposer: tuple[str, str] | None = None
    combines: bool = False
    prepare: Callable[[str, str | None, bool, str], Preparation] | None = None
    rule_setting: str | None = None
    has_length_table: bool = False
    has_ray: bool = False
    note: str = ""
