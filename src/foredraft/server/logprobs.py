"""Log-probabilities in the formats of the API.

They are the model's: log-softmax of the logits before temperature, penalties, filters and grammar, which is vLLM's
default (raw_logprobs). Probabilities after the sampling settings are not reported here.
"""

from collections.abc import Sequence
from typing import Any

from foredraft.outputs import TokenLogprob
from foredraft.server.vocabulary import ServerVocabulary, clamp_logprob, select_top

LogprobEntry = TokenLogprob | None  # None for the first token of a prompt


def format_completion_logprobs(
    vocabulary: ServerVocabulary,
    tokens: Sequence[int],
    entries: Sequence[LogprobEntry],
    offsets: Sequence[int],
    count: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Format the `logprobs` object of /v1/completions.

    Args:
        vocabulary: vocabulary that turns ids into text.
        tokens: ids.
        entries: log-probabilities, one per token.
        offsets: text offsets in characters, one per token.
        count: likeliest tokens to list per position.
        as_ids: write tokens as "token_id:N".
    """
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if entry is None else clamp_logprob(entry.raw_logprob) for entry in entries],
        "tokens": [vocabulary.format_token(token, as_ids) for token in tokens],
        "top_logprobs": [None if entry is None else _format_top(vocabulary, entry, count, as_ids) for entry in entries],
    }


def _format_top(vocabulary: ServerVocabulary, entry: TokenLogprob, count: int, as_ids: bool) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, logprob in select_top(entry, count):
        name = vocabulary.format_token(token, as_ids)
        if top.get(name, logprob) > logprob:  # two ids with the same text: the second is listed by its id
            name = vocabulary.format_token(token, True)
        top[name] = clamp_logprob(logprob)
    return top


def format_chat_logprobs(
    vocabulary: ServerVocabulary, entries: Sequence[TokenLogprob], count: int, as_ids: bool = False
) -> dict[str, Any]:
    """Format the `logprobs` object of /v1/chat/completions, with the `count` likeliest tokens per position."""

    def format_entry(token: int, logprob: float) -> dict[str, Any]:
        text = vocabulary.format_token(token, as_ids)
        return {"token": text, "logprob": clamp_logprob(logprob), "bytes": vocabulary.list_bytes(token)}

    content = []
    for entry in entries:
        top = [format_entry(token, logprob) for token, logprob in entry.raw_top[:count]]
        content.append(format_entry(entry.token_id, entry.raw_logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def format_prompt_logprobs(
    vocabulary: ServerVocabulary, entries: Sequence[LogprobEntry], count: int
) -> list[dict[str, Any] | None]:
    """Format vLLM's `prompt_logprobs`: token id -> log-probability, rank and text.

    The rank is None for a token that is not among the likeliest.
    """
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(entry.raw_top, 1)}
        result.append(
            {
                str(token): {
                    "logprob": clamp_logprob(logprob),
                    "rank": ranks.get(token),
                    "decoded_token": vocabulary.format_token(token),
                }
                for token, logprob in select_top(entry, count)
            }
        )
    return result
