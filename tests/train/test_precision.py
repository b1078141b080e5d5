"""Choice of the precision of training."""

import pytest
import torch

from foredraft.train import precision
from foredraft.train.distributed import DistributedContext


@pytest.fixture
def set_times(monkeypatch):
    """Replace the times of products, in seconds by dtype."""

    def replace(bfloat16: float, float32: float) -> None:
        times = {torch.bfloat16: bfloat16, torch.float32: float32}
        monkeypatch.setattr(precision, "_time_product", lambda dtype, shape: times[dtype])

    return replace


@pytest.mark.parametrize(("bfloat16", "is_fast"), [(1.0, True), (4.0, False)])
def test_the_faster_precision_trains_on_a_cpu(set_times, bfloat16, is_fast):
    set_times(bfloat16, 2.0)
    assert precision.has_fast_bfloat16(torch.device("cpu")) == is_fast
    assert precision.choose_training_dtype("cpu") == (torch.bfloat16 if is_fast else torch.float32)
    assert DistributedContext.detect("cpu", "auto").is_mixed == is_fast


def test_a_stated_precision_is_not_measured(set_times):
    set_times(4.0, 2.0)
    assert DistributedContext.detect("cpu", "bf16").is_mixed
    set_times(1.0, 2.0)
    assert not DistributedContext.detect("cpu", "fp32").is_mixed


@pytest.mark.parametrize(("slowness", "num_timed"), [(3.0, 4), (100.0, 2)])
def test_a_large_product_is_not_timed_where_a_small_one_is_far_too_slow(monkeypatch, slowness, num_timed):
    """Some processors take half a minute for the large one."""
    timed = []

    def time_product(dtype, shape):
        timed.append((dtype, shape))
        return slowness if dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(precision, "_time_product", time_product)
    assert not precision.has_fast_bfloat16(torch.device("cpu"))
    assert len(timed) == num_timed


def test_products_of_both_precisions_are_timed():
    for dtype in (torch.bfloat16, torch.float32):
        assert 0 < precision._time_product(dtype, precision.SMALL_SHAPE) < 10
