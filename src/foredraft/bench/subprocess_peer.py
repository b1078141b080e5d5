"""Peer program as a process that answers jobs and is stopped between them.

Threads of a stopped process cannot spin while another program is measured. So no program needs a setting for passive
waiting, which would slow it down in its own turn.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PEERS_FOLDER = Path(__file__).parent / "peers"
EXIT_TIMEOUT = 5.0  # seconds for a process to exit before it is killed
MAX_ERROR_CHARS = 300  # of a line that an error message quotes


class PeerError(Exception):
    """Failure of a job, with a message of one line."""


class SubprocessPeer:
    """Process of a peer program that answers jobs.

    Example: `with SubprocessPeer(python, "peer_x.py", threads) as peer: peer.call("load", 600, model=...)`.

    Args:
        python: interpreter of the program.
        script: file in bench/peers.
        threads: OpenMP threads.

    Raises:
        PeerError: the interpreter cannot be run.
    """

    def __init__(self, python: Path, script: str, threads: int) -> None:
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONNOUSERSITE": "1"}
        try:
            self._process = subprocess.Popen(
                [str(python), str(PEERS_FOLDER / script)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr_file, env=environment,
                # A separate process group in this session: one signal stops all its processes. If this process dies,
                # the system sends SIGHUP and SIGCONT to the stopped group, which is orphaned then.
                process_group=0,
            )  # fmt: skip
        except OSError as error:
            self._stderr_file.close()
            raise PeerError(f"{python} cannot be run: {error.strerror}") from None
        self._buffer = b""

    def __enter__(self) -> "SubprocessPeer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Run one job and return its answer.

        Args:
            op: name of the job.
            timeout: seconds; the process is killed afterwards.
            arguments: arguments of the job, as JSON values.

        Raises:
            PeerError: the job failed. After a timeout or a crash every later job fails too.
        """
        assert self._process.stdin is not None
        self._send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._read_line(time.monotonic() + timeout))
        except (BrokenPipeError, EOFError, json.JSONDecodeError):
            raise PeerError(self._describe_exit()) from None
        except TimeoutError:
            self._send_signal(signal.SIGKILL)
            raise PeerError(f"no answer to {op!r} within {timeout:.0f} s") from None
        self._send_signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process, by force if it does not exit within EXIT_TIMEOUT."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT)
        self._send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._stderr_file.close()

    def _send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _describe_exit(self) -> str:
        """Return the last line on standard error, which for Python is the exception."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT)
        self._stderr_file.seek(0)
        lines = [
            line.strip() for line in self._stderr_file.read().decode(errors="replace").splitlines() if line.strip()
        ]
        exit_code = self._process.poll()
        return (
            lines[-1][:MAX_ERROR_CHARS] if lines else f"the process ended with code {exit_code} and without a message"
        )
