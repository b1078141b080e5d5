"""Requests made by hand, without a model and its factory, and changes of what a request was given."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from foredraft.request import Request
from foredraft.request_spec import RequestSpec
from foredraft.sampling.grammar_matcher import GrammarMatcher
from foredraft.sampling.params import Sampling


def make_request(
    slot: int,
    prompt: Iterable[int],
    sampling: Sampling,
    seed: int = 0,
    *,
    output: Sequence[int] = (),
    num_computed: int = 0,
    pages: list[int] | None = None,
    waits_for: Request | None = None,
    matcher: GrammarMatcher | None = None,
    **spec: Any,
) -> Request:
    """Make a request; `spec` are further fields of its RequestSpec. It keeps the list of pages."""
    return Request(
        slot,
        RequestSpec(tuple(prompt), sampling, seed, **spec),
        waits_for,
        matcher,
        list(output),
        [] if pages is None else pages,
        num_computed,
    )


def change_spec(request: Request, **changes: Any) -> None:
    """Give a request another spec, which no code of the package does."""
    request.spec = replace(request.spec, **changes)


def change_options(request: Request, **changes: Any) -> None:
    change_spec(request, options=replace(request.spec.options, **changes))
