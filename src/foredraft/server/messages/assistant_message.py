"""Record of a whole answer: reasoning, content and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from foredraft.server.messages.events import ArgumentsPiece, CallStart, ContentPiece, MessageEvent, ReasoningPiece


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: str = ""  # JSON as the model wrote it; incomplete if the output was cut


@dataclass
class AssistantMessage:
    """Answer of the model. `add` is its only writer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[MessageEvent]) -> None:
        """Append events."""
        for event in events:
            if isinstance(event, ReasoningPiece):
                self.reasoning += event.text
            elif isinstance(event, ContentPiece):
                self.content += event.text
            elif isinstance(event, CallStart):
                self.tool_calls.append(ToolCall(event.id, event.name))
            elif isinstance(event, ArgumentsPiece):
                call = self.tool_calls[event.index]
                self.tool_calls[event.index] = replace(call, arguments=call.arguments + event.text)
