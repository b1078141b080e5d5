"""Conversion of chat messages to token ids with the model's chat template, rendered in a sandbox.

Text of a message that spells a control token is escaped before rendering and tokenized as ordinary text, so that only
the template can write control tokens. Requests cannot bring their own template.
"""

import datetime
import itertools
import json
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foredraft.chat import PLAIN_TEMPLATE
from foredraft.errors import ForedraftError
from foredraft.models.processor_template import adapt_given
from foredraft.placed_images import PlacedImages
from foredraft.server.errors import ApiError
from foredraft.server.schemas import ChatMessage
from foredraft.server.settings import ServerSettings
from foredraft.server.special_token_escape import SpecialTokenEscaper
from foredraft.server.template_abilities import TemplateAbilities, probe_template
from foredraft.server.template_rows import ChatInput, TemplateRows, build_rows
from foredraft.server.vocabulary import ServerVocabulary

log = logging.getLogger(__name__)
MAX_REPEATED = 1 << 20  # largest result of `*` in a template, in characters, entries or value; also base ** 2 of `**`
MAX_POWER = 64  # largest exponent of `**` in a template
MAX_END_CHARS = 64  # characters of a prompt's end that show whether it opens the reasoning
# Variables that requests cannot set by chat_template_kwargs.
RESERVED_VARIABLES = frozenset(
    "messages tools documents add_generation_prompt bos_token eos_token pad_token unk_token".split()
)
MAX_MASKED_CHARS = 16  # characters that stand in for a masked message


