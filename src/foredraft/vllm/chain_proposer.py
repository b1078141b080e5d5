"""Drafts for the rows of another engine: the steps of a drafter, made from what the rows have become."""

from collections.abc import Sequence

from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree
from foredraft.vllm.row_tracker import Row, RowTracker, TrackedRequest


class ChainProposer:
    """Proposes a chain of draft tokens for each row.

    A drafter has a step here as in Foredraft's engine: it observes what became of its last draft, and proposes the
    next. The engine verifies later, and shows the result in the next call.

    Args:
        drafter: drafter that reads tokens alone.
        tracker: recognises the requests in the rows.
        num_tokens: longest draft in tokens.
    """

    def __init__(self, drafter: SandboxedDrafter, tracker: RowTracker, num_tokens: int) -> None:
        self.drafter, self.tracker, self.num_tokens = drafter, tracker, num_tokens

    def propose(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the draft tokens of each row, at most `num_tokens`."""
        matches = self.tracker.match(rows)
        requests = [self.tracker.add(row) if match is None else match for row, match in zip(rows, matches, strict=True)]
        if absent := self.tracker.drop_absent():
            self.drafter.forget(absent)
        if not requests:
            return []
        self._observe(rows, requests)
        for row, tracked in zip(rows, requests, strict=True):
            self.tracker.extend(tracked, row)
        return self._draft(requests)

    def _observe(self, rows: Sequence[Row], requests: Sequence[TrackedRequest]) -> None:
        """Show the drafter the last step: the whole prompt of a new request, and the accepted draft of all others."""
        chunks, paths, tokens = [], [], []
        for row, tracked in zip(rows, requests, strict=True):
            request = tracked.request
            new_tokens = row.tokens[row.num_old :].tolist()
            chunks.append(request.num_tokens - request.num_computed)
            committed = [*request.get_tokens(request.num_computed + 1, request.num_tokens), *new_tokens]
            paths.append(list(range(len(committed))))
            tokens.append(committed)
        batch = Batch(tuple(one.request for one in requests), tuple(chunks), (0,) * len(requests))
        self.drafter.observe(batch, Commit(paths, tokens))

    def _draft(self, requests: Sequence[TrackedRequest]) -> list[list[int]]:
        """Propose for all requests, and note what was proposed."""
        limit = min(self.num_tokens, self.drafter.spec.max_nodes)
        batch = Batch(
            tuple(one.request for one in requests),
            (1,) * len(requests),
            tuple(max(0, min(limit, one.request.max_draft_depth)) for one in requests),
        )
        tree = self.drafter.propose(batch)
        chains = [take_chain(tree, b)[: self.num_tokens] for b in range(len(requests))]
        for tracked, chain in zip(requests, chains, strict=True):
            tracked.draft = tuple(chain)
        return chains


def take_chain(tree: TokenTree, b: int) -> list[int]:
    """Return the draft tokens of a request from its root on; of a tree the first child of every node."""
    chain: list[int] = []
    node = 0
    for child, parent in enumerate(tree.parents[b]):
        if parent == node and child > 0:
            chain.append(tree.tokens[b][child])
            node = child
    return chain
