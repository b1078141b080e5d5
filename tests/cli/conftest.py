"""Ways to run the command: its streams piped, or on a terminal."""

import contextlib
import io
import os
import pty
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from foredraft.cli.commands import app
from tests.support.cli_fakes import FakeBackend


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        return self.stderr.splitlines()


Run = Callable[..., Outcome]


@pytest.fixture
def run() -> Run:
    """Run the command with its streams piped."""

    def invoke(*args: str, backend: FakeBackend | None = None, stdin: str | bytes | None = None, **env: str) -> Outcome:
        result = CliRunner(env=env).invoke(app, list(args), obj=backend or FakeBackend(), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def run_on_terminal(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with all three streams on one terminal."""

    def invoke(*args: str, backend: FakeBackend | None = None, **env: str) -> Outcome:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **env}.items():
            monkeypatch.setenv(name, value)
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "r+b", buffering=0) as raw:
            terminal = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)  # type: ignore[arg-type]
            monkeypatch.setattr(sys, "stdin", terminal)
            streams = contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal)
            with streams[0], streams[1], pytest.raises(SystemExit) as left:
                app(list(args), obj=backend or FakeBackend())
            shown = _drain(ours)
        os.close(ours)
        return Outcome(int(left.value.code or 0), shown, "")

    return invoke


def _drain(fd: int) -> str:
    os.set_blocking(fd, False)
    chunks = []
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
    return b"".join(chunks).decode().replace("\r\n", "\n")
