"""Log-probabilities as the API writes them.

They are the model's own: log-softmax of the logits before temperature, penalties, filters and grammar, which is vLLM's
default (raw_logprobs). What a token's probability was under the law it was drawn from is not reported here.
"""

from collections.abc import Sequence
from typing import Any

from foredraft.completion import TokenLogprob
from foredraft.server.vocabulary import Vocabulary, clamped, likeliest

Entry = TokenLogprob | None  # the first token of a prompt has none


def completion_logprobs(
    vocabulary: Vocabulary,
    tokens: Sequence[int],
    entries: Sequence[Entry],
    offsets: Sequence[int],
    count: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The arrays of /v1/completions; `offsets` are where each token's text begins."""
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if entry is None else clamped(entry.raw_logprob) for entry in entries],
        "tokens": [vocabulary.spelt(token, as_ids) for token in tokens],
        "top_logprobs": [None if entry is None else _top(vocabulary, entry, count, as_ids) for entry in entries],
    }


def _top(vocabulary: Vocabulary, entry: TokenLogprob, count: int, as_ids: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in likeliest(entry, count):
        name = vocabulary.spelt(token, as_ids)
        if found.get(name, logprob) > logprob:  # two ids of one spelling: both stay
            name = vocabulary.spelt(token, True)
        found[name] = clamped(logprob)
    return found


def chat_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprob], count: int, as_ids: bool = False
) -> dict[str, Any]:
    """What /v1/chat/completions says of each token."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelt = vocabulary.spelt(token, as_ids)
        return {"token": spelt, "logprob": clamped(logprob), "bytes": vocabulary.bytes_of(token)}

    content = []
    for entry in entries:
        top = [one(token, logprob) for token, logprob in entry.raw_top[:count]]
        content.append(one(entry.token_id, entry.raw_logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(vocabulary: Vocabulary, entries: Sequence[Entry], count: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token id -> log-probability, rank among the likeliest if it is there, spelling."""
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(entry.raw_top, 1)}
        result.append(
            {
                str(token): {
                    "logprob": clamped(logprob), "rank": ranks.get(token), "decoded_token": vocabulary.spelt(token)
                }
                for token, logprob in likeliest(entry, count)
            }
        )  # fmt: skip
    return result
