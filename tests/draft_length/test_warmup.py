"""Warm-up: how many first steps are plain, and what ends it."""

import pytest

from foredraft.draft_length.warmup import MIN_STEPS, NODES, WarmUp


def test_every_step_of_the_warm_up_is_counted_if_a_request_got_a_token() -> None:
    warmup, nodes = WarmUp(), []
    while not warmup.is_over:
        nodes.append(warmup.num_nodes)
        warmup.record_step(0, 1.0)
        assert warmup.step == len(nodes) - 1
        warmup.record_step(3, 1.0)
    assert tuple(nodes) == NODES
    warmup.record_step(3, 1.0)
    assert warmup.step == len(NODES)
    assert warmup.num_nodes == 0


@pytest.mark.parametrize(("num_requests", "num_plain"), [(1, 4), (2, 4), (3, 8)])
def test_few_requests_have_fewer_plain_steps(num_requests: int, num_plain: int) -> None:
    warmup, steps = WarmUp(), 0
    while not warmup.num_nodes:
        warmup.record_step(num_requests, 1.0)
        steps += 1
    assert steps == num_plain


def test_a_negative_credit_ends_it_after_the_least_number_of_steps() -> None:
    warmup = WarmUp()
    for i in range(MIN_STEPS):
        assert not warmup.is_over
        warmup.record_step(3, -1.0)
        assert warmup.is_over == (i == MIN_STEPS - 1)
