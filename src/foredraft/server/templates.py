"""Chat messages to token ids: the model's own template in a sandbox, and text that stays text.

Whatever a message spells like a control token is taken out before rendering and put back as ordinary text, so that only
the template itself can write control tokens. No template comes from a request.
"""

import datetime
import json
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foredraft.chat import PLAIN_TEMPLATE
from foredraft.errors import ForedraftError
from foredraft.server.errors import ApiError
from foredraft.server.hiding import Hidden
from foredraft.server.protocol import Message
from foredraft.server.settings import Settings
from foredraft.server.vocabulary import Vocabulary

log = logging.getLogger(__name__)
MOST_REPEATED = 1 << 20  # characters or entries that `*` may make


class Templates:
    """One model's template, compiled once. `is_source`: an encoder reads the conversation.

    Raises ForedraftError for a template that does not compile.
    """

    def __init__(self, vocabulary: Vocabulary, settings: Settings, is_source: bool = False) -> None:
        self.vocabulary, self.limits, self.is_source = vocabulary, settings.limits, is_source
        own = _own_template(vocabulary.tokenizer)
        source = settings.chat_template if settings.chat_template is not None else own
        self.is_plain = source is None and settings.has_plain_template
        if self.is_plain:
            source = PLAIN_TEMPLATE
            log.warning("the model has no chat template; messages are written as 'role: content' lines")
        self.source = source
        self._template = None if source is None else compiled(source)
        self._named = {} if vocabulary.tokenizer is None else dict(vocabulary.tokenizer.special_tokens_map)

    def encode(self, messages: Sequence[Message], has_prompt: bool = True, goes_on: bool = False) -> list[int]:
        """Token ids of a conversation. `has_prompt`: the assistant's turn begins at the end; `goes_on`: the last
        message is not closed. Raises ApiError."""
        tokenizer = self.vocabulary.need()
        if self._template is None:
            raise ApiError(
                400, "the model has no chat template: start the server with --chat-template FILE, or use completions",
                "messages",
            )  # fmt: skip
        if goes_on and has_prompt:
            words = "continue_final_message goes with add_generation_prompt = false"
            raise ApiError(400, words, "continue_final_message")
        hidden = Hidden(tuple(self.vocabulary.special))
        rows = [self._row(message, hidden) for message in messages]
        mark = ""
        if goes_on:
            mark = f"\ue002{secrets.randbits(64):020d}\ue003"
            rows[-1]["content"] += mark
        text = self._rendered(rows, has_prompt)
        if goes_on:
            text, found, _ = text.partition(mark)
            if not found:
                raise ApiError(400, "the chat template does not show the last message", "continue_final_message")
        self._check_own(text, rows, has_prompt, goes_on)
        ids = hidden.encode(text, tokenizer, self.vocabulary)
        return self._whole(ids)

    def _row(self, message: Message, hidden: Hidden) -> dict[str, Any]:
        row = {"role": message.role, "content": hidden.hide(message.text)}
        return row if message.name is None else row | {"name": hidden.hide(message.name)}

    def _check_own(self, text: str, rows: list[dict[str, Any]], has_prompt: bool, goes_on: bool) -> None:
        """No control token may come about where a message meets the template or a filter of it."""
        harmless = [{name: self._harmless(name, value) for name, value in row.items()} for row in rows]
        if harmless == rows:
            return
        mark = "\ue002" + "0" * 20 + "\ue003"
        if goes_on:
            harmless[-1]["content"] += mark
        bare = self._rendered(harmless, has_prompt)
        bare = bare.partition(mark)[0] if goes_on else bare
        for token in self.vocabulary.special:
            if text.count(token) > bare.count(token):
                raise ApiError(400, "a message and the chat template together spell a control token", "messages")

    def _harmless(self, name: str, value: str) -> str:
        """In place of a message that could be half of a control token."""
        if name == "role" or not any(value.find(part) >= 0 for part in self._halves()):
            return value
        return "x" * min(len(value), 16)

    def _halves(self) -> frozenset[str]:
        """A letter of every control token: a message without any of them cannot complete one."""
        return frozenset(token[0] for token in self.vocabulary.special) | frozenset(
            token[-1] for token in self.vocabulary.special
        )

    def _rendered(self, rows: list[dict[str, Any]], has_prompt: bool) -> str:
        assert self._template is not None
        values = {
            **self._named, "messages": rows, "add_generation_prompt": has_prompt, "tools": None, "documents": None
        }  # fmt: skip
        return rendered(self._template, values, self.limits.template_seconds, self.limits.template_chars)

    def _whole(self, ids: list[int]) -> list[int]:
        """The plain template knows no beginning of text, and none knows the end that an encoder sees; the tokenizer
        does."""
        before, after = self.vocabulary.around
        is_open = self.is_source and ids[len(ids) - len(after) :] != after
        return (before if self.is_plain else []) + ids + (after if is_open else [])


def compiled(source: str) -> jinja2.Template:
    """As transformers compile them, in a sandbox. Raises ForedraftError."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ForedraftError(f"the chat template does not compile: {error}") from None


def rendered(template: jinja2.Template, values: dict[str, Any], seconds: float, most: int) -> str:
    """The text, within a time and a size. Raises ApiError 400: whatever fails, these messages cannot be rendered."""
    parts: list[str] = []
    size, watch = 0, _Deadline(seconds)
    try:
        with watch:
            for part in template.generate(values):
                parts.append(part)
                size += len(part)
                if size > most:
                    raise _TooMuchError(f"the rendered chat is longer than {most} characters")
    except (_TooMuchError, jinja2.TemplateError, _RefusedError) as error:
        raise ApiError(400, f"the chat template refuses these messages: {error}", "messages") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError, MemoryError):
        raise ApiError(400, "the chat template fails on these messages", "messages") from None
    return "".join(parts)


class _TooMuchError(Exception):
    """Rendering takes too long or too much."""


class _RefusedError(Exception):
    """A template's own raise_exception."""


class _Deadline:
    """Ends a template that loops: looks at the clock at every line this thread runs."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __enter__(self) -> None:
        self._old = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)

    def _trace(self, frame: FrameType, what: str, argument: object) -> Any:
        if time.monotonic() > self._end:
            raise _TooMuchError("rendering takes too long")
        return self._trace


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute that begins with an underscore, no change of what is given, no product of any size."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
        if operator == "**" or all(isinstance(size, int) for size in sizes):
            size = abs(sizes[0]) ** 2 if operator == "**" else abs(sizes[0] * sizes[1])
            if size > MOST_REPEATED or (operator == "**" and abs(sizes[1]) > 64):
                raise _TooMuchError("a product is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own way

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """As transformers: no escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _raise(message: str) -> None:
    raise _RefusedError(message)


def _own_template(tokenizer: Any | None) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    return own.get("default") if isinstance(own, dict) else own
