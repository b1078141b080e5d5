"""Progress bar that appears only if a task takes longer than two seconds."""

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SHOW_AFTER_SECONDS = 2.0  # delay before the bar appears
REDRAW_SECONDS = 0.2  # shortest time between two drawings, since drawing takes CPU time from the model


class ProgressBar:
    """Progress bar as a context manager: `with ProgressBar(console, "loading") as bar: ...`.

    Args:
        console: console to draw on. Without a terminal nothing is drawn.
        title: text beside the bar.
        total: amount of work. Default None = unknown, then the bar pulses.
        show_after: seconds before the bar appears. Default 2.
        has_time_left: show the work done and an estimate of the time left, instead of the time so far. Default False.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: float | None = None,
        show_after: float = SHOW_AFTER_SECONDS,
        has_time_left: bool = False,
    ) -> None:
        self._is_enabled = console.is_terminal
        times = (MofNCompleteColumn(), TimeRemainingColumn()) if has_time_left else (TimeElapsedColumn(),)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), *times,
            console=console, transient=True, auto_refresh=total is None, refresh_per_second=4,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total)
        self._timer = threading.Timer(show_after, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()  # guards start and stop, which two threads call
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
        """Add `amount` to the work done, and replace the title if one is given."""
        self._progress.update(self._task, advance=amount, description=title)
        self._redraw()

    def move_to(self, done: float, total: float, title: str) -> None:
        """Set the work done, the total, which may have changed, and the title."""
        self._progress.update(self._task, completed=done, total=total, description=title)
        self._redraw()

    def _redraw(self) -> None:
        now = time.monotonic()
        if self._is_shown and now - self._last_drawn > REDRAW_SECONDS:
            self._last_drawn = now
            self._progress.refresh()
