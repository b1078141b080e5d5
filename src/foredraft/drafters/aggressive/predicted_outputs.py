"""Predicted outputs: a request carries its expected output (a file before a small edit), and drafts copy from it.

Copying starts at the beginning of the prediction. After a divergence copy_cursor.py finds the position again.
"""

from collections.abc import Sequence

from foredraft.drafters.aggressive.copy_cursor import CopyCursor
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


def has_prediction(batch: Batch) -> bool:
    """Return whether a request of the batch has a prediction."""
    return any(request.spec.prediction for request in batch.requests)


class PredictedOutputDrafter:
    """Drafter for requests with a prediction. `max_nodes` is 0 while no running request has one."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._active_spec, self._idle_spec = DrafterSpec(num_speculative_tokens), DrafterSpec(0)
        self._cursors: dict[int, CopyCursor] = {}  # by slot

    @property
    def spec(self) -> DrafterSpec:
        return self._active_spec if self._cursors else self._idle_spec

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        for b in batch.find_drafting():
            request = batch.requests[b]
            cursor = self._cursors.get(request.slot)
            length = min(self.num_speculative_tokens, batch.granted_nodes[b], request.max_draft_depth)
            if cursor is not None and length > 0:
                cursor.read(request.output[cursor.num_read :])
                drafts[b] = Draft.from_chain(cursor.draft(length))
        tree = to_token_tree(batch, drafts)
        predicted = frozenset(b for b in drafts if tree.sizes[b] > 1)
        return TokenTree(tree.tokens, tree.parents, predicted=predicted) if predicted else tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        for request in batch.requests:
            prediction = request.spec.prediction
            if prediction and self._is_new(request):
                self._cursors[request.slot] = CopyCursor(prediction)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._cursors.pop(slot, None)

    def _is_new(self, request: Request) -> bool:
        cursor = self._cursors.get(request.slot)
        is_same = cursor is not None and cursor.source is request.spec.prediction
        return not is_same or cursor.num_read > len(request.output)  # type: ignore[union-attr]
