"""A request body as JSON, read so that no body can hurt: strict, of bounded depth, off the event loop where long."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

import numpy as np

from foredraft.server.errors import ApiError, shown

Value = TypeVar("Value")
SHORT = 8 << 10  # bytes; read where we stand
MAX_DIGITS, MAX_EXPONENT = 64, 3
MAX_KEYS = 4096  # of one object
MAX_VALUES = 200_000  # numbers, strings and so on of a body: more would hold the interpreter's lock for too long
# Of a body without escaped characters. A string that never ends takes the rest, or every quote in it would start a
# search of its own.
_STRINGS = re.compile(rb'"[^"]*+(?:"|\Z)')
# Every digit becomes 0 and everything that is no part of a number a blank: plain searches then find what a pattern
# takes 100 ms for on 2 MB without a number.
_NUMBERS = bytes.maketrans(bytes(range(256)), re.sub(rb"[^0e+]", b" ", re.sub(rb"\d", b"0", bytes(range(256)).lower())))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_LARGE_NUMBERS = (b"e" + b"0" * MAX_EXPONENT, b"e+" + b"0" * MAX_EXPONENT)
_SURROGATE = re.compile("[\ud800-\udfff]")
_STEPS = bytes.maketrans(b"[{]}", bytes([1, 1, 255, 255]))  # as int8: one level down, one up
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


async def read(body: bytes, pool: Executor, depth: int, check: Callable[[dict[str, Any]], Value]) -> Value:
    """What `check` makes of the object in a body; a long one is read on another thread. Raises ApiError."""

    def work() -> Value:
        return check(parse(body, depth))

    return work() if len(body) <= SHORT else await asyncio.get_running_loop().run_in_executor(pool, work)


def parse(body: bytes, depth: int) -> dict[str, Any]:
    """Strict JSON: an object, UTF-8, no key twice, no NaN, no lone surrogates, no NUL, no endless numbers."""
    if not body:
        raise ApiError(400, "the body is empty")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    # a pattern that steps over escaped characters takes 5 times as long, on a body made of them, as two searches
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    bare = _STRINGS.sub(b'"', plain) if plain.count(b'"') <= MAX_VALUES else None
    if bare is None or bare.count(b",") > MAX_VALUES:
        raise ApiError(400, f"the JSON body holds more than {MAX_VALUES} values")
    if depth_of(bare) > depth:
        raise ApiError(400, f"the JSON body is nested deeper than {depth}")
    numbers = bare.translate(_NUMBERS)
    if _LONG_NUMBER in numbers:
        raise ApiError(400, f"a number has more than {MAX_DIGITS} digits")
    read_float = _float if any(large in numbers for large in _LARGE_NUMBERS) else None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=read_float)
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


def depth_of(bare: bytes) -> int:
    """How deep brackets nest in JSON without its strings; some number for anything that is no JSON."""
    steps = np.frombuffer(bare.translate(_STEPS, _NO_BRACKETS), dtype=np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ApiError(400, f"an object of the JSON body has more than {MAX_KEYS} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ApiError(400, f"the JSON body holds the key {shown(twice)} twice", twice[:64])
    return found


def _no_constant(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; give a finite number")


def _float(digits: str) -> float:
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
