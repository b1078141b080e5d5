"""Base class of drafters around another drafter."""

from collections.abc import Sequence

from foredraft.drafters.interface import Drafter
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class DrafterWrapper:
    """Drafter that forwards its spec and its three methods to `drafter`. A subclass overrides what it changes."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    @property
    def spec(self) -> DrafterSpec:
        return self.drafter.spec

    def propose(self, batch: Batch) -> TokenTree:
        return self.drafter.propose(batch)

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.drafter.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self.drafter.forget(slots)
