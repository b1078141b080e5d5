"""Throughput of plain decoding of several programs, by the number of streams.

A stream is a sequence of a batch. All programs decode the same prompts in turn, all streams of a
run at once. The prompts are random tokens, new ones in every round, so that no prefix cache serves them.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foredraft.errors import ForedraftError

MAX_STREAMS = 256  # sequences that llama.cpp keeps at most


@dataclass(frozen=True)
class StreamsPlan:
    """Numbers of streams to measure."""

    counts: tuple[int, ...] = ()
    prompt_tokens: int = 64  # per stream
    rounds: int = 3  # measured rounds of each count, after one that does not count

    @property
    def largest(self) -> int:
        """Largest number of streams; 0 = none is measured."""
        return max(self.counts, default=0)


@dataclass(frozen=True)
class StreamSpeed:
    """Throughput of one program with a number of streams."""

    program: str
    weights: str
    streams: int
    tokens_per_second: float  # output tokens of all streams over the time of prompts and output; median over rounds
    ours_over_it: float | None  # median over rounds of Foredraft's throughput over this one; None = no Foredraft row


# (label of a program, prompts) -> seconds; None if the program failed
StreamsDecoder = Callable[[str, list[list[int]]], float | None]


def parse_streams(text: str) -> tuple[int, ...]:
    """Parse numbers of streams: '8,16' -> (8, 16).

    Raises:
        ForedraftError: an entry is not a number from 1 to `MAX_STREAMS`.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1 or max(counts) > MAX_STREAMS:
        raise ForedraftError(f"--streams takes numbers from 1 to {MAX_STREAMS}, as 8,16,32,64; got {text!r}")
    return tuple(dict.fromkeys(counts))


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `length` random tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure_streams(
    plan: StreamsPlan, labels: Sequence[str], vocab_size: int, decode: StreamsDecoder
) -> dict[int, dict[str, list[float]]]:
    """Measure all programs in turn, in rotating order.

    Args:
        plan: numbers of streams.
        labels: names of the programs.
        vocab_size: tokens of the vocabulary.
        decode: decodes prompts with a program and returns its seconds. A program that fails is left out from then on.

    Returns:
        Seconds of every round, by number of streams and program.
    """
    active, times = list(labels), {}
    for count in plan.counts:
        rounds: dict[str, list[float]] = {label: [] for label in active}
        for number in range(plan.rounds + 1):
            prompts = make_prompts(count, plan.prompt_tokens, vocab_size, seed=1000 * count + number)
            shift = number % max(1, len(active))
            for label in active[shift:] + active[:shift]:
                seconds = decode(label, prompts)
                if seconds is None:
                    active.remove(label)
                    rounds.pop(label)
                elif number:
                    rounds[label].append(seconds)
        times[count] = rounds
    return times


def compute_speeds(
    times: Mapping[int, Mapping[str, Sequence[float]]],
    programs: Mapping[str, tuple[str, str]],
    references: Mapping[str, str],
    max_tokens: int,
) -> list[StreamSpeed]:
    """Compute the throughputs of measured rounds.

    Args:
        times: seconds of every round, by number of streams and label.
        programs: (program, weights) by label.
        references: label of the Foredraft process with the same weights, by label; it need not have been measured.
        max_tokens: output tokens of a stream.
    """
    speeds = []
    for count, rounds in times.items():
        for label, seconds in rounds.items():
            ours = rounds.get(references[label])
            over = None if ours is None else statistics.median(b / a for a, b in zip(ours, seconds, strict=True))
            program, weights = programs[label]
            speeds.append(StreamSpeed(program, weights, count, count * max_tokens / statistics.median(seconds), over))
    return speeds
