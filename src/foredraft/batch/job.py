"""Run of a batch job: lines in, results out, many at a time."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from foredraft.batch.job_files import JobFiles
from foredraft.batch.line import BatchLine
from foredraft.batch.processor import LineProcessor
from foredraft.batch.result import LineResult
from foredraft.batch.result_order import ResultOrder
from foredraft.errors import ForedraftError

WINDOW = 16  # results that wait for an earlier line, at most, for each request that runs


@dataclass
class JobCounts:
    """Lines and tokens of a run so far. Only the run writes it."""

    num_written: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    def add(self, result: LineResult) -> None:
        self.num_written += 1
        self.num_failed += result.is_failed
        self.num_tokens += result.num_tokens


class BatchJob:
    """One run of a job, from the first line without a result on.

    Args:
        files: opened files of the job.
        counts: counts of this run, which the job updates.
        report: called with the counts after every result.
    """

    def __init__(
        self, files: JobFiles, counts: JobCounts, report: Callable[[JobCounts], None] = lambda counts: None
    ) -> None:
        self._files, self._counts, self._report = files, counts, report
        self._order = ResultOrder(self._write, files.key.is_ordered)

    def select_pending(self, lines: Iterable[BatchLine]) -> Iterable[BatchLine]:
        """Select the lines without a result, and announce them."""
        for line in lines:
            if line.custom_id not in self._files.done:
                self._order.expect(line.number)
                yield line

    def add(self, result: LineResult) -> int:
        """Add a result, and return how many were written."""
        return self._order.add(result)

    async def run(self, lines: Iterable[BatchLine], processor: LineProcessor) -> None:
        """Process all lines that have no result.

        Raises:
            ForedraftError: the engine stopped; results so far are written.
        OSError: a result cannot be written.
        """
        slots = asyncio.Semaphore(processor.concurrency)
        room = asyncio.Semaphore(processor.concurrency * WINDOW)

        async def process(line: BatchLine) -> None:
            try:
                result = await processor.process(line)
            finally:
                slots.release()
            if not processor.is_healthy:
                raise ForedraftError("the engine stopped; the same command goes on after the last result")
            for _ in range(self.add(result)):
                room.release()

        try:
            async with asyncio.TaskGroup() as group:
                for line in self.select_pending(lines):
                    await room.acquire()
                    await slots.acquire()
                    group.create_task(process(line))
        except* (ForedraftError, OSError) as errors:
            raise errors.exceptions[0] from None

    def _write(self, result: LineResult) -> None:
        self._files.append(result.encode(self._files.key.created))
        self._counts.add(result)
        self._report(self._counts)
