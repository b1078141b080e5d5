"""Mixed requests to one server: a few hundred here, twenty thousand in `make soak` (or benchmarks/soak.py)."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.llm import MemoryLimits
from tests.support.server.live_server import make_small_llm
from tests.support.server.soak import COMPLETE, ProcessSample, SoakCase, SoakReport, find_fault, generate_cases, soak

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
FLAT = [ProcessSample(100 * i, float(i), 500.0 + i % 2, 8, 9) for i in range(1, 41)]


def report(samples: list[ProcessSample]) -> SoakReport:
    return SoakReport(4000, samples)


def test_a_hundred_and_twenty_mixed_requests(tmp_path: Path) -> None:
    llm = make_small_llm().with_drafter(None)
    llm.limits = MemoryLimits(kv_tokens=256, page_size=4)
    found = soak(llm.with_drafter(make_small_llm().drafter), 120, each=40, out=tmp_path / "soak.json")
    assert found.faults == []
    assert sum(found.kinds.values()) == 120
    assert found.kinds["grammar"] == 4
    assert (tmp_path / "soak.json").exists()


def test_what_is_flat_passes() -> None:
    assert report(FLAT).failures == []
    warming = [replace(sample, memory=sample.memory - max(0, 2000 - sample.requests) / 10) for sample in FLAT]
    assert report(warming).failures == []


def test_what_grows_does_not_pass() -> None:
    growing = [replace(sample, memory=500 + 0.002 * sample.requests) for sample in FLAT]
    assert report(growing).growth == pytest.approx(2)
    assert "memory grows by 2.00 MiB" in report(growing).failures[0]
    for name in ("threads", "files"):
        more = [*FLAT[:-1], replace(FLAT[-1], **{name: 10})]
        assert name in report(more).failures[0]


def test_a_wrong_answer_is_seen() -> None:
    case = next(case for case in generate_cases(make_small_llm()) if case.kind == "known")
    streamed = SoakCase("streamed", COMPLETE, {"stream": True})
    whole = b'HTTP/1.1 200 OK\r\n\r\n{"choices": [{"text": "?", "finish_reason": "length"}]}'
    assert find_fault(case, whole) is not None
    assert find_fault(replace(case, check=None), whole) is None
    assert find_fault(case, b"HTTP/1.1 500 x\r\n\r\n") is not None
    assert find_fault(case, b"") is not None
    cut = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
    assert find_fault(streamed, b"HTTP/1.1 200 OK\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(cut), cut)) is not None


@pytest.mark.soak
def test_twenty_thousand_mixed_requests(tmp_path: Path) -> None:
    """The server runs in a separate process, to measure its memory alone. SOAK_REQUESTS sets another count."""
    count = os.environ.get("SOAK_REQUESTS", "20000")
    command = [sys.executable, str(SCRIPT), "--requests", count, "--out", str(tmp_path / "soak.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
