"""Choice of the kernels: by device and triton alone, the way out is logged once, and nothing imports triton early."""

import logging
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu import loading
from foredraft.kernels.gpu.loading import explain_missing_kernels, select_kernels
from tests.support.gpu_cases import TRITON

GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class Machine:
    """A machine with a GPU of some age, with or without triton."""

    capability: tuple[int, int]
    has_triton: bool = True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = object() if self.has_triton else None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: found)
        loading.warn_about_fallback.cache_clear()


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine((9, 0)), None),
        (Machine((8, 0)), None),
        (Machine((12, 0)), None),
        (Machine((7, 5)), "compute capability 7.5 is below 8.0"),
        (Machine((9, 0), has_triton=False), "triton is not installed"),
    ],
    ids=str,
)
def test_the_kernels_need_triton_and_a_gpu_of_2020(
    machine: Machine, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install(monkeypatch)
    assert explain_missing_kernels(GPU) == reason


def test_the_way_out_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Machine((7, 0)).install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert select_kernels(GPU) is None
        assert select_kernels(GPU) is None
    assert [record.getMessage() for record in caplog.records] == [
        "attention on this GPU runs on torch's operators, which copy the KV of every request: compute capability 7.0 "
        "is below 8.0"
    ]


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine((9, 0)).install(monkeypatch)
    monkeypatch.setenv("FOREDRAFT_KERNELS", "torch")
    assert explain_missing_kernels(GPU) == "FOREDRAFT_KERNELS=torch"


def test_a_cpu_never_runs_them() -> None:
    assert select_kernels(torch.device("cpu")) is None


def test_loading_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine((9, 0), has_triton=False).install(monkeypatch)
    with pytest.raises(ForedraftError, match="pip install triton"):
        loading.load_kernels.__wrapped__()


@TRITON
def test_head_sizes_above_the_limit_fall_back_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    loading.warn_about_fallback.cache_clear()
    kernels, wide = loading.load_kernels(), torch.zeros(1, 1, 512)
    with caplog.at_level(logging.WARNING):
        assert not kernels.can_attend(wide, wide, wide)
    assert "a head size of 512 is above 256" in caplog.text
    assert kernels.can_attend(wide[..., :256], wide[..., :256], wide[..., :256])


def test_the_package_imports_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import foredraft.kernels.gpu.loading, foredraft.kernels.gpu.rows, foredraft.kv.pool\n"
        "assert 'foredraft.kernels.gpu.attention' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
