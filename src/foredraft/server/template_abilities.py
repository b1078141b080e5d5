"""Abilities of a chat template: which parts of a conversation with tools it writes, and in which form.

They are found by rendering a short conversation, because templates only fail, or leave out what they do not read.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.server.errors import ApiError
from foredraft.server.messages.tools import Tool

Rows = list[dict[str, Any]]
RenderRows = Callable[[Rows, Rows | None], str]  # (messages, tools) -> text

PROBE_TOOL = Tool("probe_tool", "probe", {"type": "object", "properties": {"probe_key": {"type": "string"}}})
PROBE_ID = "probe0001"  # templates of Mistral take ids of nine letters and digits
PROBE_RESULT = "probe_result"
PROBE_ARGUMENTS = {"probe_key": "probe_value"}


@dataclass(frozen=True)
class TemplateAbilities:
    """Parts of a conversation that a chat template writes."""

    shows_tools: bool = False
    shows_calls: bool = False  # tool_calls of the assistant
    shows_results: bool = False  # messages of the role tool
    has_text_arguments: bool = False  # arguments of a call are a string, not an object
    shows_developer: bool = False  # messages of the role developer
    shows_systems: bool = True  # several messages of the role system at the beginning


def probe_template(render: RenderRows) -> TemplateAbilities:
    """Find the abilities of a template. `render` raises ApiError for a conversation that the template refuses."""
    tools = [PROBE_TOOL.to_row()]
    shows_tools = PROBE_TOOL.name in _render(render, _build_rows(None, False), tools)
    object_text = _render(render, _build_rows(PROBE_ARGUMENTS, False), None)
    string_text = _render(render, _build_rows(json.dumps(PROBE_ARGUMENTS), False), None)
    # A template that joins strings fails for an object, or writes it in Python's syntax.
    has_object = PROBE_TOOL.name in object_text and "{'" not in object_text
    has_string = PROBE_TOOL.name in string_text
    arguments: Any = PROBE_ARGUMENTS if has_object else json.dumps(PROBE_ARGUMENTS)
    return TemplateAbilities(
        shows_tools=shows_tools,
        shows_calls=has_object or has_string,
        shows_results=PROBE_RESULT in _render(render, _build_rows(arguments, True), None),
        has_text_arguments=has_string and not has_object,
        shows_developer=PROBE_RESULT in _render(render, _build_system_rows("developer"), None),
        shows_systems=_render(render, _build_system_rows("system", "system"), None).count(PROBE_RESULT) == 2,
    )


def _build_rows(arguments: Any, has_result: bool) -> Rows:
    """Build a conversation with a user, and with a call and its result if there are arguments."""
    rows: Rows = [{"role": "user", "content": "probe"}]
    if arguments is None:
        return rows
    call = {"id": PROBE_ID, "type": "function", "function": {"name": PROBE_TOOL.name, "arguments": arguments}}
    rows.append({"role": "assistant", "content": None, "tool_calls": [call]})
    if has_result:
        rows.append({"role": "tool", "content": PROBE_RESULT, "tool_call_id": PROBE_ID, "name": PROBE_TOOL.name})
    return rows


def _build_system_rows(*roles: str) -> Rows:
    """Build a conversation that begins with messages of these roles."""
    return [*({"role": role, "content": PROBE_RESULT} for role in roles), {"role": "user", "content": "probe"}]


def _render(render: RenderRows, rows: Rows, tools: Rows | None) -> str:
    try:
        return render(rows, tools)
    except ApiError:
        return ""
