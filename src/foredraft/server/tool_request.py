"""Conversation, tools and template variables of a chat request."""

from collections.abc import Sequence
from typing import Any

from foredraft.server.errors import ApiError, quote_name
from foredraft.server.messages.tools import NO_TOOLS, Tool, ToolUse
from foredraft.server.schemas import ChatMessage, ChatRequest, NamedToolChoice, ToolDefinition
from foredraft.server.templates import ChatTemplate

EFFORT, THINKING = "reasoning_effort", "enable_thinking"  # variables of chat templates


def read_tool_use(request: ChatRequest) -> ToolUse:
    """Read which tools the answer may or must call.

    Raises:
        ApiError: the tools or the choice are invalid.
    """
    choice, definitions = request.tool_choice, request.tools or []
    if not definitions:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice goes with tools; leave it out", "tool_choice")
        return NO_TOOLS
    tools = read_tools(definitions)
    is_parallel = request.parallel_tool_calls is not False
    if choice == "none":
        return NO_TOOLS
    if choice is None or isinstance(choice, str):
        return ToolUse(tools, choice == "required", is_parallel)
    if isinstance(choice, NamedToolChoice):
        return ToolUse(_choose_tools(tools, (choice.function.name,)), True, is_parallel=False, offered=tools)
    subset = choice.allowed_tools
    return ToolUse(_choose_tools(tools, subset.names), subset.mode == "required", is_parallel, offered=tools)


def _choose_tools(tools: Sequence[Tool], names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools of these names, in the order in which they are offered. Raises ApiError for an unknown one."""
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise ApiError(400, f"tool_choice: there is no tool {quote_name(name)}", "tool_choice")
    return tuple(tool for tool in tools if tool.name in names)


def read_tools(definitions: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    """Read tools. Raises ApiError for two of one name, and for parameters that are no schema of an object."""
    tools: dict[str, Tool] = {}
    for definition in definitions:
        function = definition.function
        if function.name in tools:
            raise ApiError(400, f"tools: two tools are called {quote_name(function.name)}", "tools")
        if (function.parameters or {}).get("type", "object") != "object":
            raise ApiError(400, f"tools: the parameters of {quote_name(function.name)} must be an object", "tools")
        tools[function.name] = Tool(
            function.name, function.description, function.parameters, is_strict=bool(function.strict)
        )
    return tuple(tools.values())


def read_variables(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Read the variables of the chat template that a request sets.

    Raises:
        ApiError: the template does not read one of them.
    """
    variables = check_variables(request.chat_template_kwargs, template)
    effort = request.reasoning_effort
    if effort is None:
        return variables
    if EFFORT in template.variables:
        return {EFFORT: effort} | variables
    if effort != "none":
        raise ApiError(400, "the chat template does not read reasoning_effort; leave it out", EFFORT)
    return ({THINKING: False} if THINKING in template.variables else {}) | variables


def check_variables(variables: dict[str, Any] | None, template: ChatTemplate) -> dict[str, Any]:
    """Return chat_template_kwargs. Raises ApiError if the template does not read one of them."""
    for name in variables or {}:
        if name not in template.variables:
            known = ", ".join(sorted(template.variables)[:16]) or "none"
            message = f"chat_template_kwargs: the chat template does not read {quote_name(name)}; it reads {known}"
            raise ApiError(400, message, "chat_template_kwargs")
    return dict(variables or {})


def check_results(messages: Sequence[ChatMessage]) -> None:
    """Raise ApiError for a message of the role tool without an earlier call of its id."""
    ids: set[str] = set()
    for message in messages:
        ids |= {call.id for call in message.tool_calls or ()}
        if message.tool_call_id is not None and message.tool_call_id not in ids:
            raise ApiError(
                400, f"messages: no message before it has the tool call {quote_name(message.tool_call_id)}", "messages"
            )
