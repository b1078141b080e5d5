"""The slow oracle of the engine: one request, one token at a time, everything computed anew for every token.

No batch, no cache, no draft, no stream: the text so far is the decoding of all tokens so far, a stop string is
searched in it, and the distribution is that of one row. It shares `distribution` and the keyed noise with the engine;
both have oracles of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.sampling import rng
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream

LOST = "\N{REPLACEMENT CHARACTER}"


@dataclass
class ExpectedCompletion:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[Tensor] = field(default_factory=list)  # [V] log p of every sampled token
    raw: list[Tensor] = field(default_factory=list)  # [V] log-softmax of the logits themselves


def decode_output(tokenizer: Any, prompt: Sequence[int], output: Sequence[int]) -> str:
    """Decode the text that the output adds to the prompt, without an incomplete character at its end."""
    if tokenizer is None:
        return ""
    before = tokenizer.backend_tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole = tokenizer.backend_tokenizer.decode([*prompt, *output], skip_special_tokens=True)
    assert whole.startswith(before), "the prompt ends inside a character: choose another"
    text = whole[len(before) :]
    return text.removesuffix(LOST) if _is_incomplete(tokenizer, [*prompt, *output], len(whole)) else text


def _is_incomplete(tokenizer: Any, tokens: list[int], size: int) -> bool:
    """True if some byte 0x80, 0x90, 0xA0 or 0xB0 continues the last character. After a complete or broken one, such
    a byte is a new character."""
    following = tokenizer.convert_tokens_to_ids(list("ĢĲł°"))
    return any(
        len(tokenizer.backend_tokenizer.decode([*tokens, byte], skip_special_tokens=True)) == size for byte in following
    )


def complete(
    after: Callable[[Sequence[int]], Tensor],
    tokenizer: Any,
    prompt: list[int],
    sampling: Sampling,
    seed: int,
    eos_ids: frozenset[int] = frozenset(),
    max_length: int = 1 << 20,
    sample: int = 0,
) -> ExpectedCompletion:
    """`after`: all tokens -> [V] logits that follow them."""
    end_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    result = ExpectedCompletion()
    while not result.finish_reason:
        tokens = prompt + result.token_ids
        logits = after(tokens)
        probs = distribution(logits[None], sampling, [TokenHistory(prompt, result.token_ids, (), sorted(end_ids), ())])
        keys = torch.tensor([rng.derive_key(seed, sample, NoiseStream.TOKEN, len(tokens))])
        token = int(rng.exponential_race(probs, keys).argmax())
        result.logprobs.append(probs[0].log())
        result.raw.append(logits.log_softmax(-1))
        before = decode_output(tokenizer, prompt, result.token_ids)
        result.token_ids.append(token)
        count = len(result.token_ids)
        if token in end_ids:
            result.text = before
            result.finish_reason = "stop"
            result.stop_reason = token if token in sampling.stop_token_ids else None
            break
        result.text = decode_output(tokenizer, prompt, result.token_ids)
        stop = _find_stop(result.text, len(before), sampling.stop) if count >= sampling.min_tokens else None
        if stop is not None:
            begin, result.stop_reason = stop
            result.text, result.finish_reason = result.text[:begin], "stop"
        elif count == sampling.max_tokens or len(prompt) + count == max_length:
            result.finish_reason = "length"
    return result


def _find_stop(text: str, old: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """(begin, stop string) among those that end in the text beyond `old`: the first to begin, then the longest."""
    found = [
        (begin, -len(stop), stop)
        for stop in stops
        for begin in range(len(text))
        if text.startswith(stop, begin) and begin + len(stop) > old
    ]
    if not found:
        return None
    begin, _, stop = min(found)
    return begin, stop
