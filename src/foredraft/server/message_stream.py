"""Events of one choice: its parts go through the parser of the model's dialect."""

from itertools import pairwise

from foredraft.server.choice_stream import ChoicePart
from foredraft.server.messages.events import CallStart, MessageEvent, ReasoningPiece, join_events
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
        self._num_tokens = 0
        self._is_in_reasoning = True  # no content and no call so far
        self.num_reasoning_tokens = 0  # tokens up to the last one of the reasoning

    def take_part(self, part: ChoicePart) -> list[MessageEvent]:
        """Return the events of a part. The last one ends the parser."""
        events: list[MessageEvent] = []
        for text, num_tokens in self._split(part):
            found = self._parser.push(text)
            self._num_tokens += num_tokens
            if any(isinstance(event, ReasoningPiece) for event in found):
                self.num_reasoning_tokens = self._num_tokens
            self._is_in_reasoning = self._is_in_reasoning and all(isinstance(one, ReasoningPiece) for one in found)
            events += found
        if part.finish_reason is not None:
            events += self._parser.finish()
        self._has_calls = self._has_calls or any(isinstance(event, CallStart) for event in events)
        return join_events(events)

    def _split(self, part: ChoicePart) -> list[tuple[str, int]]:
        """Split the text of a part into those of its tokens, to count the reasoning. Returns (text, tokens) of each."""
        if self.is_plain or not self._is_in_reasoning or len(part.offsets) < 2:
            return [(part.text, len(part.tokens))]
        cuts = [offset - part.offsets[0] for offset in part.offsets[1:]]
        texts = [part.text[start:end] for start, end in pairwise([0, *cuts, len(part.text)])]
        return [(text, 1) for text in texts]

    def name_finish(self, reason: str | None) -> str | None:
        """Return the finish reason of the API: "tool_calls" for an answer that ends after calls."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason
