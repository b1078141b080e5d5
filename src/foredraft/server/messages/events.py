"""Events of an answer in the order of its text. Every route forms its stream from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningPiece:
    """Next text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentPiece:
    """Next text of the content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Beginning of a tool call; its arguments follow as ArgumentsPieces with the same index."""

    index: int  # number of calls before it
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """Next text of the arguments of a call, which are JSON."""

    index: int
    text: str


MessageEvent = ReasoningPiece | ContentPiece | CallStart | ArgumentsPiece
