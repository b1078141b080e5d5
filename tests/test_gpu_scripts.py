"""The scripts that check and measure a GPU: without one, small cases run to the end, and a measurement is refused."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.gpu_cases import TRITON

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "dev" / "gpu" / "run.sh"


def test_without_a_gpu_the_script_says_what_to_do() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([SCRIPT], env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--dry runs small cases" in done.stderr


@TRITON
@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="the dry run is for machines without a GPU")
def test_a_dry_run_finds_every_result_right(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "--dry", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for part in ("check_kernels", "measure_attention", "measure_products", "measure_model"):
        results = json.loads((tmp_path / f"{part}.json").read_text())["results"]
        assert results
        assert all(result["is_right"] is not False for result in results)
        assert any(result["is_right"] for result in results)
