"""Runs of a job with fake processing: bounds on what runs and waits, and errors."""

import asyncio
import json

import pytest

from foredraft.batch.job import WINDOW, BatchJob, JobCounts
from foredraft.batch.job_files import JobFiles, JobKey
from foredraft.batch.line import BatchLine
from foredraft.batch.result import LineResult
from foredraft.errors import ForedraftError

LINES = [BatchLine(number, f"id-{number}") for number in range(1, 101)]


class FakeProcessor:
    """Processor whose first line takes as long as all others together."""

    concurrency = 2

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.is_healthy = failing, True
        self.running, self.most_running, self.started = 0, 0, []

    async def process(self, line):
        self.started.append(line.number)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(2000 if line.number == 1 else 1):
            await asyncio.sleep(0)
        self.running -= 1
        self.is_healthy = line.number != self.failing
        return LineResult(line, 200 if line.number % 2 else 400, {"usage": {"completion_tokens": 2}})


def run(out, processor, is_ordered=True, lines=LINES):
    files, counts = JobFiles(out, JobKey("", "", is_ordered, 0)), JobCounts()
    with files.open():
        asyncio.run(BatchJob(files, counts).run(lines, processor))
    return counts, [json.loads(row)["custom_id"] for row in files.part.read_text().splitlines()]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_every_line_is_written_once_and_few_run_at_a_time(tmp_path, is_ordered):
    processor = FakeProcessor()
    counts, ids = run(tmp_path / "out", processor, is_ordered)
    expected = [line.custom_id for line in LINES]
    assert (ids == expected) == is_ordered
    assert sorted(ids) == sorted(expected)
    assert processor.most_running == 2
    assert (counts.num_written, counts.num_failed, counts.num_tokens) == (100, 50, 200)


def test_results_that_wait_for_a_slow_line_are_bounded(tmp_path):
    """Fault: a slow first line of a long file, with the results of all others in memory."""
    processor = FakeProcessor()
    bound = FakeProcessor.concurrency * WINDOW

    class Watch(list):
        def __iter__(self):
            for number, line in enumerate(super().__iter__()):
                if number > bound:
                    assert (tmp_path / "out.part").stat().st_size > 0
                yield line

    run(tmp_path / "out", processor, lines=Watch(LINES))


def test_lines_with_a_result_are_not_processed_again(tmp_path):
    run(tmp_path / "out", FakeProcessor(), lines=LINES[:40])
    processor = FakeProcessor()
    _, ids = run(tmp_path / "out", processor)
    assert processor.started == list(range(41, 101))
    assert ids == [line.custom_id for line in LINES]


def test_an_engine_that_stopped_ends_the_job_and_keeps_the_results(tmp_path):
    """Fault: the remaining lines get an error each, as if they had been at fault."""
    with pytest.raises(ForedraftError, match="the engine stopped; the same command goes on"):
        run(tmp_path / "out", FakeProcessor(failing=50), is_ordered=False)
    ids = [json.loads(row)["custom_id"] for row in (tmp_path / "out.part").read_text().splitlines()]
    assert "id-50" not in ids
    assert len(ids) >= 47


def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path, monkeypatch):
    def fail(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobFiles, "append", fail)
    with pytest.raises(ForedraftError, match=r"No space left on device.*the same command goes on"):
        run(tmp_path / "out", FakeProcessor())
