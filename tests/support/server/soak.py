"""Thousands of mixed requests to a server of this process, which is looked at between rounds, when nothing runs.

Requests are made from a seed: known prompts whose text must be that of plain decoding, samples, streams, chats,
grammars that no request had before, clients that leave, bodies that are refused. What must not grow: memory, threads,
open files.
"""

import asyncio
import gc
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foredraft import LLM, Sampling
from tests.support.server.live_server import RunningServer, run_server

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_CONCURRENT = 40  # requests
SECONDS = 600.0  # one request may take, on a busy machine
MAX_GROWTH = 1.0  # MiB per 1,000 requests of the second half that count as flat
WORDS = ("def", "the", "class", "return", "self", "for", "in", "if", "x", "import", "(", "):", "=", "end", "1", '"a"')
REFUSED: tuple[dict[str, Any], ...] = (
    {"prompt": "a", "temperature": -1}, {"prompt": "a", "x": 1}, {"prompt": []}, {"max_tokens": 1},
    {"prompt": "a", "n": 10**6}, {"prompt": "a", "regex": "("}, {"prompt": "a", "stop": [""]},
    {"prompt": "ab " * 100_000}, {"prompt": "a", "logit_bias": {"-1": 1}}, {"prompt": [10**9]},
)  # fmt: skip


@dataclass(frozen=True)
class SoakCase:
    """One request. `check`: what is wrong with the text of its answer; `leaves`: bytes after which the client does."""

    kind: str
    path: str
    body: dict[str, Any]
    status: int = 200
    check: Callable[[str, str], bool] | None = None  # (text, finish_reason) -> it is right
    leaves: int | None = None


@dataclass(frozen=True)
class ProcessSample:
    """Resources of the process while no request runs."""

    requests: int
    seconds: float
    memory: float  # MiB
    threads: int
    files: int


@dataclass
class SoakReport:
    """Results of a soak; written to a file after every round."""

    wanted: int
    samples: list[ProcessSample] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    preempted: int = 0

    @property
    def second_half(self) -> list[ProcessSample]:
        return [sample for sample in self.samples if sample.requests * 2 >= self.wanted]

    @property
    def growth(self) -> float:
        """MiB per 1,000 requests: the least-squares line through the second half."""
        points = [(sample.requests / 1000, sample.memory) for sample in self.second_half]
        if not points:
            return 0.0
        middle = sum(x for x, _ in points) / len(points)
        spread = sum((x - middle) ** 2 for x, _ in points)
        return sum((x - middle) * y for x, y in points) / spread if spread else 0.0

    @property
    def failures(self) -> list[str]:
        """Why the soak is not passed."""
        found = [*self.faults]
        if self.growth > MAX_GROWTH:
            found.append(f"memory grows by {self.growth:.2f} MiB per 1,000 requests")
        for name in ("threads", "files"):
            counts = {getattr(sample, name) for sample in self.second_half}
            if len(counts) > 1:
                found.append(f"{name} in the second half: {sorted(counts)}")
        return found

    def write(self, path: Path) -> None:
        made = {
            "wanted": self.wanted,
            "failures": self.failures,
            "growth": self.growth,
            "preempted": self.preempted,
            "kinds": dict(self.kinds),
            "samples": [asdict(sample) for sample in self.samples],
        }
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(made, indent=1))
        partial.replace(path)

    def table(self, rows: int = 10) -> str:
        """Return a table with every tenth of the run."""
        lines = ["| requests | seconds | memory, MiB | threads | open files |", "|---:|---:|---:|---:|---:|"]
        last = len(self.samples) - 1
        for sample in [self.samples[i] for i in sorted({round(last * k / rows) for k in range(rows + 1)})]:
            values = (sample.requests, round(sample.seconds), f"{sample.memory:.1f}", sample.threads, sample.files)
            lines.append("| " + " | ".join(map(str, values)) + " |")
        lines.append(f"second half: {self.growth:+.3f} MiB per 1,000 requests; {self.preempted} preemptions; ")
        lines[-1] += f"requests by kind {dict(self.kinds)}; {len(self.faults)} faults"
        return "\n".join([*lines, *(f"FAILURE {failure}" for failure in self.failures[:20])])


