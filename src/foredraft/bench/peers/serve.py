"""Server loop of a peer: one JSON object per line on standard input, one answer per line on standard output.

The module runs in the interpreter of a peer, so it imports only the standard library. If a job raises an exception, the
answer is {"error": one line}, and the program continues.
"""

import contextlib
import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

WARM_UP_ROUNDS = 2  # first rounds, which do not count
MAX_ERROR_CHARS = 300  # of an error in an answer


def serve(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer {"op": name, ...} with handlers[name](...) until standard input ends."""
    _exit_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = handlers[job.pop("op")](**job)
        except Exception as error:  # a peer may raise anything; the benchmark goes on without it
            text = " ".join(str(error).split()) or "no message"
            answer = {"error": f"{type(error).__name__}: {text}"[:MAX_ERROR_CHARS]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _exit_with_parent() -> None:
    """Request SIGKILL at the death of the parent, so that no job outlives a killed benchmark."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def measure_verify_costs(
    rows: Sequence[int], repeats: int, verify: Callable[[int], object], undo: Callable[[int], object]
) -> dict[str, Any]:
    """Measure the median seconds of a pass over each number of tokens, all numbers in turn.

    Args:
        rows: numbers of tokens in a pass.
        repeats: measured rounds.
        verify: runs a pass over a number of tokens.
        undo: removes this number of tokens from the KV cache.

    Returns:
        {"seconds": {number of tokens as text: seconds}}.
    """
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(repeats + WARM_UP_ROUNDS):
        for count in rows:
            start = time.perf_counter()
            verify(count)
            times[count].append(time.perf_counter() - start)
            undo(count)
    return {"seconds": {str(count): statistics.median(samples[WARM_UP_ROUNDS:]) for count, samples in times.items()}}


def draft_by_lookup(tokens: Sequence[int], count: int, max_match: int) -> list[int]:
    """Draft by prompt lookup: copy the tokens after the latest earlier occurrence of the longest matching suffix.

    Args:
        tokens: prompt and output so far.
        count: maximum draft length.
        max_match: maximum length of the suffix, in tokens.
    """
    for size in range(min(max_match, len(tokens) - 1), 0, -1):
        suffix = list(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == suffix[0] and list(tokens[start : start + size]) == suffix:
                return list(tokens[start + size : start + size + count])
    return []
