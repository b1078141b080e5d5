"""A peer as a process that stays: jobs in, answers out, and stopped whenever it is not its turn.

A stopped process cannot spin. That leaves every program its own thread settings: none needs a setting to wait
passively,
which would slow it down in its own turn.
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
EXIT_TIMEOUT = 5.0  # seconds for a process to leave by itself


class PeerError(Exception):
    """A peer could not do a job; the message is one line."""


class SubprocessPeer:
    """`with Resident(python, "peer_x.py", threads) as peer: peer.ask("load", 600, model=...)`."""

    def __init__(self, python: Path, script: str, threads: int) -> None:
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONNOUSERSITE": "1"}
        try:
            self._process = subprocess.Popen(
                [str(python), str(PEERS_FOLDER / script)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr_file, env=environment,
                # a group of its own within our session: one signal stops all of it, and should we die, the system
                # wakes the stopped group and hangs up on it
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
        """Do one job, within a time. Raises PeerError; after a time-out or a crash, for every later job as well."""
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
        """End the process, by force if it does not leave."""
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
        """Why it died: the last line it wrote, which for Python is the exception."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT)
        self._stderr_file.seek(0)
        lines = [
            line.strip() for line in self._stderr_file.read().decode(errors="replace").splitlines() if line.strip()
        ]
        code = self._process.poll()
        return lines[-1][:300] if lines else f"it ended with code {code} and without a word"
