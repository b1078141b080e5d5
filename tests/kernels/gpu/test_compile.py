"""The kernels compile for GPUs that are not here, within their shared memory and registers, by the products meant.

This says nothing of speed. Rows have equal bits only if every program multiplies by the same instruction.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_cases import TRITON

pytestmark = TRITON
ROOT = Path(__file__).parents[3]
CAPABILITIES = "90,80,100,120"
# Shared memory of a program in bytes: a multiprocessor of capability 12.0 has 100 KB, that of 8.0 164 KB.
MAX_SHARED, MAX_SHARED_FP32 = 48 * 1024, 72 * 1024
# Bytes of a thread that lie in local memory, since it has at most 255 registers: a few addresses, outside the loops.
MAX_SPILLED, MAX_SPILLED_FP32 = 256, 512


def compile_kernels(selection: str, folder: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.gpu_compile", selection, CAPABILITIES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["capability"] for kernel in kernels} == {int(one) for one in CAPABILITIES.split(",")}
    for kernel in kernels:
        is_wide = "fp32" in kernel["name"]
        assert kernel["shared"] <= (MAX_SHARED_FP32 if is_wide else MAX_SHARED), kernel
        assert kernel["spilled"] <= (MAX_SPILLED_FP32 if is_wide else MAX_SPILLED), kernel
        assert kernel["other_products"] == 0, kernel
        if kernel["name"].startswith(("attention", "product")) and not is_wide:
            assert kernel["mma_sync"] > 0, kernel
        if kernel["name"].startswith("product") and "x 40" not in kernel["name"]:
            assert kernel["async_copies"] > 0, kernel
        if not is_wide:  # a sum may not be fused with a product in one kernel and not in another
            assert kernel["fused"] == 0, kernel


def test_the_kernels_of_a_llama_compile_for_every_generation(tmp_path: Path) -> None:
    check(compile_kernels("main", tmp_path))


@pytest.mark.soak
def test_every_kernel_compiles_for_every_type_and_width(tmp_path: Path) -> None:
    check(compile_kernels("all", tmp_path))
