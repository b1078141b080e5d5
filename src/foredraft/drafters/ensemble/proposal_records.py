"""Drafts of a step by request, and their comparison with the committed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.drafters.ensemble.value import EstimateKey, ValueEstimates
from foredraft.request import Batch
from foredraft.tree import Commit


@dataclass(slots=True)
class PastDraft:
    """A proposed draft and the estimate that its outcome updates."""

    key: EstimateKey
    tokens: Sequence[int]  # [n] without the root
    parents: Sequence[int]


@dataclass(slots=True)
class ProposalRecord:
    """Drafts of one request in a step; `propose` writes them and `observe` reads them."""

    past_drafts: list[PastDraft] = field(default_factory=list)
    # estimate of a union, and the two past drafts in it
    union_pairs: list[tuple[EstimateKey, int, int]] = field(default_factory=list)
    extension_key: EstimateKey | None = None  # None = no extension
    extension_path: tuple[int, ...] = ()  # tokens from the root to the tip that was extended
    extension_tokens: tuple[int, ...] = ()

    def add_draft(self, key: EstimateKey, tokens: Sequence[int], parents: Sequence[int]) -> int:
        self.past_drafts.append(PastDraft(key, tokens, parents))
        return len(self.past_drafts) - 1

    def update_estimates(self, estimates: ValueEstimates, slot: int, committed: Sequence[int]) -> None:
        """Compare every draft, verified or not, with the committed tokens after the root."""
        found = [measure_match(draft.tokens, draft.parents, committed) for draft in self.past_drafts]
        for draft, (num_accepted, num_tested) in zip(self.past_drafts, found, strict=True):
            estimates.update(slot, draft.key, num_accepted, num_tested)
        for key, one, other in self.union_pairs:
            num_accepted = max(found[one][0], found[other][0])
            estimates.update(slot, key, num_accepted, max(found[one][1], found[other][1]))
        path, tail = self.extension_path, self.extension_tokens
        if self.extension_key is not None and tuple(committed[: len(path)]) == path:
            estimates.update(slot, self.extension_key, *measure_match(tail, range(len(tail)), committed[len(path) :]))


class StepRecords:
    """Records of the requests of a step, by slot."""

    def __init__(self) -> None:
        self.by_slot: dict[int, ProposalRecord] = {}

    def clear(self) -> None:
        self.by_slot.clear()

    def start(self, slot: int) -> ProposalRecord:
        record = self.by_slot[slot] = ProposalRecord()
        return record

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.by_slot.pop(slot, None)

    def update_estimates(self, estimates: ValueEstimates, batch: Batch, commit: Commit) -> int:
        """Compare the drafts with the commit. Returns the number of new tokens of all requests."""
        total = 0
        for b, request in enumerate(batch.requests):
            committed = commit.tokens[b][batch.num_new_tokens[b] - 1 :]
            total += len(committed)
            record = self.by_slot.get(request.slot)
            if record is not None and committed:
                record.update_estimates(estimates, request.slot, committed)
        return total


def measure_match(tokens: Sequence[int], parents: Sequence[int], committed: Sequence[int]) -> tuple[int, int]:
    """Compare a draft with the tokens that were committed.

    Args:
        tokens: [n] tokens of the draft.
        parents: [n] parents; 0 = the root, i + 1 = node i of the draft.
        committed: tokens after the root.

    Returns:
        Number of levels that match, and number of levels that were tested (matches and the first mismatch).
    """
    node, num_accepted, has_more = 0, 0, False
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        if parent != node:
            continue
        if num_accepted == len(committed):
            return num_accepted, num_accepted
        has_more = True
        if token == committed[num_accepted]:
            node, num_accepted, has_more = i, num_accepted + 1, False
    return num_accepted, num_accepted + has_more
