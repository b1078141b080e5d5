"""Growth of drafts on a device: the nodes to expand next, their numbers and their KV positions.

Everything here is what `TreeBuilder` and `GrowingKVDraft` do for one draft on the host, for all drafts at once and
without a wait. The host repeats it afterwards, from the same children, and compares.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.drafters.common.device_loop.inputs import DraftLoopInputs
from foredraft.drafters.common.device_loop.plan import LoopPlan
from foredraft.drafters.common.device_loop.shape import DynamicShape, FixedShape

NOTHING = -torch.inf  # log-probability of a place without a node


@dataclass(frozen=True)
class Frontier:
    """Nodes to expand: F places for each of B drafts, in the order of the nodes. A place may be empty."""

    nodes: Tensor  # [B, F] index of the node in its draft
    log_probs: Tensor  # [B, F] float64, of the path from the root
    is_valid: Tensor  # [B, F] whether the place has a node
    tokens: Tensor  # [B, F]
    parent_rows: Tensor  # [B, F] place of the parent in the frontier above
    offsets: Tensor  # [B, F] KV position relative to that of the root

    @classmethod
    def from_roots(cls, tokens: Tensor, is_valid: Tensor) -> "Frontier":
        """Make the frontier of the roots, from their tokens [B]."""
        zeros = torch.zeros_like(tokens)[:, None]
        return cls(zeros, zeros.double(), is_valid[:, None], tokens[:, None], zeros, zeros)


@dataclass(frozen=True)
class Children:
    """Children of the places of a frontier: k for each, the chosen ones first."""

    tokens: Tensor  # [B, F, k]
    log_probs: Tensor  # [B, F, k] float64, given the parent
    is_chosen: Tensor  # [B, F, k]


@dataclass
class Growth:
    """State of B growing drafts. A call of `advance` adds the children of a frontier and chooses the next one."""

    inputs: DraftLoopInputs
    num_nodes: Tensor  # [B] nodes below the root
    num_expanded: Tensor  # [B] expanded nodes below the root
    best_log_probs: Tensor  # [B, N] of the likeliest nodes, descending; `NOTHING` at the end
    best_offsets: Tensor  # [B, N] their KV positions; -1 = never expanded

    @classmethod
    def start(cls, inputs: DraftLoopInputs) -> "Growth":
        zeros = torch.zeros_like(inputs["root_tokens"])
        size = inputs.plan.shape.max_nodes if isinstance(inputs.plan.shape, DynamicShape) else 0
        best = torch.full((len(zeros), size), NOTHING, dtype=torch.float64, device=zeros.device)
        return cls(inputs, zeros, zeros, best, torch.full_like(best, -1, dtype=torch.int64))

    @property
    def plan(self) -> LoopPlan:
        return self.inputs.plan

    def make_root(self) -> Frontier:
        """Make the frontier of the roots. A root without a child is no part of it, as in padding."""
        can_grow = (
            self.inputs["max_depth"] if isinstance(self.plan.shape, DynamicShape) else self.inputs["counts"][:, 0]
        )
        return Frontier.from_roots(self.inputs["root_tokens"], can_grow > 0)

    def advance(self, level: int, frontier: Frontier, children: Children) -> Frontier:
        """Add children, and return the frontier at depth level + 1."""
        log_probs = frontier.log_probs[:, :, None] + children.log_probs
        chosen = children.is_chosen.flatten(1)
        found = torch.where(chosen, log_probs.flatten(1), NOTHING)  # [B, C]
        nodes = self.num_nodes[:, None] + chosen.cumsum(1)  # numbers in the order of the places
        tokens = children.tokens.flatten(1).clamp_min(0)
        self.num_nodes = self.num_nodes + chosen.sum(1)
        can_grow = chosen & ~self._find_ends(tokens)
        if isinstance(self.plan.shape, FixedShape):
            places, is_valid = self._select_fixed(self.plan.shape, level, can_grow)
            offsets = self._append_offsets(is_valid)
        else:
            places, is_valid, offsets = self._select_dynamic(self.plan.shape, level, can_grow, found)
        self.num_expanded = self.num_expanded + is_valid.sum(1)
        return Frontier(
            nodes.gather(1, places),
            found.gather(1, places),
            is_valid,
            tokens.gather(1, places),
            places // children.tokens.shape[2],
            torch.where(is_valid, offsets, 0),
        )

    def _find_ends(self, tokens: Tensor) -> Tensor:
        return (tokens[:, :, None] == self.inputs["end_ids"][:, None]).any(2)

    def _append_offsets(self, is_valid: Tensor) -> Tensor:
        """Return KV positions behind those of the nodes that were expanded before."""
        return self.num_expanded[:, None] + is_valid.cumsum(1)

    def _select_fixed(self, shape: FixedShape, level: int, can_grow: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places [B, F] of the next frontier among the children, and whether they have a node."""
        first = sum(len(above.paths) for above in shape.levels[: level + 1])
        places = self.inputs.place_tables[level].expand(len(can_grow), -1)
        counts = self.inputs["counts"][:, first : first + places.shape[1]]
        return places, can_grow.gather(1, places) & (counts > 0)

    def _select_dynamic(
        self, shape: DynamicShape, level: int, can_grow: Tensor, found: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the next frontier of dynamic trees among children with the log-probabilities `found` [B, C].

        Returns:
            Places [B, F] among the children, whether they have a node, and their KV positions.
        """
        uses_q = self.inputs["uses_q"][:, None] > 0
        max_nodes = self.inputs["max_nodes"][:, None]
        ranks = self._keep_best(found)  # [B, C]
        # a child ranks behind its parent, so children of the last best node are never verified
        is_alive = torch.where(uses_q, self.num_nodes[:, None] < max_nodes, ranks < max_nodes - 1)
        is_alive = is_alive & can_grow & (level + 1 < self.inputs["max_depth"][:, None])
        likeliest = torch.where(is_alive, found, NOTHING).sort(dim=1, descending=True, stable=True)
        width = min(shape.width, found.shape[1])
        size = found.shape[1]
        is_found = likeliest.values[:, :width] > NOTHING
        places = torch.where(is_found, likeliest.indices[:, :width], size).sort(1).values
        is_valid = places < size
        places = places.clamp_max(size - 1)
        offsets = torch.where(uses_q, self._append_offsets(is_valid), self._find_free_offsets(is_valid))
        self._record_offsets(ranks.gather(1, places), offsets, is_valid)
        return places, is_valid, offsets

    def _keep_best(self, found: Tensor) -> Tensor:
        """Merge new nodes into the likeliest ones. Returns the rank [B, C] of every new node among all."""
        size = self.best_log_probs.shape[1]
        merged = torch.cat([self.best_log_probs, found], 1)
        order = merged.sort(
            dim=1, descending=True, stable=True
        ).indices  # ties: the older node, then the order of places
        ranks = torch.empty_like(order).scatter_(1, order, self.inputs.count_up(merged.shape[1]).expand_as(order))
        offsets = torch.cat([self.best_offsets, torch.full_like(found, -1, dtype=torch.int64)], 1)
        is_kept = self.inputs.count_up(size) < self.inputs["max_nodes"][:, None]
        best = order[:, :size]
        self.best_log_probs = torch.where(is_kept, merged.gather(1, best), NOTHING)
        self.best_offsets = torch.where(is_kept, offsets.gather(1, best), -1)
        return ranks[:, size:]

    def _find_free_offsets(self, is_valid: Tensor) -> Tensor:
        """Return the lowest KV positions [B, F] that no node has which may still be verified."""
        size = self.plan.num_slots
        used = torch.zeros(len(is_valid), size + 1, dtype=torch.uint8, device=is_valid.device)
        used[:, 0] = 1
        taken = torch.where(self.best_offsets >= 0, self.best_offsets, size)  # the last column is not a position
        used = used.scatter(1, taken, 1)[:, :size]
        return used.sort(dim=1, stable=True).indices[:, : is_valid.shape[1]]

    def _record_offsets(self, ranks: Tensor, offsets: Tensor, is_valid: Tensor) -> None:
        """Note the KV positions of new frontier nodes, given their ranks among the likeliest nodes."""
        size = self.best_offsets.shape[1]
        wide = torch.cat([self.best_offsets, torch.full_like(offsets[:, :1], -1)], 1)
        at = torch.where(is_valid & (ranks < size), ranks, size)
        self.best_offsets = wide.scatter(1, at, offsets)[:, :size]
