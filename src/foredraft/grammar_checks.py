"""What the source of a grammar may be, told from the source alone: sizes, depths, counts. The compiler sees the rest.

Every limit is for a source of a few bytes that takes seconds to compile or to follow.
"""

import json
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any

from foredraft.errors import ForedraftError

MAX_BYTES = 1 << 17  # of a grammar's source
MAX_DEPTH = 64  # nested values of a schema
MAX_CHOICES = 4096
MAX_VALUES = 1 << 16  # values in a schema given as a dict, which may repeat one object without end
MAX_REPEATS = 1 << 14  # product of nested repeat counts: a{16384} takes about 10 ms a mask, a{100000} 100 ms
MAX_MULTIPLE = 20_000  # of multipleOf, without point and zeros at its end: 99,999 takes 1 s and 50 MiB to compile

# Every pattern ends where its text does if nothing closes it before, so that no source is read twice.
# What a repeat may follow: a class or a dot, however often it comes, costs a mask nothing.
CLASS = r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*(?:\]|\Z)|\\[pP](?:\{[^}]{0,40}\}|.)|\\[dDsSwW]|\."
COUNT = r"\{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\}"
REGEX = re.compile(
    rf"(?P<class>{CLASS})|(?P<atom>\\.\{{[^}}]{{0,40}}\}}|\\.|[^\\(){{?*+])|(?P<open>\()|(?P<close>\))|(?P<count>{COUNT})",
    re.DOTALL,
)
LARK = re.compile(
    r"(?://|#)[^\n]*|(?P<atom>\"(?:\\.|[^\"\\])*(?:\"|\Z)|/(?P<regex>(?:\\.|[^/\\\n])+)/|[\w-]+)"
    rf"|(?P<open>[(\[])|(?P<close>[)\]])|(?P<count>{COUNT}|~\s*\d+(?:\s*\.\.\s*\d+)?)",
    re.DOTALL,
)
NUMBER = re.compile(r"\d+")


def parsed(source: str, kind: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise ForedraftError(f"the {kind} grammar is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ForedraftError(f"the source of a {kind} grammar must be JSON: {error}") from error


def check_size(source: str, kind: str) -> None:
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ForedraftError(f"the {kind} grammar has {size:,} bytes; at most {MAX_BYTES:,} are taken")


def check_schema(schema: Any) -> None:
    """Level by level, so that neither depth nor an object that holds itself costs anything."""
    if not isinstance(schema, dict):
        raise ForedraftError(f"a JSON schema is an object, got {type(schema).__name__}")
    level: list[Any] = [schema]
    seen = 0
    for _ in range(MAX_DEPTH):
        below = [inner for value in level for inner in _inner(value)]
        seen += len(below)
        if seen > MAX_VALUES:
            raise ForedraftError(f"the schema holds more than {MAX_VALUES:,} values")
        level = [value for value in below if isinstance(value, (dict, list, tuple))]
        if not level:
            return
    raise ForedraftError(f"the schema is nested more than {MAX_DEPTH} deep")


def check_schema_counts(schema: Any) -> None:
    """The counts that are dear: those in patterns, and multipleOf. minItems, maxLength and their kin, nested or not,
    are followed by counting, and may be as large as they like."""
    for value in _objects(schema):
        pattern, multiple = value.get("pattern"), value.get("multipleOf")
        properties = value.get("patternProperties")
        named = list(properties) if isinstance(properties, dict) else []
        for one in [pattern, *named]:
            if isinstance(one, str):
                check_repeats(one, "pattern")
        if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
            digits = int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)) or 0)
            if digits > MAX_MULTIPLE:
                raise ForedraftError(
                    f"multipleOf {multiple} takes too long to compile; without its point and the zeros at its end it "
                    f"may be at most {MAX_MULTIPLE:,}"
                )


def check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ForedraftError("choice takes a list of one string or more")
    if not all(choices):
        raise ForedraftError("choice holds an empty string; remove it")
    if len(choices) > MAX_CHOICES:
        raise ForedraftError(f"choice takes at most {MAX_CHOICES:,} strings, got {len(choices):,}")
    if any("\ud800" <= letter <= "\udfff" for one in choices for letter in one):
        raise ForedraftError("choice holds half a surrogate pair, which is no text; remove it")


def check_repeats(source: str, kind: str) -> None:
    """Refuse nested repeats, as (a{1000}){1000}, whose counts multiply to too many. kind: `lark`, `regex`, or
    `pattern` for one in a schema."""
    what = kind if kind == "pattern" else f"{kind} grammar"
    most = _lark_repeats(source) if kind == "lark" else _repeats(REGEX, source)
    if most > MAX_REPEATS:
        raise ForedraftError(
            f"the {what} repeats a part {most:,} times, nested repeats multiplied; at most {MAX_REPEATS:,} are taken"
        )


def _lark_repeats(source: str) -> int:
    """Within a rule; what rules multiply by naming each other shows in the first step."""
    inside = [_repeats(REGEX, found["regex"]) for found in LARK.finditer(source) if found["regex"]]
    return max([_repeats(LARK, source), *inside])


def _repeats(syntax: re.Pattern[str], source: str) -> int:
    """The largest product of nested repeat counts."""
    most = [1]  # of every group that is open, the outermost first
    last = 0  # of what a repeat would repeat; 0 = a class, which may be repeated at will
    for found in syntax.finditer(source):
        if found.lastgroup == "open":
            most.append(1)
        elif found.lastgroup == "close" and len(most) > 1:
            last = most.pop()
            most[-1] = max(most[-1], last)
        elif found.lastgroup == "count":
            last *= max(int(digits[:12]) for digits in NUMBER.findall(found[0]))
            most[-1] = max(most[-1], last)
        elif found.lastgroup is not None:
            last = 0 if found.lastgroup == "class" else 1
    return max(most)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object of a schema that `check_schema` let pass."""
    level: list[Any] = [schema]
    while level:
        yield from (value for value in level if isinstance(value, dict))
        below = [inner for value in level for inner in _inner(value)]
        level = [value for value in below if isinstance(value, (dict, list, tuple))]


def _inner(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value