def generate_cases(llm: LLM, seed: int = 0) -> Iterator[SoakCase]:
    """Without end. Three in a hundred have a grammar."""
    rng = random.Random(seed)
    known = _make_known_cases(llm, rng)
    index = 0
    while True:
        index += 1
        if index % 100 in (7, 41, 83):
            yield _make_grammar_case(rng, index)
        else:
            yield _make_ordinary_case(rng, index, known)


def _make_known_cases(llm: LLM, rng: random.Random) -> list[SoakCase]:
    """Make requests whose text does not depend on the draft, with the text of plain decoding."""
    found, plain = [], llm.with_drafter(None)
    for i in range(24):
        prompt, most = _make_prompt(rng), rng.choice((2, 5, 9))
        given: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": i}
        [wanted] = plain.generate([prompt], Sampling(max_tokens=most, **given))
        body = {"prompt": prompt, "max_tokens": most, **given}
        found.append(SoakCase("known", COMPLETE, body, check=_expect(wanted.text, wanted.finish_reason)))
    return found


def _expect(text: str, reason: str) -> Callable[[str, str], bool]:
    return lambda found, why: (found, why) == (text, reason)


def _make_prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice((2, 6, 20))))


def _make_grammar_case(rng: random.Random, index: int) -> SoakCase:
    """Make a request with a new grammar, so that growth of the grammar caches shows."""
    body: dict[str, Any] = {"prompt": _make_prompt(rng), "max_tokens": 12, "temperature": 0.0}
    kind = rng.randrange(3)
    if kind == 0:
        pattern = f"[a-z]{{1,4}}{index}"
        return SoakCase(
            "grammar",
            COMPLETE,
            body | {"regex": pattern},
            check=_allow_truncation(lambda text: _matches(pattern, text)),
        )
    if kind == 1:
        choices = [f"c{index}", f"d{index}", "e"]
        return SoakCase(
            "grammar",
            COMPLETE,
            body | {"structured_outputs": {"choice": choices}},
            check=_allow_truncation(lambda text: text in choices),
        )
    schema = {"type": "object", "properties": {f"k{index}": {"type": "boolean"}}, "required": [f"k{index}"]}
    form = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema | {"additionalProperties": False}}}
    return SoakCase("grammar", COMPLETE, body | {"response_format": form}, check=_allow_truncation(_is_object))


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def _allow_truncation(is_right: Callable[[str], bool]) -> Callable[[str, str], bool]:
    """Allow a text that was cut to be incomplete."""
    return lambda text, reason: reason == "length" or is_right(text)


def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def _make_ordinary_case(rng: random.Random, index: int, known: list[SoakCase]) -> SoakCase:
    dice = rng.random()
    if dice < 0.35:
        return rng.choice(known)
    if dice < 0.42:
        return SoakCase("refused", COMPLETE, rng.choice(REFUSED), status=400)
    body = {"prompt": _make_prompt(rng), "max_tokens": rng.randint(1, 10), "temperature": rng.choice((0.0, 0.7, 1.2))}
    if dice < 0.5:
        said = [{"role": "user", "content": body.pop("prompt")}]
        return SoakCase("chat", CHAT, body | {"messages": said, "stream": rng.random() < 0.5})
    if dice < 0.62:
        body |= {"max_tokens": 60, "ignore_eos": True, "stream": rng.random() < 0.7}
        return SoakCase("left", COMPLETE, body, leaves=rng.choice((0, 0, 200, 900)))
    if dice < 0.7:
        return SoakCase("samples", COMPLETE, body | {"n": rng.randint(2, 3), "logprobs": rng.randint(0, 3)})
    if dice < 0.76:
        return SoakCase("predicted", COMPLETE, body | {"prediction": {"type": "content", "content": _make_prompt(rng)}})
    if dice < 0.82:
        salt = f"tenant {rng.randrange(1000)}"
        penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "stop": [rng.choice(WORDS)]}
        return SoakCase("shaped", COMPLETE, body | penalties | {"cache_salt": salt, "priority": rng.randint(-1, 2)})
    return SoakCase("streamed", COMPLETE, body | {"stream": True, "seed": index})


