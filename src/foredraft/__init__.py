"""Foredraft: language models generate several tokens per forward pass, and the text does not change."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.errors import ForedraftError
    from foredraft.hf_generate.decoding import generate, speculate
    from foredraft.image_prompt import ImagePrompt
    from foredraft.llm import LLM, MemoryLimits
    from foredraft.outputs import Completion, Delta, Stats, TokenLogprob
    from foredraft.request_options import RequestOptions
    from foredraft.sampling.distribution import distribution
    from foredraft.sampling.grammar import Grammar
    from foredraft.sampling.params import Sampling
    from foredraft.simulation import simulate_acceptance
    from foredraft.source import Seq2Seq
    from foredraft.verification.rules import make_typical_rule

__version__ = "0.1.0"

# no home may bear the name of what it holds: once imported, the module would stand in its place
_HOMES = {
    "LLM": "llm",
    "Completion": "outputs",
    "Delta": "outputs",
    "ForedraftError": "errors",
    "Grammar": "sampling.grammar",
    "ImagePrompt": "image_prompt",
    "MemoryLimits": "llm",
    "RequestOptions": "request_options",
    "Sampling": "sampling.params",
    "Seq2Seq": "source",
    "Stats": "outputs",
    "TokenLogprob": "outputs",
    "distribution": "sampling.distribution",
    "generate": "hf_generate.decoding",
    "make_typical_rule": "verification.rules",
    "simulate_acceptance": "simulation",
    "speculate": "hf_generate.decoding",
}

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "ForedraftError",
    "Grammar",
    "ImagePrompt",
    "MemoryLimits",
    "RequestOptions",
    "Sampling",
    "Seq2Seq",
    "Stats",
    "TokenLogprob",
    "distribution",
    "generate",
    "make_typical_rule",
    "simulate_acceptance",
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
        from foredraft.models.versions import describe_untested, read_installed_versions

        newer = describe_untested(read_installed_versions())
        if not newer:
            raise
        raise ImportError("; ".join([str(error), *newer])) from error


def __dir__() -> list[str]:
    """Names that completion offers, before any of them is imported."""
    return sorted({*globals(), *__all__})
