"""All formats of tool calls and of reasoning, and the choice among them by the text of a chat template."""

from typing import Protocol, TypeVar

from foredraft.errors import ForedraftError
from foredraft.server.messages.call_format import CallFormat, JsonCallFormat, NamedCallFormat
from foredraft.server.messages.call_syntax import CallSyntax
from foredraft.server.messages.harmony_format import HarmonyFormat
from foredraft.server.messages.reasoning_format import HarmonyReasoning, ReasoningFormat, ThinkFormat


class NamedFormat(Protocol):
    """Format with a name that an option takes."""

    @property
    def name(self) -> str: ...


Format = TypeVar("Format", bound=NamedFormat)
AUTO, NONE = "auto", "none"

HERMES = JsonCallFormat(
    "hermes",
    ("<tool_call>",),
    CallSyntax("<tool_call>", "</tool_call>"),
    tokens=("<tool_call>", "</tool_call>"),
    line_break="\n",
)
MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL_SYNTAX = CallSyntax("[TOOL_CALLS]", arguments_mark="[ARGS]", id_mark="[CALL_ID]")
MISTRAL_NAMED = NamedCallFormat("mistral-args", ("[ARGS]",), MISTRAL_SYNTAX, MISTRAL_TOKENS)
MISTRAL = JsonCallFormat("mistral", ("[TOOL_CALLS]",), MISTRAL_SYNTAX, MISTRAL_TOKENS, has_lists=True)
LLAMA3 = JsonCallFormat(
    "llama3",
    ("<|python_tag|>", "<|eom_id|>", "<|start_header_id|>"),
    CallSyntax("<|python_tag|>", separator=";", is_leading=True),
    ("<|python_tag|>",),
    arguments_key="parameters",
    takes_several=False,
)
JSON = JsonCallFormat("json", (), CallSyntax("```json", "```", is_leading=True), has_lists=True)

# In the order of the search. A template without any of the signs has JSON.
CALL_FORMATS: tuple[CallFormat, ...] = (HarmonyFormat(), MISTRAL_NAMED, MISTRAL, HERMES, LLAMA3, JSON)
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    HarmonyReasoning(),
    ThinkFormat("think", "<think>", "</think>"),
    ThinkFormat("mistral", "[THINK]", "[/THINK]"),
)


def find_call_format(name: str, template: str | None) -> CallFormat:
    """Find the format of tool calls.

    Args:
        name: name of the format; "auto" = by the template.
        template: source of the chat template; None = there is none.

    Raises:
        ForedraftError: there is no such format.
    """
    if name != AUTO:
        return _find_named(CALL_FORMATS, name, "tool-call parser", ())
    source = template or ""
    return next((one for one in CALL_FORMATS if any(sign in source for sign in one.template_signs)), JSON)


def find_reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Find the format of reasoning; None if answers have none. Arguments and errors as in `find_call_format`."""
    if name == NONE:
        return None
    if name != AUTO:
        return _find_named(REASONING_FORMATS, name, "reasoning parser", (NONE,))
    source = template or ""
    return next((one for one in REASONING_FORMATS if any(sign in source for sign in one.template_signs)), None)


def _find_named(formats: tuple[Format, ...], name: str, kind: str, others: tuple[str, ...]) -> Format:
    by_name = {one.name: one for one in formats}
    if name not in by_name:
        known = ", ".join([AUTO, *by_name, *others])
        raise ForedraftError(f"there is no {kind} {name!r}; use one of {known}")
    return by_name[name]
