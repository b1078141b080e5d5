"""How much a parsed body may ask for: checked on plain JSON, before it is validated and long before it is tokenised."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from foredraft.server.errors import ApiError, shown
from foredraft.server.settings import Limits

Model = TypeVar("Model", bound=BaseModel)
_BRANCHES = frozenset({"str", "int", "float", "bool", "dict", "text", "texts", "ids", "lists", "parts"})
_Cap = tuple[int, Callable[[Any], int], str]  # the most, how it is counted, how that is said


def checked(model: type[Model], body: dict[str, Any], limits: Limits) -> Model:
    """The request in a body. Raises ApiError 400 that names the first field at fault."""
    cap(body, limits)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explained(error, model) from None


def cap(body: dict[str, Any], limits: Limits) -> None:
    """Raises ApiError 400 for the first field that holds too much."""
    for name, (most, measure, what) in _caps(limits).items():
        size = measure(body.get(name))
        if size > most:
            raise ApiError(400, f"{name} {what} at most {most}, got {_number(size)}", name)
    _check_prompt(body, limits)
    for name in ("response_format", "structured_outputs", "regex"):
        value = body.get(name)
        if value is not None and len(json.dumps(value, ensure_ascii=False).encode(errors="replace")) > limits.schema:
            raise ApiError(400, f"{name} is larger than {limits.schema} bytes", name)


def _caps(limits: Limits) -> dict[str, _Cap]:
    return {
        "n": (limits.n, _value, "may be"),
        "best_of": (limits.n, _value, "may be"),
        "logprobs": (limits.logprobs, _value, "may be"),
        "top_logprobs": (limits.logprobs, _value, "may be"),
        "prompt_logprobs": (limits.logprobs, _value, "may be"),
        "stop": (limits.stops, _entries, "may hold"),
        "logit_bias": (limits.bias, _entries, "may hold"),
        "bad_words": (limits.bias, _entries, "may hold"),
        "stop_token_ids": (limits.token_ids, _entries, "may hold"),
        "allowed_token_ids": (limits.token_ids, _entries, "may hold"),
        "messages": (limits.messages, _entries, "may hold"),
    }


def _value(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _number(size: int) -> str:
    return str(size) if size < 10**12 else "more"


def _check_prompt(body: dict[str, Any], limits: Limits) -> None:
    """Its kind too: the validator would complain of every entry of a long list, once for each kind there is."""
    for name in ("stop", "bad_words"):
        texts = body.get(name)
        texts = texts if isinstance(texts, list) else [texts]
        if any(isinstance(text, str) and len(text) > limits.stop_length for text in texts):
            raise ApiError(400, f"{name} holds a string of more than {limits.stop_length} characters", name)
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return
    if not prompt:
        raise ApiError(400, "prompt is an empty list", "prompt")
    kinds = {type(item) for item in prompt}
    if kinds not in ({str}, {int}, {list}):
        words = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        raise ApiError(400, words, "prompt")
    if kinds == {int}:
        return
    if len(prompt) > limits.prompts:
        raise ApiError(400, f"prompt may hold at most {limits.prompts}, got {len(prompt)}", "prompt")
    if kinds == {list} and any(type(token) is not int for ids in prompt for token in ids):
        raise ApiError(400, "prompt holds a list with something that is no token id", "prompt")
    if len(prompt) * _value(body.get("n", 1)) > limits.samples:
        raise ApiError(400, f"prompts times n may be at most {limits.samples}", "n")


def _explained(error: ValidationError, model: type[BaseModel]) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = [str(part) for part in first["loc"] if not _is_branch(part, model)]
    where = ".".join(place)[:128]
    param = place[0][:64] if place else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{shown(where)} is not a field this route takes; leave it out", param)
    if first["type"] == "missing":
        return ApiError(400, f"{shown(where)} is missing", param)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{shown(where)}: {message}" if where else message, param)


def _is_branch(part: object, model: type[BaseModel]) -> bool:
    """Pydantic names the member of a union it tried ("list[str]"), which is nothing the client wrote."""
    return isinstance(part, str) and ("[" in part or part in _BRANCHES)
