"""Checks of grammar sources before compilation: sizes, depths and counts.

Every limit excludes short sources that take seconds to compile or to follow. The compiler finds all other errors.
"""

import json
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.sampling.json_depth import STRING_PATTERN, measure_depth, remove_escapes

MAX_BYTES = 1 << 17  # bytes of a source
MAX_DEPTH = 64  # levels of nested values in a schema
MAX_CHOICES = 4096  # strings of a choice
MAX_VALUES = 1 << 16  # values in a schema given as a dict, which may contain one object many times
MAX_REPEATS = 1 << 14  # product of nested repeat counts: a{16384} takes about 10 ms a mask, a{100000} 100 ms
MAX_MULTIPLE = 20_000  # digits of multipleOf without point and trailing zeros: 99,999 takes 1 s and 50 MiB to compile

# An unclosed part extends to the end of the source, so that matching takes linear time.
# Repeats of a character class or of a dot add no time to a mask, so they are matched apart.
CLASS_PATTERN = r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*(?:\]|\Z)|\\[pP](?:\{[^}]{0,40}\}|.)|\\[dDsSwW]|\."
COUNT_PATTERN = r"\{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\}"
REGEX_SYNTAX = re.compile(
    rf"(?P<class>{CLASS_PATTERN})|(?P<atom>\\.\{{[^}}]{{0,40}}\}}|\\.|[^\\(){{?*+])|(?P<open>\()|(?P<close>\))|(?P<count>{COUNT_PATTERN})",
    re.DOTALL,
)
LARK_SYNTAX = re.compile(
    r"(?://|#)[^\n]*|(?P<atom>\"(?:\\.|[^\"\\])*(?:\"|\Z)|/(?P<regex>(?:\\.|[^/\\\n])+)/|[\w-]+)"
    rf"|(?P<open>[(\[])|(?P<close>[)\]])|(?P<count>{COUNT_PATTERN}|~\s*\d+(?:\s*\.\.\s*\d+)?)",
    re.DOTALL,
)
NUMBER = re.compile(r"\d+")


def parse_json(source: str, kind: str) -> Any:
    """Parse a JSON source. Raises ForedraftError.

    The depth is checked first, because the depth at which Python's parser stops depends on its version.
    """
    structure = STRING_PATTERN.sub(b"", remove_escapes(source.encode("utf-8", "surrogatepass")))
    if measure_depth(structure) > MAX_DEPTH:
        raise ForedraftError(f"the {kind} grammar is nested more than {MAX_DEPTH} deep")
    try:
        return json.loads(source)
    except ValueError as error:
        raise ForedraftError(f"the source of a {kind} grammar must be JSON: {error}") from error


def check_size(source: str, kind: str) -> None:
    """Raise ForedraftError for a source of more than MAX_BYTES bytes."""
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ForedraftError(f"the {kind} grammar has {size:,} bytes; at most {MAX_BYTES:,} are taken")


def check_schema(schema: Any) -> None:
    """Raise ForedraftError for a schema that is no object, nested too deeply or too large.

    The search goes level by level, so that deep or cyclic schemas end at a limit.
    """
    if not isinstance(schema, dict):
        raise ForedraftError(f"a JSON schema is an object, got {type(schema).__name__}")
    level: list[Any] = [schema]
    num_values = 0
    for _ in range(MAX_DEPTH):
        below = [inner for value in level for inner in _get_children(value)]
        num_values += len(below)
        if num_values > MAX_VALUES:
            raise ForedraftError(f"the schema holds more than {MAX_VALUES:,} values")
        level = [value for value in below if isinstance(value, (dict, list, tuple))]
        if not level:
            return
    raise ForedraftError(f"the schema is nested more than {MAX_DEPTH} deep")


def check_schema_counts(schema: Any) -> None:
    """Raise ForedraftError for large counts in patterns and in multipleOf, which take long to compile.

    minItems, maxLength and similar counts are cheap at any size, because llguidance follows them by counting.
    """
    for value in _iterate_objects(schema):
        pattern, multiple = value.get("pattern"), value.get("multipleOf")
        properties = value.get("patternProperties")
        property_patterns = list(properties) if isinstance(properties, dict) else []
        for source in [pattern, *property_patterns]:
            if isinstance(source, str):
                check_repeats(source, "pattern")
        if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
            digits = int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)) or 0)
            if digits > MAX_MULTIPLE:
                raise ForedraftError(
                    f"multipleOf {multiple} takes too long to compile; without its point and the zeros at its end it "
                    f"may be at most {MAX_MULTIPLE:,}"
                )


def check_choices(choices: Any) -> None:
    """Raise ForedraftError unless this is a list of at most MAX_CHOICES non-empty strings without half surrogates."""
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ForedraftError("choice takes a list of one string or more")
    if not all(choices):
        raise ForedraftError("choice holds an empty string; remove it")
    if len(choices) > MAX_CHOICES:
        raise ForedraftError(f"choice takes at most {MAX_CHOICES:,} strings, got {len(choices):,}")
    if any("\ud800" <= letter <= "\udfff" for one in choices for letter in one):
        raise ForedraftError("choice holds half a surrogate pair, which is no text; remove it")


def check_repeats(source: str, kind: str) -> None:
    """Raise ForedraftError for nested repeats whose counts multiply to more than MAX_REPEATS, as in (a{1000}){1000}.

    kind: "lark", "regex", or "pattern" for a pattern in a schema.
    """
    subject = kind if kind == "pattern" else f"{kind} grammar"
    count = _count_lark_repeats(source) if kind == "lark" else _count_repeats(REGEX_SYNTAX, source)
    if count > MAX_REPEATS:
        raise ForedraftError(
            f"the {subject} repeats a part {count:,} times, nested repeats multiplied; "
            f"at most {MAX_REPEATS:,} are taken"
        )


def _count_lark_repeats(source: str) -> int:
    """Return the largest product within a rule. Products over several rules fail at the first mask."""
    inside = [_count_repeats(REGEX_SYNTAX, match["regex"]) for match in LARK_SYNTAX.finditer(source) if match["regex"]]
    return max([_count_repeats(LARK_SYNTAX, source), *inside])


def _count_repeats(syntax: re.Pattern[str], source: str) -> int:
    """Return the largest product of nested repeat counts."""
    products = [1]  # largest product in every open group, the outermost first
    last = 0  # product of the part before a repeat; 0 = a class, whose repeats are not counted
    for match in syntax.finditer(source):
        if match.lastgroup == "open":
            products.append(1)
        elif match.lastgroup == "close" and len(products) > 1:
            last = products.pop()
            products[-1] = max(products[-1], last)
        elif match.lastgroup == "count":
            last *= max(int(digits[:12]) for digits in NUMBER.findall(match[0]))
            products[-1] = max(products[-1], last)
        elif match.lastgroup is not None:
            last = 0 if match.lastgroup == "class" else 1
    return max(products)


def _iterate_objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a schema that has passed `check_schema`."""
    level: list[Any] = [schema]
    while level:
        yield from (value for value in level if isinstance(value, dict))
        below = [inner for value in level for inner in _get_children(value)]
        level = [value for value in below if isinstance(value, (dict, list, tuple))]


def _get_children(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value
