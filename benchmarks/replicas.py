"""Cost of replicas on Ray: throughput and time to the first token, against one process with the same cores.

    python benchmarks/replicas.py [--cores 2] [--streams 8] [--requests 96] [--rounds 5] [--markdown FILE] [--quick]

Setups, each a process of `foredraft serve` with the built-in pair:

one process     OMP_NUM_THREADS=cores, without Ray
replicas        --replicas cores, one thread each
one thread      OMP_NUM_THREADS=1, without Ray; on one core
one replica     --replicas 1, one thread; on one core. Against `one thread`: the cost of front and Ray alone

A setup is started, warmed up, left alone for `settle` seconds (Ray goes on starting processes after it is ready) and
measured in turn, so that all setups run in every round. Clients are a closed loop of
`streams` connections in this process, on the same cores. Goals: at least 0.95 of the throughput of one process, median
time to the first token at most 5 ms longer. No other program should run on the machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_RATIO_LOSS, MAX_TTFT_MS = 0.05, 5.0  # goals
START_SECONDS = 600
PREFIXES = ("def read_{}(path):", "class Stack{}:", "# Sort the list {}", "import os\n\ndef main_{}():")


@dataclass(frozen=True)
class Setup:
    name: str
    threads: int
    replicas: int | None
    cores: int


@dataclass(frozen=True)
class Round:
    tokens_per_second: float
    ttft: list[float]  # seconds of each request


@contextlib.contextmanager
def run_server(setup: Setup, cores: list[int]) -> Iterator[int]:
    """Run a server on some cores, and yield its port."""
    command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", "--kv-memory", "256M"]
    command += [] if setup.replicas is None else ["--replicas", str(setup.replicas)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[: setup.cores]),
    )
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if found := re.search(r"serving \S+ at http://[\w.]+:(\d+)", line):
                port = int(found[1])
                break
        if not port:
            raise SystemExit(f"{setup.name}: the server did not start")
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=START_SECONDS)


async def run_request(port: int, number: int, max_tokens: int) -> tuple[float, int]:
    """Stream one completion. Returns the seconds to the first token, and the number of tokens."""
    body = json.dumps(
        {
            "prompt": PREFIXES[number % len(PREFIXES)].format(number),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start, first, last = time.perf_counter(), 0.0, b""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            first, last = first or time.perf_counter() - start, line
    writer.close()
    event = json.loads(last.removeprefix(b"data: "))
    if not event.get("usage"):
        raise SystemExit(f"a request failed: {event}")
    return first, event["usage"]["completion_tokens"]


async def run_load(port: int, options: argparse.Namespace) -> Round:
    """Run all requests in a closed loop."""
    numbers = iter(range(options.requests))
    results: list[tuple[float, int]] = []

    async def run_stream() -> None:
        for number in numbers:
            results.append(await run_request(port, number, options.max_tokens))

    start = time.perf_counter()
    await asyncio.gather(*(run_stream() for _ in range(options.streams)))
    seconds = time.perf_counter() - start
    return Round(sum(tokens for _, tokens in results) / seconds, [first for first, _ in results])


def format_table(setups: list[Setup], rounds: dict[str, list[Round]]) -> list[str]:
    lines = [
        "| setup | cores | tokens/s (median of rounds) | first token p50, ms | p99, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for setup in setups:
        speeds = [one.tokens_per_second for one in rounds[setup.name]]
        first = sorted(1000 * seconds for one in rounds[setup.name] for seconds in one.ttft)
        p99 = first[min(len(first) - 1, round(0.99 * len(first)))]
        spread = f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
        lines.append(f"| {setup.name} | {setup.cores} | {spread} | {statistics.median(first):.1f} | {p99:.1f} |")
    return lines


def format_verdict(one: str, other: str, rounds: dict[str, list[Round]]) -> str:
    """Compare two setups: the median over the rounds of the ratio, and the difference of the medians."""
    pairs = list(zip(rounds[one], rounds[other], strict=True))
    ratio = statistics.median(b.tokens_per_second / a.tokens_per_second for a, b in pairs)
    delay = 1000 * statistics.median(statistics.median(b.ttft) - statistics.median(a.ttft) for a, b in pairs)
    is_met = ratio >= 1 - MAX_RATIO_LOSS and delay <= MAX_TTFT_MS
    figures = f"{ratio:.3f}x the throughput, first token p50 {delay:+.1f} ms"
    return f"{other} against {one}: {figures}; goals {'met' if is_met else 'missed'}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds between start and measurement")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--quick", action="store_true", help="few requests and one round, to try the script")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.max_tokens, options.rounds = 16, 16, 1
    return options


def main() -> None:
    options = parse_options()
    cores = sorted(os.sched_getaffinity(0))
    setups = [
        Setup("one process", options.cores, None, options.cores),
        Setup("replicas", 1, options.cores, options.cores),
        Setup("one thread", 1, None, 1),
        Setup("one replica", 1, 1, 1),
    ]
    if len(cores) < options.cores:
        print(f"warning: {options.cores} cores are wanted and {len(cores)} are there", file=sys.stderr)
    rounds: dict[str, list[Round]] = {setup.name: [] for setup in setups}
    for number in range(options.rounds):
        for setup in setups:
            print(f"round {number + 1} of {options.rounds}: {setup.name}", file=sys.stderr)
            with run_server(setup, cores) as port:
                warm_up = argparse.Namespace(**vars(options) | {"requests": 2 * options.streams, "max_tokens": 16})
                asyncio.run(run_load(port, warm_up))
                time.sleep(options.settle)
                rounds[setup.name].append(asyncio.run(run_load(port, options)))
    lines = [*format_table(setups, rounds), ""]
    lines += [format_verdict("one process", "replicas", rounds), format_verdict("one thread", "one replica", rounds)]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
