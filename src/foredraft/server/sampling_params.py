"""Conversion of request fields to Sampling and RequestOptions."""

from itertools import pairwise
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.outputs import Stats
from foredraft.request_options import RequestOptions
from foredraft.sampling.grammar import Grammar
from foredraft.sampling.params import Sampling
from foredraft.server.errors import ApiError
from foredraft.server.schemas import GenerationRequest
from foredraft.verification.registry import AUTO, find_rule
from foredraft.verification.rule import Rule


def build_sampling(
    request: GenerationRequest,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> Sampling:
    """Build the sampling parameters of a request.

    Args:
        request: body of the request.
        max_tokens: maximum output length after the default of the route.
        logprobs: likeliest tokens to report per output token. None = no log-probabilities.
        prompt_logprobs: the same for prompt tokens.
        grammar: grammar of the output.

    Raises:
        ApiError: values contradict each other.
    """
    optional: dict[str, Any] = {  # a None falls back to the default of Sampling
        "temperature": request.temperature,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "typical_p": request.typical_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "stop": _to_strings(request.stop),
        "bad_words": request.bad_words,
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": _parse_logit_bias(request.logit_bias),
        "grammar": grammar,
    }
    try:
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            n=request.n,
            seed=request.seed,
            top_k=max(request.top_k or 0, 0),
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
            **{name: value for name, value in optional.items() if value is not None},
        )
    except ValueError as error:
        name = str(error).partition(" ")[0]  # messages of Sampling begin with the name of the field
        raise ApiError(400, str(error), name if name in type(request).model_fields else None) from None


def build_options(
    request: GenerationRequest,
    prediction: tuple[int, ...],
    server_rule: Rule | None = None,
    shown_tokens: tuple[int, ...] = (),
) -> RequestOptions:
    """Build the options of a request that are no sampling parameters.

    Args:
        request: body of the request.
        prediction: its prediction as token ids.
        server_rule: rule of requests that name none, whose settings a request may change. Default None = "auto".
        shown_tokens: control tokens whose names are part of the text. Default () = none.

    Raises:
        ApiError: there is no such rule, or it has no such setting.
    """
    return RequestOptions(
        priority=request.priority,
        num_speculative_tokens=None if request.speculative is None else request.speculative.num_speculative_tokens,
        prediction=prediction,
        salt=(request.cache_salt or "").encode(),
        is_traced=request.foredraft_trace,
        verify=_read_rule(request, server_rule),
        skip_special_tokens=request.skip_special_tokens is not False,
        shown_tokens=shown_tokens,
    )


def _read_rule(request: GenerationRequest, server_rule: Rule | None) -> str | Rule | None:
    """Return the rule that a request names or changes; None if it does neither."""
    values = {"posterior_threshold": request.posterior_threshold, "posterior_alpha": request.posterior_alpha}
    settings = {name: value for name, value in values.items() if value is not None}
    if request.verify is None and not settings:
        return None
    default = AUTO if server_rule is None else server_rule
    try:
        return find_rule(default if request.verify is None else request.verify, settings) or AUTO
    except ForedraftError as error:
        name = str(error).partition(" ")[0]  # messages about a setting begin with its name
        raise ApiError(400, str(error), name if name in settings else "verify") from None


def format_spec_metrics(stats: Stats) -> dict[str, Any]:
    """Format vLLM's `metrics.speculative_decoding` of one completion.

    The mean acceptance length includes the target's token. The histogram counts drafts by accepted tokens.
    """
    num_reaching = [stats.num_drafts, *stats.accepted_at, 0]  # drafts with at least 0, 1, 2 ... accepted tokens
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / stats.num_drafts if stats.num_drafts else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - less for more, less in pairwise(num_reaching)],
        "num_spec_steps": stats.num_drafts,
        "num_draft_tokens": stats.num_drafted,
        "num_accepted_draft_tokens": stats.num_accepted,
    }


def _to_strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    return None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _parse_logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise ApiError(400, "logit_bias takes token ids as keys", "logit_bias")
    return {int(name): value for name, value in bias.items()}
