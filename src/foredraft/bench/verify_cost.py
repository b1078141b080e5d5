"""Cost of verification: time of a forward pass of the target over k tokens, relative to a pass over one token."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import ForwardBatch, Span

REPEATS = 20  # measured rounds
WARM_UP_ROUNDS = 2  # first rounds, which do not count


@dataclass(frozen=True)
class VerifyCost:
    """Time of a forward pass of the target over `rows` tokens."""

    rows: int
    seconds: float  # median
    ratio: float  # over a pass of one token


def parse_rows(text: str) -> list[int]:
    """Parse numbers of tokens: '2,4' -> [1, 2, 4]. The reference, 1, is always included.

    Raises:
        ForedraftError: the text has an entry that is no positive number.
    """
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
    """Measure passes over each number of tokens in turn.

    Args:
        llm: an LLM.
        rows: numbers of tokens in a pass; 1 must be among them.
        context: tokens before the pass.
        repeats: measured rounds.
        on_progress: called before every round.

    Raises:
        ForedraftError: context and rows exceed the context length of the model.
    """
    if not 1 <= context <= llm.target.context_length - max(rows):
        raise ForedraftError(
            f"--context {context} and {max(rows)} tokens more do not fit the model's context of "
            f"{llm.target.context_length}; give a smaller --context"
        )
    # Same weights with separate KV memory, so that no other request uses these pages.
    target, page_size = llm.with_drafter(None).target, llm.limits.page_size
    pages = range(1, 2 + (context + max(rows)) // page_size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (context + max(rows),), generator=generator).tolist()

    def build_batch(start: int, count: int, logit_rows: Sequence[int]) -> ForwardBatch:
        num_settled = 0 if start else count - 1  # the context is a chunk, and the rows after it may be rejected
        span = Span(pages, start, tokens[start : start + count], range(count), num_settled=num_settled)
        return ForwardBatch.build([span], logit_rows, page_size, target.device)

    times: dict[int, list[float]] = {count: [] for count in rows}
    with torch.inference_mode():
        target.forward(build_batch(0, context, [context - 1]))
        for repeat in range(repeats + WARM_UP_ROUNDS):
            on_progress(f"round {repeat + 1}")
            for count in rows:
                start = time.perf_counter()
                logits, _ = target.forward(build_batch(context, count, range(count)))
                float(logits[0, 0])  # waits for an asynchronous device before the clock is read
                times[count].append(time.perf_counter() - start)
    medians = {count: statistics.median(samples[WARM_UP_ROUNDS:]) for count, samples in times.items()}
    return [VerifyCost(count, seconds, seconds / medians[1]) for count, seconds in medians.items()]
