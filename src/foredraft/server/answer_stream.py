"""Answers of one generation: deltas of the engine as parts with parsed events, independent of the route's format."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from foredraft.server.chat_preparation import PreparedChat
from foredraft.server.choice_stream import ChoicePart, ChoiceStream, count_usage
from foredraft.server.generation import Generation
from foredraft.server.message_stream import MessageStream
from foredraft.server.messages.events import MessageEvent
from foredraft.server.schemas import ChatRequest
from foredraft.server.service import Service


@dataclass(frozen=True)
class AnswerPiece:
    """One delta of an answer."""

    index: int  # number of the answer
    part: ChoicePart  # text as generated, tokens, log-probabilities, end
    events: list[MessageEvent]  # reasoning, content and calls that are certain with it


class AnswerStream:
    """Reader of the answers of a chat request, or of a request of another route in its form.

    Args:
        service: state of the routes of one model.
        request: the request.
        generation: its generation; `request.n` answers.
        prepared: result of `prepare_chat`.
    """

    def __init__(self, service: Service, request: ChatRequest, generation: Generation, prepared: PreparedChat) -> None:
        self._generation, self._num_samples = generation, request.n
        field = prepared.submission.grammar_field
        self.choices = [
            ChoiceStream.for_transcript(request, transcript, i, field)
            for i, transcript in enumerate(generation.transcripts)
        ]
        self._messages = [MessageStream(prepared.make_parser(service)) for _ in self.choices]

    @property
    def is_plain(self) -> bool:
        """Whether all text is content, so that every part is one event."""
        return self._messages[0].is_plain

    async def read(self) -> AsyncIterator[AnswerPiece]:
        """Yield the pieces of all answers as they are generated.

        Raises:
            ApiError: the engine's thread has ended, or a request ended with an error.
        """
        async for delta in self._generation.read_deltas():
            part = self.choices[delta.index].take_delta(delta)
            yield AnswerPiece(delta.index, part, self._messages[delta.index].take_part(part))

    def name_finish(self, index: int, reason: str | None) -> str | None:
        """Return the finish reason of an answer; "tool_calls" if it ends after calls."""
        return self._messages[index].name_finish(reason)

    def count_reasoning_tokens(self, index: int) -> int:
        """Count the tokens of an answer up to the end of its reasoning, without the mark that ends it."""
        return self._messages[index].num_reasoning_tokens

    def count_usage(self) -> dict[str, Any]:
        """Count the tokens so far, as `usage` of a chat completion."""
        return count_usage(self.choices, self._num_samples)
