"""From the fields of a request to Sampling and RequestOptions."""

from itertools import pairwise
from typing import Any

from foredraft.completion import Stats
from foredraft.request import RequestOptions
from foredraft.sampling import Sampling
from foredraft.server.errors import ApiError
from foredraft.server.grammars import grammar_of
from foredraft.server.protocol import Generating


def sampling_of(
    request: Generating, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, param: str = "max_tokens"
) -> Sampling:
    """Raises ApiError for values that contradict each other."""
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "typical_p": request.typical_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "stop": _words(request.stop),
        "bad_words": request.bad_words,
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": _bias(request.logit_bias),
        "grammar": grammar_of(request),
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
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValueError as error:
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), name if name in type(request).model_fields else None) from None


def options_of(request: Generating, prediction: tuple[int, ...]) -> RequestOptions:
    return RequestOptions(
        priority=request.priority,
        num_speculative_tokens=None if request.speculative is None else request.speculative.num_speculative_tokens,
        prediction=prediction,
        salt=(request.cache_salt or "").encode(),
        is_traced=request.foredraft_trace,
    )


def speculation(stats: Stats) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding` of one completion; its lengths count the target's own token."""
    kept = [stats.num_drafts, *stats.accepted_at, 0]
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / stats.num_drafts if stats.num_drafts else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - less for more, less in pairwise(kept)],
        "num_spec_steps": stats.num_drafts,
        "num_draft_tokens": stats.num_drafted,
        "num_accepted_draft_tokens": stats.num_accepted,
    }


def _words(stop: str | list[str] | None) -> tuple[str, ...] | None:
    return None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise ApiError(400, "logit_bias takes token ids as keys", "logit_bias")
    return {int(name): value for name, value in bias.items()}
