"""The drafter of plain decoding."""

from collections.abc import Sequence

from foredraft.drafters.draft import root_tree
from foredraft.drafters.spec import NO_DRAFT_SPEC, DrafterSpec
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class NoDrafter:
    """Drafter without drafts and without state."""

    spec: DrafterSpec = NO_DRAFT_SPEC

    def propose(self, batch: Batch) -> TokenTree:
        return root_tree(batch)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Do nothing."""

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing."""
