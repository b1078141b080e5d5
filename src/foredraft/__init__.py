"""Foredraft: language models generate several tokens per forward pass, and the text does not change."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.completion import Completion, Delta, Stats, TokenLogprob
    from foredraft.errors import ForedraftError
    from foredraft.grammar import Grammar
    from foredraft.hf_generate.decoding import generate, speculate
    from foredraft.llm import LLM, MemoryLimits
    from foredraft.request import RequestOptions
    from foredraft.sampling import Sampling, distribution
    from foredraft.source import Seq2Seq

__version__ = "0.1.0"

# no home may bear the name of what it holds: once imported, the module would stand in its place
_HOMES = {
    "LLM": "llm",
    "Completion": "completion",
    "Delta": "completion",
    "ForedraftError": "errors",
    "Grammar": "grammar",
    "MemoryLimits": "llm",
    "RequestOptions": "request",
    "Sampling": "sampling",
    "Seq2Seq": "source",
    "Stats": "completion",
    "TokenLogprob": "completion",
    "distribution": "sampling",
    "generate": "hf_generate.decoding",
    "speculate": "hf_generate.decoding",
}

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "ForedraftError",
    "Grammar",
    "MemoryLimits",
    "RequestOptions",
    "Sampling",
    "Seq2Seq",
    "Stats",
    "TokenLogprob",
    "distribution",
    "generate",
    "speculate",
]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `foredraft --help` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"foredraft.{_HOMES[name]}"), name)
    except ImportError as error:
        from foredraft.models.versions import installed, untested

        newer = untested(installed())
        if not newer:
            raise
        raise ImportError("; ".join([str(error), *newer])) from error


def __dir__() -> list[str]:
    """Names that completion offers, before any of them is imported."""
    return sorted({*globals(), *__all__})
