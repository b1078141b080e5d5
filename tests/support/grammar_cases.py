"""Random JSON schemas with a checker of their own, a vocabulary of nine tokens, and a model that speaks ASCII."""

import json
import random
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foredraft import LLM
from foredraft.sampling.grammar import Grammar, GrammarCompiler
from tests.support import tiny_models

TIGHT = {"x-guidance": {"whitespace_flexible": False}}
PATTERNS = ("[a-c]{1,4}", "x(yz)*", "[0-9]{2}-[0-9]{2}", "(foo|bar|barn)")


def make_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Make a schema whose texts are short."""
    kinds = ["integer", "boolean", "null", "enum", "const", "pattern", "string", "anyOf"]
    kind = rng.choice(kinds + (["object", "array"] * 4 if depth else []))
    if kind == "object":
        names = rng.sample(["a", "b", "long name", 'q"t', "é"], rng.randint(1, 3))
        required = [name for name in names if rng.random() < 0.7]
        inner = {name: make_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 1)
        most = rng.randint(least, 2)
        return {"type": "array", "items": make_schema(rng, depth - 1), "minItems": least, "maxItems": most}
    if kind == "integer":
        low = rng.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "anyOf":
        return {"anyOf": [make_schema(rng, 0), {"type": "null"}]}
    return {
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": rng.sample(["red", "green", "grey", 1, 12, None, True], 3)},
        "const": {"const": rng.choice(["ü", 7, False])},
        "pattern": {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$", "maxLength": 8},
        "string": {"type": "string", "maxLength": rng.randint(0, 4)},
    }[kind]


def matches_schema(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value against a schema made by `make_schema`."""
    if "anyOf" in schema:
        return any(matches_schema(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(one) and value == one for one in known)
    kind = schema["type"]
    if kind == "object":
        inner = schema["properties"]
        is_complete = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(inner)
        return is_complete and all(matches_schema(one, inner[name]) for name, one in value.items())
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(matches_schema(one, schema["items"]) for one in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        fits = isinstance(value, str) and len(value) <= schema.get("maxLength", 1 << 30)
        return fits and re.search(schema.get("pattern", ""), value) is not None
    return value is None if kind == "null" else isinstance(value, bool)


def is_valid(text: str, grammar: Grammar) -> bool:
    """Check a finished text without llguidance."""
    if grammar.kind == "regex":
        return re.fullmatch(grammar.source, text) is not None
    if grammar.kind == "choice":
        return text in json.loads(grammar.source)
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict) if grammar.kind == "json_object" else matches_schema(value, json.loads(grammar.source))
    )


@cache
def make_ascii_llm() -> LLM:
    """Make the tiny target with 97 ids: three special tokens and the characters `!` to `~`. 0 ends a text, and so does
    3, which is `!` and may be part of one."""
    pieces = ["<end>", "<stop>", "<pad>", *map(chr, range(33, 127))]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(pieces[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    return LLM(tiny_models.target(), None, tokenizer=tokenizer, is_debug=True)


NINE_TOKENS = ["a", "b", "c", "ab", "bc", "cc", "{", "}", "<end>"]
END = 8


@cache
def make_nine_token_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of nine tokens; the last one ends a text."""
    merges = [("a", "b"), ("b", "c"), ("c", "c")]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(NINE_TOKENS[:-1])}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@cache
def make_grammars(vocab_size: int = len(NINE_TOKENS)) -> GrammarCompiler:
    return GrammarCompiler(make_nine_token_tokenizer(), vocab_size)
