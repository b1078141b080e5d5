"""Drafters to examine: those that the user gave, or those that exist for the target."""

from dataclasses import dataclass, field, replace
from typing import Any

from foredraft import zoo
from foredraft.bench.grow import find_built_in_origin
from foredraft.bench.methods import find_draft_model
from foredraft.drafter_factory import find_default_method
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.registry import AUTO, METHOD_SEPARATOR, load_methods
from foredraft.llm import LLM

MAX_CANDIDATES = 4  # drafters that are examined if none is given: each takes a share of the measuring time


@dataclass(frozen=True)
class Candidate:
    """One drafter to examine."""

    label: str
    method: str
    spec: dict[str, Any] = field(default_factory=dict)  # in the keys of vLLM's speculative_config
    model: str | None = None  # its folder or hub id; None = built-in, or a method without a model


def list_candidates(llm: LLM) -> list[Candidate]:
    """List the drafters that exist for a target: the default method, then by `Method.auto_rank`, at most four.

    Half of the places are for methods that need no model, so that both kinds are compared.
    """
    origin = llm.builtin or find_built_in_origin(llm.target.model.config)
    context = DrafterContext(llm.target.vocab_size, llm.target, target_parameters=llm.num_parameters)
    default = find_default_method(origin)
    with_model, without_model = [], []
    for name, method in load_methods().items():
        rank = _rank(method, context, origin)
        if rank is None:
            continue
        order = (name != default, -rank, name)
        if not method.uses_model:
            without_model.append((order, Candidate(name, name, {"method": name})))
        elif origin is not None and (folder := zoo.find_drafter(method.built_in.folders, origin)) is not None:
            spec = {"method": name} if llm.builtin else {"method": name, "model": folder}
            with_model.append((order, Candidate(name, name, spec, None if llm.builtin else folder)))
    places = MAX_CANDIDATES // 2
    first = [candidate for _, candidate in sorted(with_model, key=lambda entry: entry[0])]
    second = [candidate for _, candidate in sorted(without_model, key=lambda entry: entry[0])]
    num_first = min(len(first), max(places, MAX_CANDIDATES - len(second)))
    return first[:num_first] + second[: MAX_CANDIDATES - num_first]


def attach_model(candidate: Candidate, llm: LLM) -> Candidate:
    """Return a candidate with the built-in drafter of its method, if its target was grown from a built-in one."""
    if (
        "model" in candidate.spec
        or llm.builtin is not None
        or METHOD_SEPARATOR in candidate.method
        or candidate.method == AUTO
    ):
        return candidate
    model = find_draft_model(candidate.method, llm.target.model.config, None)
    if model is None:
        return candidate
    return replace(candidate, spec={**candidate.spec, "model": model}, model=model)


def _rank(method: Method, context: DrafterContext, origin: str | None) -> float | None:
    """Return the rank of a method: for `auto`, else as a default method; None = it is in neither list."""
    rank = method.get_auto_rank(context)
    return rank if rank is not None else method.default_ranks.get(origin)
