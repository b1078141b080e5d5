"""Cost of streamed tool calls: time per output token of a required call, against the same JSON as content.

    python benchmarks/tool_calls.py [--rounds 15] [--length 150] [--method draft_model] [--markdown FILE] [--quick]

Both answers follow a grammar of the same schema and have a string of the same length. One is a `response_format`, whose
text is content. The other is a call of a required tool, which the server parses and streams as arguments. `foredraft
serve` runs with the built-in pair; requests take turns. Goal: at most 1.05 times the time per token.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_RATIO = 1.05  # goal
CONTENT, CALL = "content", "tool call"


def build_bodies(length: int) -> dict[str, dict[str, Any]]:
    """Build the requests by the name of their answer."""
    text = {"type": "string", "pattern": f"^[a-z ]{{{length}}}$"}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"], "additionalProperties": False}
    common = {
        "messages": [{"role": "user", "content": "Write."}],
        "temperature": 0,
        "max_tokens": 2 * length,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tool = {"type": "function", "function": {"name": "write", "parameters": schema}}
    json_schema = {"type": "json_schema", "json_schema": {"name": "write", "schema": schema}}
    return {
        CONTENT: common | {"response_format": json_schema},
        CALL: common | {"tools": [tool], "tool_choice": "required"},
    }


@contextlib.contextmanager
def run_server(method: str) -> Iterator[str]:
    """Run a server with the built-in target, and yield its address."""
    command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", "--spec-method", method]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving \S+ at (http://[\w.:]+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.communicate()


def measure_request(url: str, body: dict[str, Any]) -> float:
    """Stream one answer. Returns the seconds per output token after the first chunk with text."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    times: list[float] = []
    text, num_tokens = "", 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event["choices"]:
                delta = choice["delta"]
                calls = delta.get("tool_calls") or [{"function": {}}]
                piece = delta.get("content") or calls[0]["function"].get("arguments") or ""
                if piece:
                    times.append(time.perf_counter())
                    text += piece
    json.loads(text)  # whole
    return (times[-1] - times[0]) / (num_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", type=int, default=150, help="characters of the string")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    options = parser.parse_args()
    bodies = build_bodies(options.length)
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    with run_server(options.method) as url:
        for body in bodies.values():
            measure_request(url, body)  # warm up
        for number in range(3 if options.quick else options.rounds):
            for name in sorted(bodies, reverse=bool(number % 2)):
                seconds[name].append(measure_request(url, bodies[name]))
    ratio = statistics.median(call / text for text, call in zip(seconds[CONTENT], seconds[CALL], strict=True))
    lines = ["| answer | ms per token, median (range) |", "|---|---|"]
    for name, values in seconds.items():
        low, middle, high = (1000 * f(values) for f in (min, statistics.median, max))
        lines.append(f"| {name} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    verdict = "met" if ratio <= MAX_RATIO else "missed"
    lines += ["", f"Median ratio over {len(seconds[CALL])} rounds: {ratio:.3f}; goal {MAX_RATIO}: {verdict}"]
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
