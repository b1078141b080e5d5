"""Body of a response in each of its states."""

import time
from dataclasses import dataclass
from typing import Any

from foredraft.sampling.params import Sampling
from foredraft.server.errors import ApiError
from foredraft.server.responses import ResponseHead
from foredraft.server.responses_api.schema import ResponseRequest

MAX_OUTPUT_TOKENS = "max_output_tokens"


@dataclass(frozen=True)
class ResponseBody:
    """Fields of a response that do not change.

    Args:
        head: id, time and model.
        request: the request, whose fields the response repeats.
        sampling: settings that were used.
        is_stored: the response is stored when it is complete.
    """

    head: ResponseHead
    request: ResponseRequest
    sampling: Sampling
    is_stored: bool

    def build(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Build the body.

        Args:
            status: in_progress, completed, incomplete or failed.
            output: items.
            usage: tokens. Default None = not counted yet.
        """
        request = self.request
        details = {"reason": MAX_OUTPUT_TOKENS} if status == "incomplete" else None
        ended = {"completed_at": int(time.time())} if status == "completed" else {}
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            **ended,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.head.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": self.is_stored and status != "failed",
            "temperature": self.sampling.temperature,
            "text": {"format": self._build_format()},
            "tool_choice": self._build_choice(),
            "tools": [self._build_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
        } | self.head.notes

    def build_failed(self, output: list[dict[str, Any]], error: ApiError) -> dict[str, Any]:
        """Build the body of a response that an error ended."""
        code = "invalid_prompt" if error.status == 400 else "server_error"
        return self.build("failed", output) | {"error": {"code": code, "message": error.message}}

    def _build_format(self) -> dict[str, Any]:
        text = self.request.text
        form = None if text is None else text.format
        return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)

    def _build_choice(self) -> Any:
        choice = self.request.tool_choice
        return "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump()

    @staticmethod
    def _build_tool(tool: Any) -> dict[str, Any]:
        fields = tool.model_dump(include={"name", "description", "parameters"})
        return {"type": "function", **fields, "strict": bool(tool.strict)}


def build_usage(chat_usage: dict[str, Any], num_reasoning_tokens: int, num_written: int) -> dict[str, Any]:
    """Build `usage` from that of a chat completion.

    Args:
        chat_usage: tokens as a chat completion reports them.
        num_reasoning_tokens: tokens of the reasoning.
        num_written: tokens of the input that were written to the prefix cache.
    """
    predicted = chat_usage.get("completion_tokens_details", {})
    return {
        "input_tokens": chat_usage["prompt_tokens"],
        "input_tokens_details": chat_usage["prompt_tokens_details"] | {"cache_write_tokens": num_written},
        "output_tokens": chat_usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens} | predicted,
        "total_tokens": chat_usage["total_tokens"],
    }
