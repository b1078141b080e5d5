"""Declaration of how another engine drafts with a method. `foredraft.handover` has the engines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# From the value of an option of a method to settings with the engine's own names.
OptionTranslation = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Counterpart:
    """Method of another engine that drafts like one of Foredraft.

    Attributes:
        name: its name there.
        export: format of `foredraft export` in which the engine loads the drafter; None = it loads the folder as it is,
            or there is no folder.
        options: translation of options of the method; all others have no equal there.
        draft_tokens: settings for the longest draft in tokens, besides the engine's general one.
        settings: further settings with the engine's own names.
        note: what differs from Foredraft, for the user; "" = nothing that is known.
    """

    name: str
    export: str | None = None
    options: Mapping[str, OptionTranslation] = field(default_factory=dict)
    draft_tokens: OptionTranslation | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


Counterparts = Mapping[str, Counterpart]  # by name of the engine


def set_as(name: str) -> OptionTranslation:
    """Return the translation of an option that an engine has under another name."""
    return lambda value: {name: value}


# Options of trees, which several methods have. A tree of n nodes is one of n + 1 draft tokens for SGLang: it counts the
# root.
SGLANG_TREE_OPTIONS: Mapping[str, OptionTranslation] = MappingProxyType(
    {
        "top_k": set_as("--speculative-eagle-topk"),
        "tree_nodes": lambda nodes: {"--speculative-num-draft-tokens": nodes + 1},
        "revision": set_as("--speculative-draft-model-revision"),
    }
)
TRTLLM_TREE_OPTIONS: Mapping[str, OptionTranslation] = MappingProxyType(
    {
        "top_k": lambda width: {"use_dynamic_tree": True, "dynamic_tree_max_topK": width},
        "tree_nodes": set_as("max_total_draft_tokens"),
    }
)
# vLLM drafts greedily by default; drafts here are sampled from q.
VLLM_SAMPLED: Mapping[str, Any] = MappingProxyType({"draft_sample_method": "probabilistic"})
