"""Batch job that is killed many times, against an undisturbed one: the files must be equal byte for byte.

    python benchmarks/batch_kill.py [--prompts 10000] [--kills 20] [--max-tokens 8] [--folder FOLDER] [--unordered]

Half of the prompts are greedy, half are sampled at temperature 1. Each kill is SIGKILL at a random part of the job.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

WORDS = ("def", "class", "import", "return", "for", "while", "self", "value", "items", "None", "assert", "print")


def main() -> None:
    """Run both jobs and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("batch-kill"))
    parser.add_argument("--unordered", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    source = write_prompts(given.folder / "in.jsonl", given.prompts, given.max_tokens)
    flags = ["--unordered"] if given.unordered else []
    began = time.perf_counter()
    whole = run_whole(source, given.folder / "whole.jsonl", flags)
    seconds = time.perf_counter() - began
    killed, kills = run_killed(source, given.folder / "killed.jsonl", flags, given)
    contents = [file.read_bytes().splitlines(keepends=True) for file in (whole, killed)]
    if given.unordered:
        contents = [sorted(rows) for rows in contents]
    digests = [hashlib.sha256(b"".join(rows)).hexdigest()[:16] for rows in contents]
    equal = "equal" if contents[0] == contents[1] else "DIFFERENT"
    print(f"{given.prompts} prompts, undisturbed in {seconds:.0f} s ({given.prompts / seconds:.1f} per second)")
    print(f"killed {kills} times: {len(contents[1])} results; {equal} ({digests[0]}, {digests[1]})")


def write_prompts(file: Path, count: int, max_tokens: int) -> Path:
    """Write prompts of 1 to 40 words, unless the file exists."""
    if not file.exists():
        rng = random.Random(0)
        rows = [
            {
                "custom_id": f"request-{i}",
                "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 40))),
                "max_tokens": rng.randint(1, max_tokens),
                "temperature": i % 2,
            }
            for i in range(count)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def start(source: Path, out: Path, flags: list[str]) -> "subprocess.Popen[bytes]":
    """Start a job, whose messages go into a file beside the results."""
    command = [sys.executable, "-m", "foredraft", "batch", str(source), str(out), *flags]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stderr=log)


def run_whole(source: Path, out: Path, flags: list[str]) -> Path:
    """Run a job to its end, unless its file exists."""
    if not out.exists() and start(source, out, flags).wait():
        raise SystemExit(f"a job failed; see {out.with_suffix('.log')}")
    return out


def run_killed(source: Path, out: Path, flags: list[str], given: argparse.Namespace) -> tuple[Path, int]:
    """Run a job that is killed after random shares of its results, then to its end."""
    rng, part = random.Random(1), out.with_name(f"{out.name}.part")
    out.unlink(missing_ok=True)
    marks = sorted(rng.sample(range(given.prompts), given.kills))
    kills = 0
    for mark in marks:
        process = start(source, out, flags)
        while process.poll() is None and count_lines(part) <= mark:
            time.sleep(rng.uniform(0.001, 0.02))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    return run_whole(source, out, flags), kills


def count_lines(file: Path) -> int:
    """Count the whole lines of a file; 0 if it does not exist."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


if __name__ == "__main__":
    main()
