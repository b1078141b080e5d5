"""Limits on the fields of a parsed body, checked on plain JSON before validation and tokenization."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from foredraft.server.errors import MAX_NAME, ApiError, quote_name
from foredraft.server.settings import RequestLimits

Model = TypeVar("Model", bound=BaseModel)
MAX_FIELD_PATH = 128  # characters of a dotted field path in an error message
_BRANCHES = frozenset(
    "str int float bool dict text texts ids lists parts word named allowed other items message function_call"
    " function_call_output reasoning_item text_part image_part".split()
)  # of unions
_FieldLimit = tuple[int, Callable[[Any], int], str]  # maximum, function that measures a value, words of the message


def validate_body(model: type[Model], body: dict[str, Any], limits: RequestLimits) -> Model:
    """Validate a parsed body. Raises ApiError 400 that names the first field at fault."""
    check_limits(body, limits)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain_error(error, model) from None


def check_limits(body: dict[str, Any], limits: RequestLimits) -> None:
    """Raise ApiError 400 for the first field that exceeds its limit."""
    for name, (limit, measure, verb) in _build_field_limits(limits).items():
        size = measure(body.get(name))
        if size > limit:
            raise ApiError(400, f"{name} {verb} at most {limit}, got {_format_size(size)}", name)
    _check_prompt(body, limits)
    for name, max_bytes in _list_sizes(limits).items():
        value = body.get(name)
        if value is not None and len(json.dumps(value, ensure_ascii=False).encode(errors="replace")) > max_bytes:
            raise ApiError(400, f"{name} is larger than {max_bytes} bytes", name)


def _list_sizes(limits: RequestLimits) -> dict[str, int]:
    """List the fields whose JSON is bounded, with its bytes."""
    names = ("response_format", "structured_outputs", "regex", "text", "output_config")
    grammars = dict.fromkeys(names, limits.max_schema_bytes)
    return grammars | dict.fromkeys(("tools", "chat_template_kwargs"), limits.max_tools_bytes)


def _build_field_limits(limits: RequestLimits) -> dict[str, _FieldLimit]:
    return {
        "n": (limits.max_n, _read_int, "may be"),
        "best_of": (limits.max_n, _read_int, "may be"),
        "logprobs": (limits.max_logprobs, _read_int, "may be"),
        "top_logprobs": (limits.max_logprobs, _read_int, "may be"),
        "prompt_logprobs": (limits.max_logprobs, _read_int, "may be"),
        "stop": (limits.max_stops, _count_entries, "may hold"),
        "stop_sequences": (limits.max_stops, _count_entries, "may hold"),
        "logit_bias": (limits.max_logit_bias, _count_entries, "may hold"),
        "bad_words": (limits.max_logit_bias, _count_entries, "may hold"),
        "stop_token_ids": (limits.max_token_ids, _count_entries, "may hold"),
        "allowed_token_ids": (limits.max_token_ids, _count_entries, "may hold"),
        "messages": (limits.max_messages, _count_entries, "may hold"),
        "input": (limits.max_messages, _count_entries, "may hold"),
        "tools": (limits.max_tools, _count_entries, "may hold"),
    }


def _read_int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _count_entries(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _format_size(size: int) -> str:
    return str(size) if size < 10**12 else "more"


def _check_prompt(body: dict[str, Any], limits: RequestLimits) -> None:
    """Check the types and sizes of `prompt`, `stop` and `bad_words`.

    The type of a prompt is checked here because the validator would report every entry of a long list for every type.
    """
    for name in ("stop", "stop_sequences", "bad_words"):
        texts = body.get(name)
        texts = texts if isinstance(texts, list) else [texts]
        if any(isinstance(text, str) and len(text) > limits.max_stop_chars for text in texts):
            raise ApiError(400, f"{name} holds a string of more than {limits.max_stop_chars} characters", name)
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return
    if not prompt:
        raise ApiError(400, "prompt is an empty list", "prompt")
    kinds = {type(item) for item in prompt}
    if kinds not in ({str}, {int}, {list}):
        message = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        raise ApiError(400, message, "prompt")
    if kinds == {int}:
        return
    if len(prompt) > limits.max_prompts:
        raise ApiError(400, f"prompt may hold at most {limits.max_prompts}, got {len(prompt)}", "prompt")
    if kinds == {list} and any(type(token) is not int for ids in prompt for token in ids):
        raise ApiError(400, "prompt holds a list with an entry that is not a token id", "prompt")
    if len(prompt) * _read_int(body.get("n", 1)) > limits.max_samples:
        raise ApiError(400, f"prompts times n may be at most {limits.max_samples}", "n")


def _explain_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Convert pydantic's first error to one sentence."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for i, part in enumerate(first["loc"]) if not _is_branch(part) or _is_field(i, part, model)]
    dotted_path = ".".join(path)[:MAX_FIELD_PATH]
    param = path[0][:MAX_NAME] if path else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{quote_name(dotted_path)} is not a field of this route; leave it out", param)
    if first["type"] == "missing":
        return ApiError(400, f"{quote_name(dotted_path)} is missing", param)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{quote_name(dotted_path)}: {message}" if dotted_path else message, param)


def _is_branch(part: object) -> bool:
    """Return True for a part of an error location that is a union member, such as "list[str]"."""
    return isinstance(part, str) and ("[" in part or part in _BRANCHES)


def _is_field(place: int, part: object, model: type[BaseModel]) -> bool:
    """Return True for the first part of an error location if it is a field of the body."""
    return place == 0 and part in model.model_fields