async def send_case(port: int, case: SoakCase) -> str | None:
    """Send a case on a new connection. Returns the fault of the answer, or None."""
    content = json.dumps(case.body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {case.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        if case.leaves is not None:
            await writer.drain()
            if case.leaves:
                await reader.read(case.leaves)
            writer.transport.abort()
            return None
        answer = await reader.read()
    except ConnectionError:  # a refused body is not read to its end
        return None if case.status == 400 else "the connection was reset"
    finally:
        writer.close()
    return find_fault(case, answer)


def find_fault(case: SoakCase, answer: bytes) -> str | None:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head[9:12] or 0)
    if status != case.status:
        return f"{case.kind}: {status} {body[:300]!r} for {str(case.body)[:200]}"
    if status != 200:
        return None
    found = _parse_stream(_join_chunks(body)) if case.body.get("stream") else _parse_body(body)
    if not found:
        return f"{case.kind}: an answer without an end"
    if case.check is not None and not case.check(*found[0]):
        return f"{case.kind}: {found[0]} for {case.body}"
    return None


def _parse_body(body: bytes) -> list[tuple[str, str]]:
    return [(choice.get("text", ""), choice["finish_reason"]) for choice in json.loads(body)["choices"]]


def _parse_stream(body: bytes) -> list[tuple[str, str]]:
    """Parse a stream into its events; empty if the stream has no end."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return []
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return [("".join(choice.get("text", "") for choice in choices), ends[0])] if ends else []


def _join_chunks(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


def sample_process(server: RunningServer, requests: int, began: float) -> ProcessSample:
    """At the process, once nothing runs and the files of closed connections are gone."""
    assert server.is_idle(SECONDS), "requests are left"
    gc.collect()
    files, end = _count_files(), time.monotonic() + 2
    while time.monotonic() < end:
        time.sleep(0.05)
        files = min(files, _count_files())
        if not server.server.server_state.connections:
            break
    threads = len(os.listdir("/proc/self/task"))
    return ProcessSample(requests, time.monotonic() - began, _read_memory(), threads, _count_files())


def _read_memory() -> float:
    """Read the private memory in MiB: pages of mapped files depend on other processes of the machine."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:"))) / 1024


def _count_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the listing has one open itself


async def _run_round(port: int, some: list[SoakCase], report: SoakReport) -> None:
    room = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(case: SoakCase) -> None:
        async with room:
            try:
                wrong = await asyncio.wait_for(send_case(port, case), SECONDS)
            except TimeoutError:
                wrong = f"{case.kind}: no answer in {SECONDS:g} s"
        report.kinds[case.kind] += 1
        if wrong is not None:
            report.faults.append(wrong)

    async with asyncio.TaskGroup() as group:
        for case in some:
            group.create_task(one(case))


def soak(llm: LLM, count: int, each: int = 100, seed: int = 0, out: Path | None = None) -> SoakReport:
    """`count` requests in rounds of `each`, with the process looked at after every round."""
    report, began = SoakReport(count), time.monotonic()
    source = generate_cases(llm, seed)
    with run_server(llm) as server:
        for done in range(0, count, each):
            asyncio.run(_run_round(server.port, [next(source) for _ in range(min(each, count - done))], report))
            report.samples.append(sample_process(server, min(done + each, count), began))
            report.preempted = server.engine.scheduler.num_preempted
            if out is not None:
                report.write(out)
        scheduler = server.engine.scheduler
        scheduler.check_integrity()
        if scheduler.allocator.num_used:
            report.faults.append(f"{scheduler.allocator.num_used} pages are still used")
    return report
