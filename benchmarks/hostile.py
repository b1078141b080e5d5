"""How long a server takes to refuse what is hostile, and what others feel of it.

    python benchmarks/hostile.py [--url http://127.0.0.1:8000] [--rounds 3] [--serve "--model FOLDER"]

The requests are those of tests/server/hostile_corpus.py. Without --url a server of its own is started. Printed: answers
and faults, milliseconds from the first byte sent to the last one read (p50, p99, max, by the median of a request's
rounds), the slowest requests, and how long /health took meanwhile. Requests that are odd but may pass generate tokens;
they count for faults alone. --crowd "a{10000}": instead, 32 requests that follow this regular expression, and how
long small requests of 8 tokens take alone and beside them. Exit code 1 for any fault. Nothing else should
run on the machine.
"""

import argparse
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))
from hostile_corpus import corpus
from hostile_wire import exchange, find_fault

TARGET = 50  # milliseconds
SLOWEST = 10


@contextmanager
def start_server(words: str) -> Iterator[str]:
    """The address of a server of our own."""
    command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", *shlex.split(words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found = re.search(r"serving .* at (http://[\d.:]+)", line)
                if found:
                    break
            else:
                raise SystemExit("the server did not start")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield found[1]
        finally:
            process.terminate()


class HealthProbe(threading.Thread):
    """Asks /health all the time. `seconds`: what every answer took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.seconds, self.is_over = url, list[float](), False

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.is_over:
                began = time.monotonic()
                assert client.get(self.url + "/health").status_code == 200
                self.seconds.append(time.monotonic() - began)
                time.sleep(0.002)


def compute_percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, round(part * (len(values) - 1)))]


def measure_refusals(url: str, rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of every refused request, and what was wrong with answers."""
    info = httpx.get(url + "/tokenizer_info", timeout=60).json()
    seconds: dict[str, list[float]] = {}
    faults: list[str] = []
    for _ in range(rounds):
        for i, asked in enumerate(corpus(info["vocab_size"], fetch_context_length(url))):
            answer = exchange(httpx.URL(url).port or 80, asked.data, timeout=120)
            wrong = find_fault(asked, answer)
            if wrong is not None:
                faults.append(f"{asked.name}: {wrong}")
            if answer.status != 200:
                seconds.setdefault(f"{i} {answer.status} {asked.name}", []).append(answer.seconds)
    return seconds, faults


def measure_crowd(url: str, pattern: str, size: int = 32, num_asked: int = 5) -> None:
    """Measure the latency of small requests beside requests with a slow grammar."""
    answers: list[str] = []

    def ask(**body: object) -> httpx.Response:
        return httpx.post(url + "/v1/completions", json={"prompt": "def f(", "temperature": 0} | body, timeout=600)

    def follow() -> None:
        body = ask(regex=pattern, max_tokens=64).json()
        answers.append(body["error"]["message"] if "error" in body else body["choices"][0]["finish_reason"])

    def small() -> float:
        began = time.monotonic()
        ask(max_tokens=8).raise_for_status()
        return time.monotonic() - began

    alone = [small() for _ in range(num_asked)]
    threads = [threading.Thread(target=follow, daemon=True) for _ in range(size)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    beside = [small() for _ in range(num_asked)]
    print(f"8 tokens, s: alone {statistics.median(alone):.3f}  beside {size} of {pattern}, one after the other: "
          + " ".join(f"{seconds:.3f}" for seconds in beside), flush=True)  # fmt: skip
    for thread in threads:
        thread.join()
    print(f"those took {time.monotonic() - began:.1f} s; ends: {sorted(set(answers))}")


def fetch_context_length(url: str) -> int:
    """Tokens of the model's context."""
    return int(httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["max_model_len"])


def print_report(seconds: dict[str, list[float]], faults: list[str], others: list[float]) -> None:
    typical = {name: 1000 * statistics.median(times) for name, times in seconds.items()}
    values = list(typical.values())
    slow = sum(value > TARGET for value in values)
    print(f"{len(typical)} hostile requests refused, {len(faults)} faults, {slow} slower than {TARGET} ms")
    print(
        f"ms: p50 {compute_percentile(values, 0.5):.2f}  p99 {compute_percentile(values, 0.99):.1f}  max "
        f"{max(values):.1f}"
    )
    p50, p99 = (1e3 * compute_percentile(others, share) for share in (0.5, 0.99))
    print(f"/health meanwhile, ms: p50 {p50:.1f}  p99 {p99:.1f}  max {max(others) * 1e3:.1f}  ({len(others)} times)")
    print("slowest, ms:")
    for name, value in sorted(typical.items(), key=lambda item: -item[1])[:SLOWEST]:
        print(f"  {value:8.1f}  {name.partition(' ')[2]}")
    for line in dict.fromkeys(faults):
        print(f"FAULT {line}")


def run(url: str, rounds: int) -> bool:
    neighbour = HealthProbe(url)
    neighbour.start()
    seconds, faults = measure_refusals(url, rounds)
    neighbour.is_over = True
    neighbour.join()
    print_report(seconds, faults, neighbour.seconds)
    return not faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="options for the server that is started")
    parser.add_argument("--crowd", metavar="REGEX")
    options = parser.parse_args()
    if options.crowd:
        with nullcontext(options.url) if options.url else start_server(options.serve) as url:
            measure_crowd(url.rstrip("/"), options.crowd)
        return
    if options.url:
        sys.exit(not run(options.url.rstrip("/"), options.rounds))
    with start_server(options.serve) as url:
        is_good = run(url, options.rounds)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
