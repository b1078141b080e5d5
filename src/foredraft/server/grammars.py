"""The grammar a request asks for, from whichever field says so."""

import json
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.grammar import Grammar
from foredraft.server.errors import ApiError
from foredraft.server.protocol import Generating, ResponseFormat, StructuredOutputs


def grammar_of(request: Generating) -> Grammar | None:
    """None where none is asked for. Raises ApiError for two of them, or for one that is malformed."""
    name = grammar_field(request)
    if name is None:
        return None
    try:
        return _grammar(getattr(request, name))
    except ForedraftError as error:
        raise ApiError(400, f"{name}: {error}", name) from None


def grammar_field(request: Generating) -> str | None:
    """The field that asks for a grammar. Raises ApiError for two of them."""
    asked = [name for name in ("response_format", "structured_outputs", "regex") if _asks(getattr(request, name))]
    if len(asked) > 1:
        raise ApiError(400, f"{asked[0]} and {asked[1]} exclude each other", asked[1])
    return asked[0] if asked else None


def _asks(value: Any) -> bool:
    return value is not None and getattr(value, "type", None) != "text"


def _grammar(asked: str | ResponseFormat | StructuredOutputs) -> Grammar:
    if isinstance(asked, str):
        return Grammar.regex(asked)
    if isinstance(asked, StructuredOutputs):
        return _structured(asked)
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.json_schema is None:
        raise ForedraftError("json_schema is missing")
    schema = asked.json_schema.schema_
    return Grammar.json_schema(schema if isinstance(schema, dict) else json.dumps(schema))


def _structured(asked: StructuredOutputs) -> Grammar:
    wanted = {
        "json": asked.json_,
        "json_object": asked.json_object or None,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    given = [name for name, value in wanted.items() if value is not None]
    if len(given) != 1:
        raise ForedraftError(f"give exactly one of {', '.join(wanted)}")
    if asked.json_ is not None:
        return Grammar.json_schema(asked.json_)
    if asked.regex is not None:
        return Grammar.regex(asked.regex)
    if asked.choice is not None:
        return Grammar.choice(asked.choice)
    return Grammar.json_object() if asked.grammar is None else Grammar.lark(asked.grammar)
