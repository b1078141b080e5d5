"""Snapshots of requests, to detect and undo changes by a drafter, which must not change output."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from foredraft.drafters.failure_backoff import FailureBackoff, FailureKind
from foredraft.request import Request

T = TypeVar("T")


class RequestSnapshot:
    """Copy of a request's fields and lists.

    Comparing lists of the same objects takes about 1 ns per entry, so it is done at every call. A list is copied only
    if the engine changed it since the last snapshot.
    """

    __slots__ = ("fields", "output", "pages", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fields: dict[str, Any] = {}
        self.output: list[int] = []
        self.pages: list[int] = []

    def capture(self) -> None:
        request = self.request
        self.fields = vars(request).copy()
        if self.output != request.output:
            self.output = list(request.output)
        if self.pages != request.pages:
            self.pages = list(request.pages)

    def is_unchanged(self) -> bool:
        request = self.request
        return vars(request) == self.fields and request.output == self.output and request.pages == self.pages

    def restore(self) -> None:
        fields = vars(self.request)
        fields.clear()
        fields.update(self.fields)
        self.request.output[:], self.request.pages[:] = self.output, self.pages


class SnapshotCache:
    """Snapshots of the requests that one drafter sees, by slot.

    `capture` runs before a call and `restore_requests` after it. Objects below a request's own fields and lists (its
    spec, which is frozen, its matcher, an encoder's states) are not compared.
    """

    def __init__(self) -> None:
        self._snapshots: dict[int, RequestSnapshot] = {}  # by slot

    def list_requests(self) -> list[Request]:
        """Return the requests whose slots were not forgotten."""
        return [snapshot.request for snapshot in self._snapshots.values()]

    def capture(self, requests: Iterable[Request]) -> list[RequestSnapshot]:
        """Take snapshots of requests before a call."""
        found = []
        for request in requests:
            snapshot = self._snapshots.get(request.slot)
            if snapshot is None or snapshot.request is not request:
                snapshot = self._snapshots[request.slot] = RequestSnapshot(request)
            snapshot.capture()
            found.append(snapshot)
        return found

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._snapshots.pop(slot, None)


def restore_requests(snapshots: Iterable[RequestSnapshot]) -> str | None:
    """Undo changes after a call. Returns a message about them; None without changes."""
    fault = None
    for snapshot in snapshots:
        try:
            is_same = snapshot.is_unchanged()
        except Exception:  # a field holds something that cannot be compared
            is_same = False
        if not is_same:
            fault = f"it changed the request in slot {snapshot.fields['slot']}; the change was undone"
            snapshot.restore()
    return fault


def call_isolated(
    backoff: FailureBackoff,
    snapshots: Iterable[RequestSnapshot],
    operation: str,
    call: Callable[[], T],
    is_timed: bool = False,
) -> T | None:
    """Call a drafter in isolation.

    Args:
        backoff: counter of the drafter's failures.
        snapshots: snapshots of the requests that the drafter sees.
        operation: name of the call in messages.
        call: the call.
        is_timed: record the call as a proposal, which fails if it takes too long.

    Returns:
        Result of the call; None if it raised or changed a request. Both count as failures.
    """
    started = backoff.clock()
    kind: FailureKind = "raised"
    found = fault = None
    try:
        found = call()
    except Exception as error:  # a drafter may raise any exception
        fault = f"{type(error).__name__}: {error}"
    finally:  # also after a KeyboardInterrupt, which passes through
        changed = restore_requests(snapshots)
    if changed is not None:
        kind, fault = "mutated", changed
    if fault is not None:
        backoff.record_failure(kind, f"{operation}: {fault}", backoff.clock() - started)
        return None
    if is_timed:
        backoff.record_call(backoff.clock() - started)
    return found
