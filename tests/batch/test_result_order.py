"""Order of results."""

import itertools

import pytest

from foredraft.batch.line import BatchLine
from foredraft.batch.result import LineResult
from foredraft.batch.result_order import ResultOrder


@pytest.mark.parametrize("arrival", list(itertools.permutations([2, 5, 7])))
def test_results_are_written_once_and_in_the_order_of_the_lines(arrival):
    written = []
    order = ResultOrder(written.append, is_ordered=True)
    for number in (2, 5, 7):
        order.expect(number)
    counts = [order.add(LineResult(BatchLine(number, ""), 200, {})) for number in arrival]
    assert [result.line.number for result in written] == [2, 5, 7]
    assert sum(counts) == 3


def test_unordered_results_are_written_at_once():
    written = []
    order = ResultOrder(written.append, is_ordered=False)
    for number in (1, 2):
        order.expect(number)
    assert order.add(LineResult(BatchLine(2, ""), 200, {})) == 1
    assert [result.line.number for result in written] == [2]
