"""Growth of drafts level by level: the loop of every drafter that computes one level of all drafts at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.common.tree_level import add_level
from foredraft.drafters.draft import Draft
from foredraft.request import Batch


@dataclass
class GrowingDraft:
    """Draft of one request while it grows. `rows` has the nodes of the newest level that was computed."""

    builder: TreeBuilder
    rows: dict[int, int] = field(default_factory=lambda: {0: 0})  # node -> row in the output of the last pass
    finished: Draft | None = None  # of a chain that was drafted in one call

    def to_draft(self) -> Draft:
        """Return the draft of the nodes to verify."""
        return self.builder.to_draft() if self.finished is None else self.finished

    def find_parent_rows(self) -> list[int]:
        """Return the row of each frontier node's parent in the last pass; that of the root itself for the root."""
        parents, rows = self.builder.parents, self.rows
        return [rows[parents[node - 1] if node else 0] for node in self.builder.frontier]


D = TypeVar("D", bound=GrowingDraft)


@dataclass
class LevelStates:
    """Output of the last pass: a row for every node of the newest level, draft by draft. The next pass reads it."""

    states: Tensor  # [R, H]

    def start(self, drafts: Sequence[GrowingDraft]) -> None:
        """Give every draft's root its row; the states are those of the roots, in order."""
        for row, draft in enumerate(drafts):
            draft.rows = {0: row}

    def select_parents(self, drafts: Sequence[GrowingDraft]) -> Tensor:
        """Return the parent's state of every frontier node; without a copy if they are all rows in order."""
        rows = [row for draft in drafts for row in draft.find_parent_rows()]
        return self.states if rows == list(range(len(self.states))) else self.states[rows]

    def record(self, drafts: Sequence[GrowingDraft], states: Tensor) -> None:
        """Record the output of a pass over the frontiers of `drafts`."""
        self.states, first = states, 0
        for draft in drafts:
            frontier = draft.builder.frontier
            draft.rows = {node: first + i for i, node in enumerate(frontier)}
            first += len(frontier)


def start_builder(tree_spec: TreeSpec, batch: Batch, b: int, max_depth: int) -> TreeBuilder | None:
    """Start the draft of request b, which has only its root at first.

    Args:
        tree_spec: shape of the method's drafts.
        batch: requests and their budgets.
        b: batch index of the request.
        max_depth: largest depth for which the drafter has room. The request limits the depth too.

    Returns:
        The draft; None if there is no room for a node.
    """
    request = batch.requests[b]
    depth = max(min(max_depth, request.max_draft_depth), 0)
    spec = tree_spec.restrict(depth, batch.granted_nodes[b], not request.spec.rule.takes_trees)
    if spec.max_nodes < 1 or spec.max_depth < 1:
        return None
    return TreeBuilder(request, spec, draft_stream=batch.draft_stream)


def grow_levels(drafts: Sequence[D], root_logits: NodeLogits, compute: Callable[[list[D]], NodeLogits]) -> None:
    """Grow all drafts level by level, until none has a node to expand.

    Args:
        drafts: drafts with their roots only.
        root_logits: logits after the roots.
        compute: runs the draft network over the frontiers of some drafts. Returns the logits after these nodes, draft
            by draft.
    """
    add_level([draft.builder for draft in drafts], root_logits)
    while growing := [draft for draft in drafts if draft.builder.frontier]:
        add_level([draft.builder for draft in growing], compute(growing))
        drafts = growing
