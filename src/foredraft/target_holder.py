"""Methods of `LLM` that concern its target alone: sizes, and LoRA adapters that requests name."""

from collections.abc import Mapping
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.models.adapter_loading import add_adapter
from foredraft.models.hf import HFModel


class TargetHolder:
    """Base of `LLM`, which sets the field."""

    target: HFModel

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the target, without those of adapters."""
        return self.target.num_parameters

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        return self.target.context_length

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names that `RequestOptions.adapter` may have, in the order in which they were added."""
        return self.target.adapters.names

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter that requests may name: `RequestOptions(adapter=name)`.

        The weights of the target stay as they are. A batch may hold requests of any adapters and of none. Copies from
        `with_drafter` have the same adapters.

        Args:
            name: name of the adapter in requests.
            folder: folder of PEFT, with adapter_config.json and adapter_model.safetensors.

        Raises:
            ForedraftError: the name is taken, the folder holds no adapter of this model, or the model takes no adapters
                by request (encoder-decoders, several processes, recurrent layers, attention in code of its own).
        """
        add_adapter(self.target, name, folder)

    def _add_adapters(self, adapters: Mapping[str, str | Path] | None) -> None:
        """Add adapters by name. Raises ForedraftError for another type."""
        if adapters is not None and not isinstance(adapters, Mapping):
            raise ForedraftError(f"adapters takes a dict from names to folders, got {adapters!r:.80}")
        for name, folder in (adapters or {}).items():
            self.add_adapter(name, folder)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Its running requests go on, and its memory is freed after them.

        Args:
            name: name of the adapter.

        Raises:
            ForedraftError: there is no such adapter.
        """
        self.target.adapters.remove(name)
