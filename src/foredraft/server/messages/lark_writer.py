"""Writer of Lark grammars in llguidance's dialect: marks as text or control tokens, and JSON schemas."""

import json
from collections.abc import Mapping
from typing import Any

from foredraft.sampling.grammar import WHITESPACE, Grammar

ANY_TEXT = r"/(.|\n)*/"


class LarkWriter:
    """Collects the rules of one grammar.

    Args:
        special_ids: control tokens of the vocabulary; their spelling as ordinary text is another text.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []

    def spell(self, mark: str) -> str:
        """Return the expression of a mark: a control token if it is one, else text."""
        token = self._special_ids.get(mark)
        return quote(mark) if token is None else f"<[{token}]>"

    def spell_until(self, mark: str) -> str:
        """Return the expression of any text up to a mark, the mark included."""
        if mark in self._special_ids:
            return f"{ANY_TEXT} {self.spell(mark)}"
        return self._add(f"until_{len(self._rules)}[lazy]", rf"/(.|\n)*{_escape(mark)}/").removesuffix("[lazy]")

    def spell_without(self, mark: str, pattern: str = ANY_TEXT) -> str:
        """Return the expression of a text that matches a pattern and does not hold a mark."""
        if mark in self._special_ids:  # text cannot hold a control token
            return pattern
        return self._add(f"WITHOUT_{len(self._rules)}", rf"{pattern} & ~/(.|\n)*{_escape(mark)}(.|\n)*/")

    def add_rule(self, body: str) -> str:
        """Add a rule and return its name."""
        return self._add(f"rule_{len(self._rules)}", body)

    def add_schema(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for the JSON values of a schema and return its name.

        Raises:
            ForedraftError: the schema is too large, too deep, or has counts that take long to compile.
        """
        spaced = {"x-guidance": WHITESPACE["bounded"]} | dict(schema)
        Grammar.json_schema(spaced)  # the checks of a source of its own
        return self.add_rule(f"%json {json.dumps(spaced, ensure_ascii=False)}")

    def build(self, start: str) -> Grammar:
        """Return the grammar whose texts follow the expression `start`."""
        return Grammar.lark("\n".join([f"start: {start}", *self._rules]))

    def _add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name


def quote(text: str) -> str:
    """Return a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _escape(mark: str) -> str:
    """Return a mark as part of a regular expression between slashes."""
    return "".join(char if char.isalnum() or char in "_<>" else f"\\{char}" for char in mark)
