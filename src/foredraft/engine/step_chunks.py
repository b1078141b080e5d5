"""Chunks of a step: how many committed tokens each request computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from foredraft.draft_length.length_table import AUTO_LENGTHS, LengthTable
from foredraft.request import Request

Chunk: TypeAlias = tuple[Request, int]  # a request, and the number of committed tokens that it computes in a step


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one step, in requests and tokens."""

    max_batch: int = 32  # running requests
    max_step_tokens: int = 2048  # tokens of one forward pass of the target, draft nodes included
    max_chunk: int = 512  # prompt tokens of one request in a step; of all prompts together while a request decodes
    draft_limits: LengthTable = AUTO_LENGTHS  # least and most draft nodes of a request, by batch size


def select_chunks(running: Sequence[Request], limits: SchedulerLimits) -> list[Chunk]:
    """Choose the chunks of a step within its limits. Their pages are not counted: the caller has made room for them."""
    decoding = [r for r in running if r.num_tokens - r.num_computed == 1]
    prompts = [r for r in running if r.num_tokens - r.num_computed > 1] if len(decoding) < len(running) else []
    tokens_left = limits.max_step_tokens
    order = [*decoding, *prompts]
    # The token budget may be too small to give every decoding request and one prompt a token. The requests then
    # take turns: those that have not run for the longest time come first.
    if len(decoding) + bool(prompts) > tokens_left:
        order.sort(key=_get_last_step)
    # While any request is decoding, all prompts together get at most `max_chunk` tokens per step. This bounds the
    # time of the step, and so the time between two tokens of the decoding request.
    prompt_tokens_left = limits.max_chunk if decoding else tokens_left
    chunks: list[Chunk] = []
    for request in order:
        missing = request.num_tokens - request.num_computed
        chunk = 1 if missing == 1 else min(missing, limits.max_chunk, prompt_tokens_left, tokens_left)
        if chunk > 0 and missing > 1 and request.spec.images is not None:
            chunk = request.spec.images.fit_chunk(request.num_computed, chunk)
            chunk = (
                0 if chunk > tokens_left else chunk
            )  # a block is computed in one pass: it waits for a step with room
        if chunk > 0:
            chunks.append((request, chunk))
            tokens_left -= chunk
            prompt_tokens_left -= chunk if missing > 1 else 0
        if tokens_left <= 0:
            break
    return chunks


def _get_last_step(request: Request) -> int:
    return request.last_step
