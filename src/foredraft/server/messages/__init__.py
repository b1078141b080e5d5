"""Reasoning, content and tool calls of an answer: parsers of the model's text, and grammars that enforce calls."""
