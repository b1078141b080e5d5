"""Growth of drafts from rows that one pass has computed, one row for each depth (P-EAGLE, PARD).

No row sees a draft token, so all nodes of one depth have the same distribution, and no level needs a pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foredraft.drafters.common.level_loop import GrowingDraft, grow_levels
from foredraft.drafters.common.tree_builder import NodeLogits


def grow_from_rows(
    drafts: Sequence[GrowingDraft], rows: Sequence[Tensor], wrap: Callable[[Tensor], NodeLogits]
) -> None:
    """Grow all drafts to their end.

    Args:
        drafts: drafts with their roots only.
        rows: logits [D, W] of each draft, D = `TreeSpec.num_levels`; row d has the logits after every node of depth d.
        wrap: makes the logits of nodes from rows [R, W].
    """
    index = {id(draft): i for i, draft in enumerate(drafts)}

    def select_level(growing: list[GrowingDraft]) -> NodeLogits:
        nodes = [(draft, node) for draft in growing for node in draft.builder.frontier]
        return wrap(torch.stack([rows[index[id(draft)]][draft.builder.depths[node]] for draft, node in nodes]))

    grow_levels(drafts, wrap(torch.stack([found[0] for found in rows])), select_level)
