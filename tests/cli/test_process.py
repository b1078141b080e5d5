"""The command as a process: standard streams that are closed or full, signals before it has begun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import foredraft
from foredraft.cli.prompts import read_prompts

VERSION = f"foredraft {foredraft.__version__}\n"
SIGNALLED = "import os, signal, time; os.kill(os.getpid(), signal.{}); time.sleep(60)"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """`$F` is the command."""
    env = {**os.environ, "F": f"{sys.executable} -m foredraft"}
    return subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("redirected", "stdout"),
    [(">&-", ""), ("2>&-", VERSION), ("<&-", VERSION), ("<&- >&- 2>&-", "")],
)
def test_a_closed_stream_is_as_good_as_the_null_device(redirected: str, stdout: str):
    done = shell(f"$F --version {redirected}")
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, "")


def test_a_closed_input_is_an_empty_one():
    done = shell("$F generate - <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "standard input is empty" in done.stderr


def test_nothing_else_gets_the_number_of_a_closed_stream():
    code = (
        "import os, sys; from foredraft.cli.streams import open_streams; open_streams(); "
        "sys.exit(os.open(os.devnull, os.O_RDONLY))"
    )
    done = shell(f'{sys.executable} -c "{code}" <&- >&- 2>&-')
    assert done.returncode == 3


def test_a_full_output_is_named():
    done = shell("$F --version >/dev/full")
    assert (done.returncode, done.stderr) == (1, "error: standard output: no space left on device\n")


def test_a_prompt_in_utf8_is_read_whatever_the_locale():
    arrived = "é = 1".encode().decode("ascii", "surrogateescape")
    assert read_prompts(arrived, []) == ["é = 1"]


def _restore_interrupt() -> None:
    """Children of a shell's background job ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("generate", None)])
def test_a_signal_while_a_server_imports_ends_it_with_0(tmp_path: Path, name: str, command: str, code: int | None):
    (tmp_path / "typer.py").write_text(SIGNALLED.format(name))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = [sys.executable, "-m", "foredraft", command]
    done = subprocess.run(
        process, env={**os.environ, "PYTHONPATH": path}, capture_output=True, stdin=subprocess.DEVNULL, check=False,
        timeout=60, preexec_fn=_restore_interrupt,
    )  # fmt: skip
    assert done.returncode == code if code is not None else done.returncode != 0
