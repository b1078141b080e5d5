"""Events of one choice: its parts go through the parser of the model's dialect."""

from foredraft.server.choice_stream import ChoicePart
from foredraft.server.messages.events import CallStart, MessageEvent
from foredraft.server.messages.parser import MessageParser, PlainParser


class MessageStream:
    """Converter of the parts of one choice, in order, to events.

    Args:
        parser: parser of the text. None = all text is content.
    """

    def __init__(self, parser: MessageParser | None) -> None:
        self.is_plain = parser is None  # all text is content
        self._parser: MessageParser = PlainParser() if parser is None else parser
        self._has_calls = False

    def take_part(self, part: ChoicePart) -> list[MessageEvent]:
        """Return the events of a part. The last one ends the parser."""
        events = self._parser.push(part.text)
        if part.finish_reason is not None:
            events += self._parser.finish()
        self._has_calls = self._has_calls or any(isinstance(event, CallStart) for event in events)
        return events

    def name_finish(self, reason: str | None) -> str | None:
        """Return the finish reason of the API: "tool_calls" for an answer that ends after calls."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason
