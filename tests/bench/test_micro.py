"""The kernel benchmark: it measures what its labels state, on shapes too small to time anything."""

import pytest
import torch

from foredraft.bench import machine_speed, micro
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> micro.KernelBenchPlan:
    monkeypatch.setattr(micro, "COLD_BYTES", 1 << 18)
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    return micro.KernelBenchPlan(shapes=((64, 48),), rows=(1, 3), contexts=(20,), heads=(4, 2, 16), rounds=2)


def test_every_kind_and_row_count_has_a_row(small):
    report = micro.run(small)
    products = report.data["products"]
    assert [(p.kind, p.rows) for p in products] == [(kind, rows) for kind in micro.WEIGHT_KINDS for rows in (1, 3)]
    assert all(p.ratio == 1 for p in products if p.rows == 1)
    assert all((p.over_torch is None) == p.kind.startswith("int") for p in products)
    timings = [(m.keys, m.context, m.rows) for m in report.data["attention"]]
    assert timings == [(kind, 20, rows) for rows in (1, 3) for kind in micro.KEY_KINDS]
    assert "GB/s" in report.markdown


def test_gigabytes_are_the_bytes_of_the_weights(small):
    """Guards the sizes: int4 is counted as half a byte and its scales, not as what it stands for."""
    for product in micro.run(small).data["products"]:
        size = product.gigabytes * product.microseconds * 1e3
        per_weight = {"bfloat16": 2, "float32": 4, "int8": 1, "int4": 0.5}[product.kind]
        assert per_weight * 64 * 48 <= size * 1.001
        assert size <= 64 * 64 * (per_weight + 0.5)


def test_limits_are_the_longer_of_reading_and_multiplying(small, monkeypatch):
    monkeypatch.setattr(micro, "measure_peak", lambda *_: 1e-3)
    report = micro.run(small)
    slow = [p.limit_microseconds for p in report.data["products"]]
    assert slow == [pytest.approx(2 * p.rows * 64 * 48 / 1e6 * 1e6) for p in report.data["products"]]
    # rows see 20 + 1, + 2 and + 3 keys; a product of 4 heads, 16 wide, for scores and one for values
    assert {m.rows: m.limit_microseconds for m in report.data["attention"]} == {
        1: pytest.approx(4 * 4 * 16 * 21), 3: pytest.approx(4 * 4 * 16 * 66)
    }  # fmt: skip
    monkeypatch.setattr(micro, "measure_peak", lambda *_: 1e9)
    for product in micro.run(small).data["products"]:
        assert product.limit_microseconds / product.microseconds == pytest.approx(product.share, rel=1e-6)


def test_reading_touches_every_byte():
    native = load_library()
    assert native is not None, "the native kernels were not built"
    data = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
    before = native.handle.fd_read_memory(data.data_ptr(), len(data))
    for place in (0, 5, 12345, len(data) - 1):
        data[place] ^= 1
        after = native.handle.fd_read_memory(data.data_ptr(), len(data))
        assert after != before, f"byte {place} made no difference"
        before = after


def test_threads_are_as_before(small):
    before = torch.get_num_threads()
    micro.run(small)
    assert torch.get_num_threads() == before


def test_without_kernels_it_says_what_to_run(monkeypatch):
    monkeypatch.setattr(micro, "load_library", lambda: None)
    with pytest.raises(ForedraftError, match=r"foredraft\.kernels\.cpu\.build"):
        micro.run(micro.KernelBenchPlan())


def test_unknown_kind():
    with pytest.raises(ForedraftError, match="int3"):
        micro.KernelBenchPlan(kinds=("int3",))
