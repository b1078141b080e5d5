"""Grammar of a request, from response_format, structured_outputs or regex."""

import json
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.sampling.grammar import Grammar
from foredraft.server.errors import ApiError
from foredraft.server.schemas import GenerationRequest, ResponseFormat, StructuredOutputs


def read_grammar(request: GenerationRequest) -> Grammar | None:
    """Read the grammar of a request. Returns None if it has none.

    Raises:
        ApiError: two fields set a grammar, or the grammar is malformed.
    """
    name = find_grammar_field(request)
    if name is None:
        return None
    try:
        return _parse_grammar(getattr(request, name))
    except ForedraftError as error:
        raise ApiError(400, f"{name}: {error}", name) from None


def find_grammar_field(request: GenerationRequest) -> str | None:
    """Find the field that sets a grammar. Raises ApiError if two fields do."""
    names = [
        name for name in ("response_format", "structured_outputs", "regex") if _sets_grammar(getattr(request, name))
    ]
    if len(names) > 1:
        raise ApiError(400, f"{names[0]} and {names[1]} exclude each other", names[1])
    return names[0] if names else None


def _sets_grammar(value: Any) -> bool:
    return value is not None and getattr(value, "type", None) != "text"


def _parse_grammar(value: str | ResponseFormat | StructuredOutputs) -> Grammar:
    if isinstance(value, str):
        return Grammar.regex(value)
    if isinstance(value, StructuredOutputs):
        return _parse_structured_outputs(value)
    if value.type == "json_object":
        return Grammar.json_object()
    if value.json_schema is None:
        raise ForedraftError("json_schema is missing")
    schema = value.json_schema.schema_
    return Grammar.json_schema(schema if isinstance(schema, dict) else json.dumps(schema))


def _parse_structured_outputs(outputs: StructuredOutputs) -> Grammar:
    options = {
        "json": outputs.json_,
        "json_object": outputs.json_object or None,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
    }
    names = [name for name, value in options.items() if value is not None]
    if len(names) != 1:
        raise ForedraftError(f"give exactly one of {', '.join(options)}")
    if outputs.json_ is not None:
        return Grammar.json_schema(outputs.json_)
    if outputs.regex is not None:
        return Grammar.regex(outputs.regex)
    if outputs.choice is not None:
        return Grammar.choice(outputs.choice)
    return Grammar.json_object() if outputs.grammar is None else Grammar.lark(outputs.grammar)
