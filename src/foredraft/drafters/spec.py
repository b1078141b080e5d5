"""What a user writes for a drafter: method, model, options, and how long drafts may be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from foredraft.checkpoints.read import recognise
from foredraft.drafters.base import Drafter, methods
from foredraft.errors import ForedraftError

DrafterSpec = None | str | dict[str, Any] | Drafter
AUTO = "auto"  # a draft length found by measurement...
AUTO_TOKENS = 8  # ... and the longest it may be
DraftLength = int | str | None


@dataclass(frozen=True)
class Spec:
    """A drafter that is asked for by name."""

    method: Any  # a word; checked where methods are looked up
    model: str | None  # folder or hub id
    options: dict[str, Any]  # of the method
    loaded: Any | None = None  # a loaded transformers model in place of `model`

    @classmethod
    def read(cls, given: str | dict[str, Any]) -> "Spec":
        """A dict has the keys of vLLM's speculative_config. Without a method, what lies under `model` says it.

        Raises ForedraftError for a model that is neither a folder nor a hub id, or one that holds nothing known.
        """
        options = {"method": given} if isinstance(given, str) else dict(given)
        method, model = options.pop("method", None), options.pop("model", None)
        options.pop("num_speculative_tokens", None)
        if isinstance(model, nn.Module):
            if method is None:
                raise ForedraftError("a loaded draft model needs its method beside it, as in {'method': 'draft_model'}")
            return cls(method, None, options, model)
        if model is not None and not isinstance(model, str | Path):
            raise ForedraftError(
                f"a drafter's model is a folder, a hub id or a loaded model; {type(model).__name__} is none of them"
            )
        name = None if model is None else str(model)
        if method is None and name is not None:
            method = recognise(name)[0]
        return cls(method, name, options)


def draft_length(spec: DrafterSpec, asked: DraftLength) -> int | None:
    """The longest draft, or None where it is to be found by measurement."""
    given = spec.get("num_speculative_tokens", AUTO) if isinstance(spec, dict) else AUTO
    count = given if asked in (AUTO, None) else asked
    if count in (AUTO, None):
        return None
    if not isinstance(count, int) or isinstance(count, bool):
        raise ForedraftError(f"num_speculative_tokens must be an integer or 'auto', got {count!r}")
    return count


def longest_draft(spec: DrafterSpec) -> int:
    """The longest draft where measurement finds the length; a method that lives from long ones names its own."""
    method = spec.get("method") if isinstance(spec, dict) else spec
    module = methods().get(method) if isinstance(method, str) else None
    return int(getattr(module, "AUTO_TOKENS", AUTO_TOKENS))
