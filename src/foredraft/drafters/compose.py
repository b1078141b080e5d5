"""Several drafters in one request: `suffix+eagle3`, or `auto`, which takes the best that there are.

After SpecInfer's merged trees (2305.09781), and suffix decoding's way of falling back to a head (2411.04975).
composed.py is the drafter, choice.py says who drafts for whom, merging.py and verify.py why that is lossless; this file
knows names and options.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

from foredraft.checkpoints.read import recognise
from foredraft.drafters.base import Context, configured, methods, parse, reads_model
from foredraft.drafters.choice import MODES, Mode
from foredraft.drafters.composed import Composed
from foredraft.drafters.parts import Part
from foredraft.errors import ForedraftError

log = logging.getLogger(__name__)
METHOD = "compose"
AUTO, PLUS = "auto", "+"
Options = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """`parts`: methods, in the order in which they are preferred where they are equally good; None = the best text
    method and the best that reads a model, of those there are for this target. `mode`: "merge" = everybody drafts, and
    the drafts are one tree; "sequence" = one of them drafts for a request, and the text goes on below its draft;
    "auto" = whichever makes the most tokens per second, request by request. Options of a part: `{"ngram": {...}}`.
    """

    parts: tuple[str, ...] | None = None
    mode: str = "auto"


@dataclass(frozen=True)
class Composition:
    """A Config with the options of the parts."""

    config: Config
    of_part: Mapping[str, Options]  # by part
    shared: Options  # for the one part that knows them


def named(name: str) -> Options | None:
    """`auto`, and methods joined by +."""
    if name == AUTO:
        return {}
    if PLUS not in name:
        return None
    return {"parts": [part.strip() for part in name.split(PLUS)]}


def configure(options: Options) -> Composition:
    """Raises ValueError for what is wrong with the composition itself; options of parts are looked at with them."""
    mine = {spec.name for spec in fields(Config)}
    own: Options = {}
    shared: Options = {}
    of_part: dict[str, Options] = {}
    for name, value in options.items():
        part, dot, option = name.partition(".")
        if dot and part and option:
            of_part.setdefault(part, {})[option] = value
        elif isinstance(value, dict):
            of_part.setdefault(name, {}).update(value)
        else:
            (own if name in mine else shared)[name] = value
    return Composition(parse(Config, own), of_part, shared)


def create(config: Composition | Config, context: Context) -> Composed:
    """Raises ForedraftError for parts that do not exist, cannot be had for this target, or have no such option."""
    given = config if isinstance(config, Composition) else Composition(config, {}, {})
    mode, names = given.config.mode, given.config.parts
    if mode not in MODES:
        raise ForedraftError(f"unknown mode {mode!r} of a composition; use one of: {', '.join(MODES)}")
    makers = _picked(given, context) if names is None else _asked(tuple(names), given, context)
    for name in given.of_part:
        if name not in makers:
            raise ForedraftError(f"options for {name!r}, which is not among the parts: {', '.join(makers)}")
    title = PLUS.join(makers)
    if names is None:
        log.info("auto picked %s", title)
    return Composed(list(makers.values()), _mode(mode), f"{AUTO}: {title}" if names is None else title)


def _mode(word: str) -> Mode:
    return next(mode for mode in MODES if mode == word)


def _asked(names: Sequence[str], given: Composition, context: Context) -> dict[str, Part]:
    """The parts that were named."""
    known = methods()
    for name in names:
        if name not in known or name == METHOD:
            usable = ", ".join(sorted(set(known) - {METHOD}))
            raise ForedraftError(f"unknown method {name!r} in {PLUS.join(names)}; use some of: {usable}")
    if len(set(names)) < max(len(names), 2):
        raise ForedraftError(f"a composition takes two or more different methods, got {PLUS.join(names)!r}")
    modules = {name: known[name] for name in names}
    options = {name: dict(given.of_part.get(name, {})) for name in names}
    if context.model is not None:
        options[_reader(context.model, modules, options)]["model"] = context.model
    for option, value in given.shared.items():
        for name in _takers(option, modules):
            options[name].setdefault(option, value)
    return {name: _made(name, options[name], context) for name in names}


def _reader(model: str, modules: Mapping[str, ModuleType], options: Mapping[str, Options]) -> str:
    """The part that a model given to the whole is for."""
    readers = [name for name, module in modules.items() if reads_model(module) and "model" not in options[name]]
    if len(readers) > 1:
        found = recognise(model)[0]
        readers = [name for name in readers if name == found] or readers
    if len(readers) != 1:
        how = ", ".join(f"{name}.model" for name in modules if reads_model(modules[name]))
        raise ForedraftError(
            f"the model {model!r} is for no part of {PLUS.join(modules)}; leave it out"
            if not how
            else f"say for which part the model {model!r} is: give {how}"
        )
    return readers[0]


def _takers(option: str, modules: Mapping[str, ModuleType]) -> list[str]:
    """The one part with an option; of `quantization` all that have it, for it means the same to all."""
    takers = [name for name, module in modules.items() if option in {spec.name for spec in fields(module.Config)}]
    if not takers:
        raise ForedraftError(
            f"unknown drafter option {option!r}; {PLUS.join(modules)} takes mode, and options of its parts as "
            f"{next(iter(modules))}.OPTION"
        )
    if len(takers) > 1 and option != "quantization":
        raise ForedraftError(f"say whose {option} is meant: " + " or ".join(f"{name}.{option}" for name in takers))
    return takers


def _made(name: str, options: Options, context: Context) -> Part:
    """Raises ForedraftError."""
    module, rest = methods()[name], dict(options)
    model, length = rest.pop("model", None), rest.pop("num_speculative_tokens", context.num_tokens)
    if model is not None and not reads_model(module):
        raise ForedraftError(f"the method {name} drafts from the text alone; leave its model {model!r} out")
    own = replace(
        context,
        model=None if model is None else str(model),
        num_tokens=length,
        builtin=context.builtins.get(name),
    )
    try:
        drafter = module.create(configured(module, rest), own)
    except ForedraftError as error:
        raise ForedraftError(f"{name}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ForedraftError(f"{name}: {error}") from error
    return Part(name, drafter, context.guarded(drafter, name))


def _picked(given: Composition, context: Context) -> dict[str, Part]:
    """The best method that reads nothing but the text, and the best that reads a model, as far as there are any.

    A method says by AUTO_RANK how good it is among its kind, or by `auto_rank(context)` where that depends on the
    target; one that says nothing, or None, is not picked. A model that was given is used whatever it is.
    """
    found: dict[str, Part] = {}
    wanted = None if context.model is None else recognise(context.model)[0]
    for is_text in (True, False):
        some = {name: m for name, m in methods().items() if name != METHOD and reads_model(m) is not is_text}
        ranks = {name: rank for name, m in some.items() if (rank := _rank(m, context)) is not None}
        if not is_text and wanted is not None:
            ranks = {wanted: 0.0}
        for name in sorted(ranks, key=lambda name: (-ranks[name], name)):
            options = dict(given.of_part.get(name, {}))
            if name == wanted:
                options["model"] = context.model
            options |= {o: v for o, v in given.shared.items() if o in {f.name for f in fields(some[name].Config)}}
            try:
                found[name] = _made(name, options, context)
                break
            except ForedraftError as error:
                if name == wanted:
                    raise
                log.debug("auto leaves %s out: %s", name, error)
    for option in given.shared:
        _takers(option, {name: methods()[name] for name in found})
    if not found:
        raise ForedraftError("auto found no method for this target; name one with --spec-method")
    return found


def _rank(method: ModuleType, context: Context) -> float | None:
    found: float | None = (
        method.auto_rank(context) if hasattr(method, "auto_rank") else getattr(method, "AUTO_RANK", None)
    )
    return found