class ChatTemplate:
    """Chat template of one model, compiled once.

    Args:
        vocabulary: tokens of the model.
        settings: may replace the tokenizer's template.
        has_encoder: the conversation is the input of an encoder.

    Raises:
        ForedraftError: the template does not compile.
    """

    def __init__(self, vocabulary: ServerVocabulary, settings: ServerSettings, has_encoder: bool = False) -> None:
        self.vocabulary, self.limits, self.has_encoder = vocabulary, settings.limits, has_encoder
        tokenizer_template = _read_tokenizer_template(vocabulary.tokenizer)
        source = settings.chat_template if settings.chat_template is not None else tokenizer_template
        if settings.chat_template is not None:
            source = adapt_given(vocabulary.tokenizer, settings.chat_template)
        self.is_plain = source is None and settings.has_plain_template
        if self.is_plain:
            source = PLAIN_TEMPLATE
            log.warning("the model has no chat template; messages are written as 'role: content' lines")
        self.source = source
        self._template = None if source is None else compile_template(source)
        self._special_tokens = {} if vocabulary.tokenizer is None else dict(vocabulary.tokenizer.special_tokens_map)
        self.variables = frozenset[str]() if source is None else find_variables(source)
        self.variables -= RESERVED_VARIABLES | self._special_tokens.keys()
        self.abilities = self._probe()

    def encode(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> list[int]:
        """Render and tokenize a conversation without tools. Arguments and errors as in `encode_chat`."""
        chat = ChatInput(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        return self.encode_chat(chat).ids

    def encode_chat(self, chat: ChatInput) -> "EncodedChat":
        """Render and tokenize a conversation.

        Raises:
            ApiError: there is no template, it does not read a variable, or the messages cannot be rendered.
        """
        tokenizer = self.vocabulary.require_tokenizer()
        if self._template is None:
            raise ApiError(
                400, "the model has no chat template: start the server with --chat-template FILE, or use completions",
                "messages",
            )  # fmt: skip
        if chat.continue_final_message and chat.add_generation_prompt:
            message = "continue_final_message goes with add_generation_prompt = false"
            raise ApiError(400, message, "continue_final_message")
        escaper = SpecialTokenEscaper(self.vocabulary.special_ids)
        rows = build_rows(chat, self.abilities).map_text(escaper.escape, escaper.escape)
        mark = f"\ue002{secrets.randbits(64):020d}\ue003"  # marks the end of the last message in the rendered text
        text = self._render_to(rows, chat, mark)
        self._check_control_tokens(text, rows, chat)
        ids = self._add_outer_tokens(escaper.encode(text, tokenizer))
        return EncodedChat(ids, text[-MAX_END_CHARS:])

    def _render_to(self, rows: TemplateRows, chat: ChatInput, mark: str) -> str:
        """Render a conversation up to its end, or up to the mark behind its last message."""
        if not chat.continue_final_message:
            return self._render(rows, chat.add_generation_prompt)
        rows.extend_last(mark)
        text, separator, _ = self._render(rows, chat.add_generation_prompt).partition(mark)
        if not separator:
            raise ApiError(400, "the chat template does not show the last message", "continue_final_message")
        return text

    def _check_control_tokens(self, text: str, rows: TemplateRows, chat: ChatInput) -> None:
        """Raise ApiError if text of the client and the template (or a filter of it) together spell a control token.

        The conversation is rendered again with masked texts, and its control tokens are counted.
        """
        keys = (f"x{i}" for i in itertools.count())
        masked_rows = rows.map_text(
            self._mask_text, lambda key: key if key.isidentifier() or not self._has_boundary(key) else next(keys)
        )
        if masked_rows == rows:
            return
        masked_text = self._render_to(masked_rows, chat, "\ue002" + "0" * 20 + "\ue003")
        for token in self.vocabulary.special_ids:
            if text.count(token) > masked_text.count(token):
                raise ApiError(400, "a message and the chat template together spell a control token", "messages")

    def _mask_text(self, text: str) -> str:
        """Replace a text that could be part of a control token by letters x."""
        return "x" * min(len(text), MAX_MASKED_CHARS) if self._has_boundary(text) else text

    def _has_boundary(self, text: str) -> bool:
        return any(text.find(char) >= 0 for char in self._boundary_chars)

    @cached_property
    def _boundary_chars(self) -> frozenset[str]:
        """First and last characters of all control tokens. A text without them cannot complete a control token."""
        return frozenset(token[0] for token in self.vocabulary.special_ids) | frozenset(
            token[-1] for token in self.vocabulary.special_ids
        )

    def _render(self, rows: TemplateRows, add_generation_prompt: bool) -> str:
        assert self._template is not None
        values = {
            **self._special_tokens,
            **rows.variables,
            "messages": rows.messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": rows.tools,
            "documents": None,
        }
        return render_template(self._template, values, self.limits.template_timeout, self.limits.max_template_chars)

    def _probe(self) -> TemplateAbilities:
        if self._template is None:
            return TemplateAbilities()
        return probe_template(lambda rows, tools: self._render(TemplateRows(rows, tools, {}), True))

    def _add_outer_tokens(self, ids: list[int]) -> list[int]:
        """Add control tokens of the tokenizer that a template does not write.

        The plain template lacks the beginning of text, and every template lacks the end token of an encoder's input.
        """
        before, after = self.vocabulary.outer_tokens
        needs_end = self.has_encoder and ids[len(ids) - len(after) :] != after
        return (before if self.is_plain else []) + ids + (after if needs_end else [])


@dataclass(frozen=True)
class EncodedChat:
    """Prompt of a conversation."""

    ids: list[int]
    end: str  # last characters of the rendered text
    images: PlacedImages | None = None  # images in the place of placeholders; `ids` has them then


def compile_template(source: str) -> jinja2.Template:
    """Compile a template as transformers does, in a sandbox. Raises ForedraftError."""
    try:
        return _make_environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ForedraftError(f"the chat template does not compile: {error}") from None


def find_variables(source: str) -> frozenset[str]:
    """Find the names of the variables that a template reads."""
    return frozenset(jinja2.meta.find_undeclared_variables(_make_environment().parse(source)))


def _make_environment() -> "_TemplateSandbox":
    environment = _TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _dump_json
    environment.globals["raise_exception"] = _raise_refusal
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def render_template(template: jinja2.Template, values: dict[str, Any], timeout: float, max_chars: int) -> str:
    """Render a template.

    Args:
        template: compiled template.
        values: variables of the template.
        timeout: seconds it may take.
        max_chars: characters the text may have.

    Raises:
        ApiError: 400, for an exceeded limit or any error in the template.
    """
    parts: list[str] = []
    size, deadline = 0, _RenderDeadline(timeout)
    try:
        with deadline:
            for part in template.generate(values):
                parts.append(part)
                size += len(part)
                if size > max_chars:
                    raise _RenderLimitError(f"the rendered chat is longer than {max_chars} characters")
    except (_RenderLimitError, jinja2.TemplateError, _TemplateRefusalError) as error:
        raise ApiError(400, f"the chat template refuses these messages: {error}", "messages") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError, MemoryError):
        raise ApiError(400, "the chat template fails on these messages", "messages") from None
    return "".join(parts)


class _RenderLimitError(Exception):
    """Rendering exceeds a limit of time or size."""


class _TemplateRefusalError(Exception):
    """Error that a template raises with raise_exception."""


class _RenderDeadline:
    """Context manager that stops a looping template by checking the time at every executed line of this thread."""

    def __init__(self, seconds: float) -> None:
        self._end_time = time.monotonic() + seconds

    def __enter__(self) -> None:
        self._old_trace = sys.gettrace()
        sys.settrace(self._check_time)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old_trace)

    def _check_time(self, frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > self._end_time:
            raise _RenderLimitError("rendering takes too long")
        return self._check_time


class _TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja sandbox that also bounds the size of products and powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
        if operator == "**" or all(isinstance(size, int) for size in sizes):
            size = abs(sizes[0]) ** 2 if operator == "**" else abs(sizes[0] * sizes[1])
            if size > MAX_REPEATED or (operator == "**" and abs(sizes[1]) > MAX_POWER):
                raise _RenderLimitError("a product is too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Tag `{% generation %}`, which marks assistant text for training. Here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja extensions

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _dump_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """Serialize as transformers does: jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _raise_refusal(message: str) -> None:
    raise _TemplateRefusalError(message)


def _read_tokenizer_template(tokenizer: Any | None) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template
