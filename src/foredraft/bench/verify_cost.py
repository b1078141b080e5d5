"""T(verify k) / T(decode 1): what a target pass over k tokens costs, set against a pass over one."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import ForwardBatch, Span

REPEATS = 20


@dataclass(frozen=True)
class VerifyCost:
    """A target pass over `rows` tokens."""

    rows: int
    seconds: float  # median
    ratio: float  # over a pass of one token; exactly 1 there


def parse_rows(text: str) -> list[int]:
    """'1,2,4' -> [1, 2, 4]; 1 is always among them, for it is what the others are set against."""
    try:
        rows = {int(part) for part in text.split(",")}
    except ValueError:
        rows = {0}
    if min(rows) < 1:
        raise ForedraftError(f"--verify-cost takes numbers of tokens, as 1,2,4,8,16; got {text!r}")
    return sorted(rows | {1})


def measure_costs(
    llm: Any,
    rows: Sequence[int],
    context: int,
    repeats: int = REPEATS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[VerifyCost]:
    """Passes over each number of tokens after `context` tokens, in turn; llm is an LLM. Raises ForedraftError."""
    if not 1 <= context <= llm.target.context_length - max(rows):
        raise ForedraftError(
            f"--context {context} and {max(rows)} tokens more do not fit the model's context of "
            f"{llm.target.context_length}; give a smaller --context"
        )
    # the same weights with KV memory of its own: nothing else uses these pages
    target, size = llm.with_drafter(None).target, llm.limits.page_size
    pages = range(1, 2 + (context + max(rows)) // size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (context + max(rows),), generator=generator).tolist()

    def window(start: int, count: int, wanted: Sequence[int]) -> ForwardBatch:
        span = Span(pages, start, tokens[start : start + count], range(count))
        return ForwardBatch.build([span], wanted, size, target.device)

    times: dict[int, list[float]] = {count: [] for count in rows}
    with torch.inference_mode():
        target.forward(window(0, context, [context - 1]))
        for repeat in range(repeats + 2):  # the first two rounds warm up
            on_progress(f"round {repeat + 1}")
            for count in rows:
                began = time.perf_counter()
                logits, _ = target.forward(window(context, count, range(count)))
                float(logits[0, 0])  # a device that runs ahead has to arrive before the clock is read
                times[count].append(time.perf_counter() - began)
    medians = {count: statistics.median(seen[2:]) for count, seen in times.items()}
    return [VerifyCost(count, seconds, seconds / medians[1]) for count, seconds in medians.items()]
