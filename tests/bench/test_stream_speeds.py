"""Plain decoding by streams: numbers, prompts and the order of the programs."""

import pytest

from foredraft.bench.stream_speeds import StreamsPlan, make_prompts, measure_streams, parse_streams
from foredraft.errors import ForedraftError


def test_numbers_of_streams_are_read_once_each_in_their_order():
    assert parse_streams("8, 16,8,1") == (8, 16, 1)


@pytest.mark.parametrize("text", ["0", "8,x", "", "257", "-1"])
def test_a_wrong_number_of_streams_is_refused(text):
    with pytest.raises(ForedraftError, match="--streams takes numbers from 1 to 256, as 8,16,32,64"):
        parse_streams(text)


def test_prompts_are_new_in_every_round_and_the_same_for_every_program():
    seen = []
    measure_streams(
        StreamsPlan((2,), 3, rounds=3), ["a", "b"], 1000, lambda label, prompts: seen.append(prompts) or 1.0
    )
    assert [seen[i] for i in range(0, 8, 2)] == [seen[i] for i in range(1, 8, 2)]
    assert len({tuple(map(tuple, prompts)) for prompts in seen}) == 4
    assert make_prompts(2, 3, 7, 0) != make_prompts(2, 3, 7, 1)


def test_programs_take_turns_in_rotating_order_and_the_first_round_does_not_count():
    order: list[str] = []

    def decode(label, prompts):
        order.append(label)
        return float(len(order))

    times = measure_streams(StreamsPlan((4,), rounds=2), ["a", "b"], 100, decode)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == {4: {"a": [4.0, 5.0], "b": [3.0, 6.0]}}


def test_a_program_that_fails_is_left_out_from_then_on():
    calls: list[str] = []

    def decode(label, prompts):
        calls.append(label)
        return None if label == "b" and len(prompts) == 4 else 1.0

    times = measure_streams(StreamsPlan((2, 4, 8), rounds=1), ["a", "b"], 100, decode)
    assert times == {2: {"a": [1.0], "b": [1.0]}, 4: {"a": [1.0]}, 8: {"a": [1.0]}}
    assert calls.count("b") == 3
