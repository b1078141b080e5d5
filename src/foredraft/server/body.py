"""A request body as JSON, read so that no body can hurt: strict, of bounded depth, off the event loop where long."""

import asyncio
import json
import re
from collections import Counter
from concurrent.futures import Executor
from typing import Any, NoReturn

import numpy as np

from foredraft.server.errors import ApiError, shown

SHORT = 16 << 10  # bytes; parsed where we stand
MAX_DIGITS = 64
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPEN, _CLOSE = (np.frombuffer(pair, dtype=np.uint8) for pair in (b"[{", b"]}"))


async def parsed(body: bytes, depth: int, pool: Executor) -> dict[str, Any]:
    """The object in a body. Raises ApiError 400 with what is wrong."""
    if len(body) <= SHORT:
        return parse(body, depth)
    return await asyncio.get_running_loop().run_in_executor(pool, parse, body, depth)


def parse(body: bytes, depth: int) -> dict[str, Any]:
    """Strict JSON: an object, UTF-8, no key twice, no NaN, no lone surrogates, no NUL, no endless numbers."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    if depth_of(body) > depth:
        raise ApiError(400, f"the JSON body is nested deeper than {depth}")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_int=_int, parse_float=_float
        )
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ApiError(400, f"the JSON body is nested deeper than {depth}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    # an escape is the only way to a lone surrogate or a NUL: without one there is nothing to look for
    if b"\\u" in body:
        _check_text(value)
    return value


def depth_of(body: bytes) -> int:
    """How deep brackets nest outside strings; right for valid JSON, and some number for anything else."""
    marks = np.frombuffer(_STRINGS.sub(b"", body), dtype=np.uint8)
    steps = np.isin(marks, _OPEN).astype(np.int32) - np.isin(marks, _CLOSE).astype(np.int32)
    return int(np.cumsum(steps).max(initial=0))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ApiError(400, f"the JSON body holds the key {shown(twice)} twice", twice[:64])
    return found


def _no_constant(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; give a finite number")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ApiError(400, f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > 4 * MAX_DIGITS:
        raise ApiError(400, f"a number has more than {4 * MAX_DIGITS} digits")
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ApiError(400, "a number is too large")
    return value


def _check_text(value: Any) -> None:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, str) and ("\0" in item or _SURROGATE.search(item)):
            raise ApiError(400, "a string holds a NUL or half a surrogate pair")
