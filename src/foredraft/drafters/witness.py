"""What requests were before a drafter was called: a drafter that changes one must not change output."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from foredraft.drafters.probation import Kind, Probation
from foredraft.request import Request

T = TypeVar("T")


class Kept:
    """One request as it was: its fields, and copies of what its lists hold.

    Comparing lists that hold the same objects costs about a nanosecond per entry, so it is done at every call; copies
    are made only where the engine itself has changed something since. `inserted` is compared by its size alone.
    """

    __slots__ = ("fields", "hashes", "inserted", "output", "pages", "prompt", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fields: dict[str, Any] = {}
        self.prompt = list(request.prompt)  # the engine never changes it
        self.output: list[int] = []
        self.pages: list[int] = []
        self.hashes: list[bytes] = []
        self.inserted: set[bytes] = set()

    def note(self) -> None:
        request = self.request
        self.fields = vars(request).copy()
        if self.output != request.output:
            self.output = list(request.output)
        if self.pages != request.pages:
            self.pages = list(request.pages)
        if self.hashes != request.hashes:
            self.hashes = list(request.hashes)
        if len(self.inserted) != len(request.inserted):
            self.inserted = set(request.inserted)

    def is_same(self) -> bool:
        request, fields = self.request, vars(self.request)
        return (
            fields == self.fields
            and request.output == self.output
            and request.pages == self.pages
            and request.prompt == self.prompt
            and request.hashes == self.hashes
            and len(request.inserted) == len(self.inserted)
        )

    def restore(self) -> None:
        fields = vars(self.request)
        fields.clear()
        fields.update(self.fields)
        request = self.request
        request.prompt[:], request.output[:] = self.prompt, self.output
        request.pages[:], request.hashes[:] = self.pages, self.hashes
        request.inserted.clear()
        request.inserted.update(self.inserted)


class Witness:
    """The requests that one drafter was shown, from `note` before a call to `restore` after it.

    What lies deeper than a request's own fields and lists (its matcher, an encoder's states) is not looked at.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # by slot

    def shown(self) -> list[Request]:
        """The requests whose slots were not forgotten."""
        return [kept.request for kept in self._kept.values()]

    def note(self, requests: Iterable[Request]) -> list[Kept]:
        """Before a call: what these requests are."""
        found = []
        for request in requests:
            kept = self._kept.get(request.slot)
            if kept is None or kept.request is not request:
                kept = self._kept[request.slot] = Kept(request)
            kept.note()
            found.append(kept)
        return found

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._kept.pop(slot, None)


def restored(noted: Iterable[Kept]) -> str | None:
    """After a call: undo what was changed. Returns what that was, None for nothing."""
    fault = None
    for kept in noted:
        try:
            is_same = kept.is_same()
        except Exception:  # a field holds something that cannot be compared
            is_same = False
        if not is_same:
            fault = f"it changed the request in slot {kept.fields['slot']}, which is as before again"
            kept.restore()
    return fault


def attempt(
    probation: Probation, noted: Iterable[Kept], verb: str, call: Callable[[], T], is_timed: bool = False
) -> T | None:
    """What a drafter's call returns; None where it raised or changed a request, which is counted as its failure.

    is_timed: a call that went well counts as a proposal, and one that took too long as a failure.
    """
    began = probation.clock()
    kind: Kind = "raised"
    found = fault = None
    try:
        found = call()
    except Exception as error:  # it may raise anything
        fault = f"{type(error).__name__}: {error}"
    finally:  # a KeyboardInterrupt passes, and what it leaves behind must be right too
        changed = restored(noted)
    if changed is not None:
        kind, fault = "mutated", changed
    if fault is not None:
        probation.failed(kind, f"{verb}: {fault}", probation.clock() - began)
        return None
    if is_timed:
        probation.took(probation.clock() - began)
    return found
