"""A resident program that answers jobs: one JSON object a line on standard input, one a line on standard output.

Runs in the interpreter of a peer, so it imports nothing but the standard library. A job that raises is answered with
{"error": one line}; the program goes on.
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

WARM_UP_ROUNDS = 2  # first rounds that do not count


def serve(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer {"op": name, ...} with handlers[name](...) until standard input ends."""
    _exit_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = handlers[job.pop("op")](**job)
        except Exception as error:  # a peer may raise anything; the benchmark goes on without it
            text = " ".join(str(error).split()) or "no message"
            answer = {"error": f"{type(error).__name__}: {text}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _exit_with_parent() -> None:
    """A benchmark that is killed in the middle of a job must not leave the job behind."""
    with contextlib.suppress(AttributeError, OSError):  # Linux has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def measure_verify_costs(
    rows: Sequence[int], repeats: int, verify: Callable[[int], object], undo: Callable[[int], object]
) -> dict[str, Any]:
    """Median seconds of a pass over each number of tokens, the numbers taken in turn."""
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(repeats + WARM_UP_ROUNDS):
        for count in rows:
            began = time.perf_counter()
            verify(count)
            times[count].append(time.perf_counter() - began)
            undo(count)
    return {"seconds": {str(count): statistics.median(seen[WARM_UP_ROUNDS:]) for count, seen in times.items()}}


def draft_by_lookup(tokens: Sequence[int], count: int, max_match: int) -> list[int]:
    """Prompt lookup: what followed the latest earlier occurrence of the longest match, at most `count` tokens."""
    for size in range(min(max_match, len(tokens) - 1), 0, -1):
        tail = list(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == tail[0] and list(tokens[start : start + size]) == tail:
                return list(tokens[start + size : start + size + count])
    return []
