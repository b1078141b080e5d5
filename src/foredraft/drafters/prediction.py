"""Predicted outputs: a request says what its output is expected to be (a file before a small edit), and drafts copy it.

From the beginning of the prediction, for as long as the output follows it; after a divergence from where it is found
again (see follower.py).
"""

from collections.abc import Sequence

from foredraft.drafters.base import Draft, plant
from foredraft.drafters.follower import Follower
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class Prediction:
    """The verbs. Nothing for requests without a prediction, and no room asked for while there is none."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._followers: dict[int, Follower] = {}  # by slot

    @property
    def num_nodes(self) -> int:
        return self.num_tokens if self._followers else 0

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        for b in batch.drafting():
            request = batch.requests[b]
            follower = self._followers.get(request.slot)
            length = min(self.num_tokens, batch.budgets[b], request.room)
            if follower is not None and length > 0:
                follower.read(request.output[follower.num_read :])
                drafts[b] = Draft.chain(follower.draft(length))
        tree = plant(batch, drafts)
        predicted = frozenset(b for b in drafts if tree.sizes[b] > 1)
        return TokenTree(tree.token_lists, tree.parent_lists, predicted=predicted) if predicted else tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        for request in batch.requests:
            if request.prediction and self._is_new(request):
                self._followers[request.slot] = Follower(request.prediction)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._followers.pop(slot, None)

    def _is_new(self, request: Request) -> bool:
        follower = self._followers.get(request.slot)
        is_same = follower is not None and follower.source is request.prediction
        return not is_same or follower.num_read > len(request.output)  # type: ignore[union-attr]
