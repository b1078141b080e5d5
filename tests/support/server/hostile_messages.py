"""Wrong conversations and fields of /v1/messages and its count of tokens."""

from typing import Any

LONG = "x" * (1 << 20)
USER: dict[str, Any] = {"role": "user", "content": "a"}
USE: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "a", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c"}
TOOL: dict[str, Any] = {"name": "a", "input_schema": {"type": "object"}}


def hold(*blocks: Any, role: str = "user") -> list[Any]:
    """Build a conversation of one message with these blocks."""
    return [{"role": role, "content": list(blocks)}]


CALLED = hold(USE, role="assistant")
CONVERSATIONS: list[Any] = [
    "", [], None, 3, {}, [None], ["a"], [{}], [[]], [{"role": "tool", "content": "a"}], [{"role": "user"}],
    [{"role": ["user"], "content": "a"}], [{"role": "user", "content": 3}], [{"role": "user", "content": {}}],
    [USER | {"x": 1}], [USER | {"name": "a"}], hold("a"), hold(None), hold([]), hold({}), hold({"type": ["text"]}),
    hold({"type": "text"}), hold({"type": "text", "text": 3}), hold({"type": "text", "text": "a", "x": 1}),
    hold({"type": "text", "text": "a", "cache_control": {"type": "forever"}}),
    hold({"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}}),
    hold({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}), hold({"type": "document"}),
    hold({"type": "x" * 10_000}), hold({"type": "server_tool_use"}), hold({"type": "redacted_thinking"}), hold(USE),
    hold({"type": "thinking", "thinking": "a"}), hold({"type": "tool_result", "tool_use_id": "none"}),
    hold({"type": "tool_result", "tool_use_id": ""}), hold({"type": "tool_result"}),
    [*CALLED, *hold(RESULT | {"content": [{"type": "image"}]})], [*CALLED, *hold(RESULT | {"is_error": "yes"})],
    hold(USE | {"input": "a"}, role="assistant"), hold(USE | {"input": [1]}, role="assistant"),
    hold(USE | {"id": "x" * 257}, role="assistant"), hold(USE | {"name": "a b"}, role="assistant"), CALLED,
    hold(USE, role="system"), hold(*[USE] * 129, role="assistant"), hold(*[{"type": "text", "text": "a"}] * 1025),
    [USER] * 1025,
]  # fmt: skip
# Fields that the prompt is made of, which both routes have.
PROMPT_FIELDS: list[tuple[str, Any]] = [
    ("system", 3), ("system", {}), ("system", [{"type": "image"}]), ("system", [USER]), ("tools", {}),
    ("tools", [None]), ("tools", [{"name": "a"}]), ("tools", [TOOL | {"name": ""}]), ("tools", [TOOL, TOOL]),
    ("tools", [TOOL | {"name": "x" * 129}]), ("tools", [TOOL | {"input_schema": {"type": "array"}}]),
    ("tools", [TOOL | {"input_schema": "a"}]), ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("tools", [{"type": "function", "function": {"name": "a"}}]), ("tools", [TOOL | {"strict": "yes"}]),
    ("tools", [TOOL | {"defer_loading": True}]), ("tools", [TOOL | {"name": f"a{i}"} for i in range(129)]),
    ("tools", [TOOL | {"description": LONG}]), ("tool_choice", "any"), ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "required"}), ("tool_choice", {"type": "tool"}), ("tool_choice", 3),
    ("tool_choice", {"type": "auto", "disable_parallel_tool_use": 1}), ("thinking", True), ("thinking", {}),
    ("thinking", {"type": "enabled"}), ("thinking", {"type": "enabled", "budget_tokens": 0}),
    ("thinking", {"type": "enabled", "budget_tokens": 1024}), ("thinking", {"type": "on"}),
    ("thinking", {"type": "disabled", "budget_tokens": 5}), ("output_config", {"effort": "low"}),
    ("output_config", {"format": {"type": "json_schema"}}), ("output_config", {"x": 1}), ("mcp_servers", [{}]),
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}), ("container", "a"),
    ("service_tier", "priority"), ("chat_template_kwargs", {"x": 1}), ("cache_control", "ephemeral"),
]  # fmt: skip
SAMPLING_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "a"), ("max_tokens", None), ("max_tokens", 10**30),
    ("stop_sequences", "a"), ("stop_sequences", ["a"] * 5), ("stop_sequences", [""]), ("stop_sequences", [3]),
    ("stop_sequences", [LONG]), ("stop", "a"), ("n", 2), ("metadata", {"user_id": 3}), ("metadata", {"x": "a"}),
    ("metadata", {"user_id": "x" * 4097}), ("stream", "true"), ("temperature", -1), ("temperature", "a"),
    ("top_p", 0), ("top_k", "a"), ("verify", "nothing"), ("response_format", {}), ("max_completion_tokens", 2),
    ("output_config", {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}),
    ("output_config", {"format": {"type": "json_schema", "schema": {"x": LONG}}}),
]  # fmt: skip
