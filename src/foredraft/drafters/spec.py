"""What a user writes for a drafter, a name or a dict, as method, model and options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from foredraft.checkpoints.read import recognise
from foredraft.errors import ForedraftError


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
