"""A progress bar that appears on standard error only once something has taken two seconds."""

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SHOW_AFTER_SECONDS = 2.0  # seconds before the bar appears
REDRAW_SECONDS = 0.2  # seconds between drawings: the bar shares its cores with the model


class ProgressBar:
    """`with Bar(console, "loading"): ...`; without a total it pulses, with one it is moved by `advance`."""

    def __init__(
        self, console: Console, title: str, total: float | None = None, show_after: float = SHOW_AFTER_SECONDS
    ) -> None:
        self._is_enabled = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            console=console, transient=True, auto_refresh=total is None, refresh_per_second=4,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total)
        self._timer = threading.Timer(show_after, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()  # between the timer's thread and ours
        self._is_shown, self._is_over, self._last_drawn = False, False, 0.0

    def __enter__(self) -> "ProgressBar":
        if self._is_enabled:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._is_shown:
                self._progress.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._is_over:
                self._progress.start()
                self._is_shown = True

    def advance(self, amount: float = 1, title: str | None = None) -> None:
        """Move on."""
        self._progress.update(self._task, advance=amount, description=title)
        self._redraw()

    def move_to(self, done: float, total: float, title: str) -> None:
        """Stand at `done` of `total`, which may be another total than before."""
        self._progress.update(self._task, completed=done, total=total, description=title)
        self._redraw()

    def _redraw(self) -> None:
        now = time.monotonic()
        if self._is_shown and now - self._last_drawn > REDRAW_SECONDS:
            self._last_drawn = now
            self._progress.refresh()
