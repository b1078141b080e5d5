"""Strict JSON parser for request bodies: limited depth, sizes and time. Long bodies are parsed off the event loop."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

from foredraft.sampling.json_depth import STRING_PATTERN, measure_depth, remove_escapes
from foredraft.server.errors import MAX_NAME, ApiError, quote_name

Value = TypeVar("Value")
INLINE_BYTES = 8 << 10  # bytes of a body that is parsed on the event loop; longer ones take a thread
MAX_DIGITS = 64  # consecutive digits of a number
MAX_EXPONENT = 3  # digits: only numbers with an exponent this long are checked for overflow
MAX_KEYS = 4096  # keys of one object
MAX_VALUES = 200_000  # JSON values of a body: parsing more would hold the interpreter's lock for too long
# Maps every digit to 0 and everything that is no part of a number to a blank, so that long numbers are found by plain
# substring searches. A regular expression takes 100 ms on 2 MB without a number.
_DIGIT_TABLE = bytes.maketrans(
    bytes(range(256)), re.sub(rb"[^0e+]", b" ", re.sub(rb"\d", b"0", bytes(range(256)).lower()))
)
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_LARGE_NUMBERS = (b"e" + b"0" * MAX_EXPONENT, b"e+" + b"0" * MAX_EXPONENT)
_SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")


async def read(body: bytes, pool: Executor, depth: int, check: Callable[[dict[str, Any]], Value]) -> Value:
    """Parse a body and pass the object to `check`.

    Args:
        body: the whole request body.
        pool: runs the work for bodies of more than INLINE_BYTES.
        depth: maximum nesting depth.
        check: validates the object.

    Returns:
        The result of `check`.

    Raises:
        ApiError: the body is not acceptable JSON, or `check` raised it.
    """

    def parse_and_check() -> Value:
        return check(parse(body, depth))

    if len(body) <= INLINE_BYTES:
        return parse_and_check()
    return await asyncio.get_running_loop().run_in_executor(pool, parse_and_check)


def parse(body: bytes, depth: int) -> dict[str, Any]:
    """Parse strict JSON: one object, UTF-8, without repeated keys, NaN, lone surrogates, NUL or overlong numbers.

    Raises:
        ApiError: 400 with the first fault.
    """
    if not body:
        raise ApiError(400, "the body is empty")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    unescaped = remove_escapes(body)
    structure = STRING_PATTERN.sub(b'"', unescaped) if unescaped.count(b'"') <= MAX_VALUES else None
    if structure is None or structure.count(b",") > MAX_VALUES:
        raise ApiError(400, f"the JSON body holds more than {MAX_VALUES} values")
    if measure_depth(structure) > depth:
        raise ApiError(400, f"the JSON body is nested deeper than {depth}")
    numbers = structure.translate(_DIGIT_TABLE)
    if _LONG_NUMBER in numbers:
        raise ApiError(400, f"a number has more than {MAX_DIGITS} digits")
    read_float = _parse_float if any(large in numbers for large in _LARGE_NUMBERS) else None
    try:
        value = json.loads(
            text, object_pairs_hook=_build_object, parse_constant=_reject_constant, parse_float=read_float
        )
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}: character {error.pos}") from None
    except RecursionError:
        raise ApiError(400, f"the JSON body is nested deeper than {depth}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    # Only a \u escape can produce a lone surrogate or a NUL.
    if b"\\u" in body:
        _check_text(value)
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ApiError(400, f"an object of the JSON body has more than {MAX_KEYS} keys")
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ApiError(400, f"the JSON body holds the key {quote_name(repeated)} twice", repeated[:MAX_NAME])
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; give a finite number")


def _parse_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ApiError(400, "a number is too large")
    return value


def _check_text(value: Any) -> None:
    """Raise ApiError if a string anywhere in a value holds a NUL or a lone surrogate."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, str) and ("\0" in item or _SURROGATE_PATTERN.search(item)):
            raise ApiError(400, "a string holds a NUL or half a surrogate pair")
