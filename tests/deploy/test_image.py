"""The image is built, serves as its user on a read-only file system, and drains: with docker or podman, if one works.

FOREDRAFT_BUILD_ARGS holds further arguments of `build`, such as --build-arg PIP_ARGS=... for wheels of torch without
CUDA.
"""

import json
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.deployments import DOCKERFILE

ROOT = Path(__file__).parents[2]
TAG = "foredraft-test:cpu"
KEY = "secret-of-the-test"
NUM_TOKENS = 900
BODY = {"prompt": "def f(", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def tool() -> str:
    """Find a container tool that works: its client alone is not enough."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    pytest.skip("neither docker (with its daemon) nor podman works on this machine")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tool) -> str:
    more = shlex.split(os.environ.get("FOREDRAFT_BUILD_ARGS", ""))
    others = [word.removeprefix("PYTHON_IMAGE=") for word in more if word.startswith("PYTHON_IMAGE=")]
    [base] = others or [DOCKERFILE.stages["runtime"].base]
    first = subprocess.run([tool, "run", "--rm", base, "true"], capture_output=True, text=True, check=False)
    if first.returncode:
        pytest.skip(f"{tool} cannot run the base image {base}: {first.stderr.strip()[-300:]}")
    run(tool, "build", "-f", "deploy/Dockerfile", "--target", "cpu", "-t", TAG, *more, ".")
    return TAG


@pytest.fixture
def container(tool, image) -> Iterator[str]:
    words = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "-e", f"FOREDRAFT_API_KEY={KEY}"]
    name = run(tool, "run", "-d", "-p", "127.0.0.1::8000", *words, image, "--drain-timeout", "30")
    yield name
    subprocess.run([tool, "rm", "-f", "-v", name], capture_output=True, check=False)


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if httpx.get(url + "/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError("the server did not become ready")


def test_the_image_serves_without_root_and_drains(tool, container):
    url = "http://" + run(tool, "port", container, "8000").splitlines()[0]
    wait_until_ready(url)
    assert httpx.get(url + "/v1/models").status_code == 401, "the key of the environment is required"
    assert run(tool, "exec", container, "id", "-u") == "10001"
    assert run(tool, "exec", container, "python", "/opt/foredraft/healthcheck.py") == ""
    assert json.loads(run(tool, "exec", container, "foredraft", "version", "--json"))["kernels"], "native kernels"

    answers: list[httpx.Response] = []
    client = httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=120)
    thread = threading.Thread(target=lambda: answers.append(client.post(url + "/v1/completions", json=BODY)))
    thread.start()
    while "num_requests_running" not in (text := client.get(url + "/metrics").text) or not is_running(text):
        time.sleep(0.02)
    run(tool, "stop", "--time", "45", container)
    thread.join()
    client.close()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == NUM_TOKENS, "SIGTERM let the request finish"
    assert run(tool, "inspect", "--format", "{{.State.ExitCode}}", container) == "0"


def is_running(text: str) -> bool:
    [line] = [line for line in text.splitlines() if line.startswith("foredraft:num_requests_running")]
    return float(line.split()[-1]) > 0
