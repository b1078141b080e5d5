"""Adapters of one target by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

from foredraft.errors import ForedraftError
from foredraft.loaded_adapter import LoadedAdapter
from foredraft.models.adapters.module_changes import ModuleChanges


@dataclass
class AdapterSet:
    """Adapters that the requests of a target may name. Any thread may read and change it."""

    changes: ModuleChanges = field(default_factory=ModuleChanges)  # of transformers' modules
    _by_name: Mapping[str, LoadedAdapter] = field(default_factory=dict)  # replaced as a whole
    _lock: Lock = field(default_factory=Lock)

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the order in which they were added."""
        return tuple(self._by_name)

    def find(self, name: str) -> LoadedAdapter:
        """Return an adapter. Raises ForedraftError for an unknown name."""
        found = self._by_name.get(name)
        if found is None:
            listed = ", ".join(self.names)
            fix = f"use one of: {listed}" if listed else "add it first: LLM(adapters={name: folder}) or add_adapter"
            raise ForedraftError(f"there is no adapter {name!r:.80}; {fix}")
        return found

    def check_free(self, name: str) -> None:
        """Raise ForedraftError for a name that is empty or taken."""
        if not isinstance(name, str) or not name.strip():
            raise ForedraftError(f"the name of an adapter is a text, got {name!r:.80}")
        if name in self._by_name:
            raise ForedraftError(f"an adapter with the name {name!r} exists; remove it first, or choose another name")

    def add(self, adapter: LoadedAdapter) -> None:
        """Add an adapter. Raises ForedraftError if its name is taken."""
        with self._lock:
            self.check_free(adapter.name)
            self._by_name = {**self._by_name, adapter.name: adapter}

    def remove(self, name: str) -> None:
        """Remove an adapter; requests that have it go on. Raises ForedraftError for an unknown name."""
        with self._lock:
            self.find(name)
            self._by_name = {other: adapter for other, adapter in self._by_name.items() if other != name}
