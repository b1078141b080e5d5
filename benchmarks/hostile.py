"""Time in which a server refuses hostile requests, and the effect on other requests.

    python benchmarks/hostile.py [--url http://127.0.0.1:8000] [--rounds 3] [--serve "--model FOLDER"]

The requests are those of tests/support/server/hostile_corpus.py. Without --url the script starts a server. A
server at --url has to be started with --allowed-host x. The script prints:

- the number of refusals and faults,
- milliseconds from the first byte sent to the last byte read (p50, p99, max of the median over rounds),
- the slowest requests,
- the time of /health during the run.

Unusual requests that are accepted generate tokens; only their faults count. The exit code is 1 after any fault.

--crowd "a{10000}" instead sends 32 requests constrained by this regular expression. It prints the time of small
requests of 8 tokens, alone and beside the others. No other program should run on the machine.
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

import httpx

from tests.support.server.hostile_corpus import corpus
from tests.support.server.hostile_wire import exchange, find_fault

TARGET = 50  # milliseconds; slower refusals are counted
SLOWEST = 10  # number of slowest requests that are printed
HOST = "x"  # host name that the requests of the corpus send
PROBE_INTERVAL = 0.002  # seconds between two requests to /health


@contextmanager
def start_server(arguments: str) -> Iterator[str]:
    """Start a server with the given options, and yield its URL."""
    host = ["--allowed-host", HOST]  # otherwise the server refuses the requests for their host name alone
    command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", *host, *shlex.split(arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                match = re.search(r"serving .* at (http://[\d.:]+)", line)
                if match:
                    break
            else:
                raise SystemExit("the server did not start")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield match[1]
        finally:
            process.terminate()


class HealthProbe(threading.Thread):
    """Thread that requests /health repeatedly; `seconds` has the time of every answer."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.seconds, self.is_over = url, list[float](), False

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.is_over:
                start = time.monotonic()
                assert client.get(self.url + "/health").status_code == 200
                self.seconds.append(time.monotonic() - start)
                time.sleep(PROBE_INTERVAL)


def compute_percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def measure_refusals(url: str, rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """Measure all hostile requests; return the seconds of every refused request, and the faults of all answers."""
    info = httpx.get(url + "/tokenizer_info", timeout=60).json()
    seconds: dict[str, list[float]] = {}
    faults: list[str] = []
    for _ in range(rounds):
        for i, request in enumerate(corpus(info["vocab_size"], fetch_context_length(url))):
            answer = exchange(httpx.URL(url).port or 80, request.data, timeout=120)
            fault = find_fault(request, answer)
            if fault is not None:
                faults.append(f"{request.name}: {fault}")
            if answer.status != 200:
                seconds.setdefault(f"{i} {answer.status} {request.name}", []).append(answer.seconds)
    return seconds, faults


def measure_crowd(url: str, pattern: str, size: int = 32, num_asked: int = 5) -> None:
    """Measure the latency of small requests beside requests with a slow grammar."""
    ends: list[str] = []

    def post_completion(**body: object) -> httpx.Response:
        return httpx.post(url + "/v1/completions", json={"prompt": "def f(", "temperature": 0} | body, timeout=600)

    def send_slow_request() -> None:
        body = post_completion(regex=pattern, max_tokens=64).json()
        ends.append(body["error"]["message"] if "error" in body else body["choices"][0]["finish_reason"])

    def time_small_request() -> float:
        start = time.monotonic()
        post_completion(max_tokens=8).raise_for_status()
        return time.monotonic() - start

    alone = [time_small_request() for _ in range(num_asked)]
    threads = [threading.Thread(target=send_slow_request, daemon=True) for _ in range(size)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    with_crowd = [time_small_request() for _ in range(num_asked)]
    print(f"8 tokens, s: alone {statistics.median(alone):.3f}  beside {size} of {pattern}, in sequence: "
          + " ".join(f"{seconds:.3f}" for seconds in with_crowd), flush=True)  # fmt: skip
    for thread in threads:
        thread.join()
    print(f"the others took {time.monotonic() - start:.1f} s; ends: {sorted(set(ends))}")


def fetch_context_length(url: str) -> int:
    """Fetch the context length of the model, in tokens."""
    return int(httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["max_model_len"])


def print_report(seconds: dict[str, list[float]], faults: list[str], health_seconds: list[float]) -> None:
    medians = {name: 1000 * statistics.median(times) for name, times in seconds.items()}
    values = list(medians.values())
    num_slow = sum(value > TARGET for value in values)
    print(f"{len(medians)} hostile requests refused, {len(faults)} faults, {num_slow} slower than {TARGET} ms")
    print(
        f"ms: p50 {compute_percentile(values, 0.5):.2f}  p99 {compute_percentile(values, 0.99):.1f}  max "
        f"{max(values):.1f}"
    )
    p50, p99 = (1e3 * compute_percentile(health_seconds, share) for share in (0.5, 0.99))
    print(
        f"/health during the run, ms: p50 {p50:.1f}  p99 {p99:.1f}  max {max(health_seconds) * 1e3:.1f}  "
        f"({len(health_seconds)} times)"
    )
    print("slowest, ms:")
    for name, value in sorted(medians.items(), key=lambda item: -item[1])[:SLOWEST]:
        print(f"  {value:8.1f}  {name.partition(' ')[2]}")
    for line in dict.fromkeys(faults):
        print(f"FAULT {line}")


def run(url: str, rounds: int) -> bool:
    probe = HealthProbe(url)
    probe.start()
    seconds, faults = measure_refusals(url, rounds)
    probe.is_over = True
    probe.join()
    print_report(seconds, faults, probe.seconds)
    return not faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="running server; default: start one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", help="options for the server that is started")
    parser.add_argument("--crowd", metavar="REGEX", help="measure small requests beside requests with this grammar")
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
