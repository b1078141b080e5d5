"""Interface of the parsers, and what they share: text that may begin a marker, and white space that is held back."""

import secrets
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.server.messages.events import CallStart, ContentPiece, MessageEvent

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # chat templates of Mistral take nine letters and digits only


class MessageParser(Protocol):
    """State machine over the text of one answer.

    The events do not depend on how the text is cut into pieces, apart from the cuts of their own texts.
    """

    def push(self, text: str) -> list[MessageEvent]:
        """Append text and return the events that are now certain."""

    def finish(self) -> list[MessageEvent]:
        """Return the events of the text that was held back. Called once, after the last `push`."""


@dataclass
class CallNumbering:
    """Numbers and names the calls of one answer.

    Args:
        names: names of the tools that the request offers. Text that calls any other name is content.
        make_id: function that makes the id of a call.
    """

    names: Collection[str]
    make_id: Callable[[], str]
    num_calls: int = 0

    def start_call(self, name: str) -> CallStart:
        """Return the event that begins the next call."""
        self.num_calls += 1
        return CallStart(self.num_calls - 1, self.make_id(), name)


def make_call_id() -> str:
    """Make a random id of a call."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


class PlainParser:
    """Parser of a text that is all content."""

    def push(self, text: str) -> list[MessageEvent]:
        return [ContentPiece(text)] if text else []

    def finish(self) -> list[MessageEvent]:
        return []


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Find the first marker in a text.

    Returns:
        (offset, marker). Without a whole marker the marker is "", and the text from the offset on may begin one.
    """
    places = [(text.find(marker), marker) for marker in markers]
    whole = [place for place in places if place[0] >= 0]
    if whole:
        return min(whole)
    longest = max(map(len, markers), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return len(text) - size, ""
    return len(text), ""


class ContentWriter:
    """Writes content, and holds back the white space at its end: before, between and after calls it is dropped."""

    def __init__(self) -> None:
        self._space = ""
        self._drops_space = False

    def write(self, text: str) -> list[MessageEvent]:
        """Return the events of the next text."""
        text = self._space + text
        if self._drops_space:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._drops_space = False
        return [ContentPiece(kept)]

    def drop_space(self) -> None:
        """Drop the white space around this place."""
        self._space, self._drops_space = "", True

    def finish(self) -> list[MessageEvent]:
        """Return the white space at the end of the content."""
        text, self._space = self._space, ""
        return [ContentPiece(text)] if text else []
