"""The end of a process ends the engine in one line, and the end of an LLM ends its processes.

Guards against the faults of tensor parallelism elsewhere: a server that hangs while /health answers, processes that
outlive their program, a second model that cannot start.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from foredraft import LLM, ForedraftError, Sampling
from foredraft.engine.worker import Worker
from foredraft.errors import TargetLostError
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.tensor_parallel import process_group
from tests.support import tiny_models

LONG = Sampling(max_tokens=200, temperature=0, ignore_eos=True)
PROGRAM = """
import sys
from foredraft import LLM
llm = LLM(sys.argv[1], None, tensor_parallel_size=2)
print(*llm.target.group.process_ids, flush=True)
sys.stdin.readline()
"""


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, for at most 10 seconds."""
    for _ in range(100):
        if not is_running(pid):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"process {pid} runs")


def count_gloo_threads() -> int:
    """Number of threads of this process that serve connections of gloo."""
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


@contextmanager
def load(folder: str) -> Iterator[tuple[LLM, int]]:
    """A target in two processes. They end with the block, also if the test fails: others need the process group."""
    with LLM(folder, None, tensor_parallel_size=2) as llm:
        [pid] = llm.target.group.process_ids
        assert is_running(pid)
        yield llm, pid


def test_a_killed_rank_ends_a_stream_with_one_line(target_folder: str) -> None:
    with load(target_folder) as (llm, pid):
        stream = llm.stream([[5, 9]], LONG)
        next(stream)
        os.kill(pid, signal.SIGKILL)
        line = rf"^rank 1 of 2 \(process {pid}\) was killed by SIGKILL, and .*; make a new LLM, or restart the command$"
        with pytest.raises(TargetLostError, match=line):
            list(stream)
        with pytest.raises(TargetLostError, match="SIGKILL"):
            llm.generate([[5, 9]], LONG)
        assert not is_running(pid)


def test_a_rank_that_is_killed_inside_a_pass_ends_it(target_folder: str) -> None:
    """This process then waits in a collective, not for a message."""
    with load(target_folder) as (llm, pid):
        os.kill(pid, signal.SIGSTOP)  # so that the pass has surely begun
        killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        killer.start()
        batch = ForwardBatch.from_spans([Span([1], 0, [5, 9], range(2))], 16, "cpu")
        with pytest.raises(TargetLostError, match="SIGKILL"):
            llm.target.forward(batch)
        killer.join()


def test_a_rank_that_stops_does_not_hold_a_pass_for_ever(target_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's own limit is half an hour. It also ends a pass whose operation gloo forgot when a rank was killed."""
    monkeypatch.setattr(process_group, "WAIT_SECONDS", 1.0)
    with load(target_folder) as (llm, pid):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TargetLostError, match=r"rank 0 of 2 failed .*Timed out waiting 1000ms"):
            llm.generate([[5, 9]], LONG)
        wait_for_end(pid)


def test_a_worker_ends_all_requests_with_the_line_and_is_unhealthy(target_folder: str) -> None:
    with load(target_folder) as (llm, pid):

        async def ask(worker: Worker) -> list[str | None]:
            streams = [await worker.submit(llm.prepare(prompt, LONG)) for prompt in ([5, 9], [44, 2])]
            await anext(aiter(streams[0]))
            os.kill(pid, signal.SIGKILL)
            return [completion.error for stream in streams for completion in await stream.read_completions()]

        worker = Worker(llm)
        worker.start()
        errors = asyncio.run(ask(worker))
        assert not worker.is_healthy
        worker.stop()
        assert len(set(errors)) == 1
        assert "rank 1 of 2" in str(errors[0])


def test_close_ends_the_processes_and_a_copy_with_another_drafter_keeps_them(target_folder: str) -> None:
    with load(target_folder) as (llm, pid):
        other = llm.with_drafter("ngram")
        llm.close()
        assert is_running(pid)
        assert other.generate([[5, 9]], LONG)[0].token_ids == tiny_models.plain().generate([[5, 9]], LONG)[0].token_ids
        other.close()
        assert not is_running(pid)


def test_close_ends_the_threads_and_connections_of_the_group(target_folder: str) -> None:
    """They would end at some time in the life of the next model, or abort the program at its exit."""
    with load(target_folder) as (llm, _):
        model = llm.target.model  # what the user keeps does not keep them
        assert count_gloo_threads() > 0
    assert count_gloo_threads() == 0
    assert model is not None


def test_a_failure_in_the_middle_of_a_pass_of_this_process_is_final(target_folder: str) -> None:
    """The other rank has run the pass, so a repetition would be one pass behind it."""
    with load(target_folder) as (llm, pid):
        missing_row = 7
        broken = ForwardBatch.build([Span([1], 0, [5, 9], range(2))], [missing_row], 16, "cpu")
        with pytest.raises((IndexError, TargetLostError)):
            llm.target.forward(broken)
        with pytest.raises(TargetLostError, match=r"rank [01] of 2"):
            llm.generate([[5, 9]], LONG)
        wait_for_end(pid)


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_processes_end_with_their_program(target_folder: str, is_killed: bool) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, target_folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    with program:
        assert is_running(pid)
        if is_killed:
            program.kill()
        else:
            program.communicate("\n")
    wait_for_end(pid)
    assert program.returncode == (-signal.SIGKILL if is_killed else 0)


def test_a_model_that_cannot_be_loaded_ends_its_processes(tmp_path: Path) -> None:
    """The files are checked in every process, so the error is that of one process."""
    tiny_models.target().save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match="float16 is slow"):
        LLM(str(tmp_path), None, dtype="float16", tensor_parallel_size=2)
    assert not torch.distributed.is_initialized()
