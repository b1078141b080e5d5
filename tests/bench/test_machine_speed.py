"""Speed of the machine: reads and products have a speed, and threads stay as they were."""

import pytest
import torch

from foredraft.bench import machine_speed
from foredraft.kernels.cpu.library import load_library


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_product_has_a_speed(quantization: str | None) -> None:
    assert 0.1 < machine_speed.measure_peak(torch.float32, quantization) < 1e6


def test_reads_have_a_speed_and_threads_stay(monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    native, before = load_library(), torch.get_num_threads()
    assert native is not None, "the native kernels were not built"
    bandwidth = machine_speed.measure_bandwidth(native, rounds=3)
    assert min(bandwidth.one_thread, bandwidth.all_threads) > 0.1
    assert torch.get_num_threads() == before
