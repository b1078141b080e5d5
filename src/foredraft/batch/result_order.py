"""Order in which results are written."""

from collections.abc import Callable

from foredraft.batch.result import LineResult


class ResultOrder:
    """Passes results on at once, or in the order of their lines.

    Args:
        write: receives the results.
        is_ordered: hold a result back until those of all lines before it are written.
    """

    def __init__(self, write: Callable[[LineResult], None], is_ordered: bool) -> None:
        self._write, self._is_ordered = write, is_ordered
        self._expected: dict[int, None] = {}  # numbers of lines whose results are not written, in order
        self._held: dict[int, LineResult] = {}

    def expect(self, number: int) -> None:
        """Announce the result of a line; lines are announced in their order."""
        self._expected[number] = None

    def add(self, result: LineResult) -> int:
        """Add a result, and return how many were written."""
        if not self._is_ordered:
            self._write(result)
            return 1
        self._held[result.line.number] = result
        count = 0
        while self._expected and (number := next(iter(self._expected))) in self._held:
            del self._expected[number]
            self._write(self._held.pop(number))
            count += 1
        return count
