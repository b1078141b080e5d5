"""The recorded pass of a draft loop: all levels in one function of fixed inputs, and its results on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafters.common.device_loop.choice import choose_children
from foredraft.drafters.common.device_loop.frontier import Children, Frontier, Growth
from foredraft.drafters.common.device_loop.inputs import DraftLoopInputs
from foredraft.drafters.common.tree_builder import NodeLogits
from foredraft.kernels.gpu.graphs import Outputs
from foredraft.kernels.gpu.rows import DeviceRows
from foredraft.kv.allocator import NULL_PAGE
from foredraft.models.forward_batch import ForwardBatch

NO_SLOT = -1  # the store kernel skips it


@dataclass(frozen=True)
class LevelOutput:
    """Output of a network for the R rows of a level."""

    logits: NodeLogits  # R rows
    states: Tensor | None = None  # [R, ..] that the rows of the next level read, each of its parent


class LoopNetwork(Protocol):
    """Draft network as the recorded loop calls it. It must not wait for the device."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the target."""

    def compute_root(self, roots: Sequence[Tensor], tokens: Tensor) -> LevelOutput:
        """Return the output at the roots.

        Args:
            roots: what `DraftLoop.grow` was given, [B, ..] each.
            tokens: tokens [B] of the roots.
        """

    def compute_level(
        self, level: int, tokens: Tensor, states: Tensor | None, batch: ForwardBatch | None
    ) -> LevelOutput:
        """Compute one row for every place of a level.

        Args:
            level: depth of the rows.
            tokens: tokens [R] of the rows.
            states: states [R, ..] of their parents, if the network has states.
            batch: the forward pass with KV, if the network has a KV cache.
        """


@dataclass(frozen=True)
class LevelResult:
    """One level on the host, by draft and place."""

    nodes: list[list[int]]  # [B][F] expanded nodes; -1 = an empty place
    offsets: list[list[int]]  # [B][F] their KV positions
    tokens: list[list[list[int]]]  # [B][F][k] children; -1 = none
    log_probs: list[list[list[float]]]  # [B][F][k]


@dataclass(frozen=True)
class LoopFunction:
    """All levels of B drafts: reads the inputs, writes KV, returns results. It may be run any number of times.

    The first output has the results of all levels as int64 numbers. The others are q [B * F, V] of each level, if a
    rule reads q.
    """

    network: LoopNetwork
    inputs: DraftLoopInputs

    def __call__(self) -> Outputs:
        growth, network = Growth.start(self.inputs), self.network
        frontier = growth.make_root()
        output = network.compute_root(self.inputs.roots, self.inputs["root_tokens"])
        paths: Tensor | None = None  # [B, F, depth + 1] slots of the nodes' ancestors and of themselves
        results: list[Tensor] = []
        q: list[Tensor] = []
        for level in range(self.inputs.plan.shape.depth):
            batch = None
            if self.inputs.plan.context:
                paths = self._extend_paths(paths, frontier)
                batch = self._make_batch(level, frontier, paths) if level else None
            if level:
                states = None if output.states is None else self._select_parents(output.states, frontier)
                output = network.compute_level(level, frontier.tokens.flatten(), states, batch)
            choice = choose_children(level, growth, frontier, output.logits)
            results += _list_results(frontier, choice.children)
            q += [] if choice.q is None else [choice.q]
            if level + 1 < self.inputs.plan.shape.depth:
                frontier = growth.advance(level, frontier, choice.children)
        return torch.cat([x.flatten() for x in results]), *q

    def _select_parents(self, states: Tensor, frontier: Frontier) -> Tensor:
        """Return the parent's state of every place, [B * F, ..] from [B * F above, ..]."""
        drafts = len(frontier.nodes)
        first = self.inputs.count_up(drafts)[:, None] * (len(states) // drafts)
        return states.index_select(0, (first + frontier.parent_rows).flatten())

    def _extend_paths(self, paths: Tensor | None, frontier: Frontier) -> Tensor:
        """Return the slots of every place's path, its own included; those of the null page for an empty place."""
        is_placed = frontier.is_valid & (self.inputs["is_reserved"].gather(1, frontier.offsets) > 0)
        own = self.inputs["slots"].gather(1, frontier.offsets)
        own = torch.where(is_placed, own, NULL_PAGE * self.inputs.page_size)[:, :, None]
        if paths is None:
            return own
        above = paths.gather(1, frontier.parent_rows[:, :, None].expand(-1, -1, paths.shape[2]))
        above = torch.where(frontier.is_valid[:, :, None], above, NULL_PAGE * self.inputs.page_size)
        return torch.cat([above, own], 2)

    def _make_batch(self, level: int, frontier: Frontier, paths: Tensor) -> ForwardBatch:
        """Make the forward pass over a frontier."""
        inputs, (drafts, places) = self.inputs, frontier.nodes.shape
        num_rows = drafts * places
        rows = inputs.count_up(num_rows)
        own = paths[:, :, -1]
        is_placed = frontier.is_valid & (inputs["is_reserved"].gather(1, frontier.offsets) > 0)
        starts = inputs["start"][:, None].expand(drafts, places).reshape(-1)
        size = level + 1
        device_rows = DeviceRows(
            frontier.tokens.flatten(),
            (starts + level).long(),
            torch.where(is_placed, own, NO_SLOT).flatten().long(),
            rows,
            inputs["pages"].flatten(),
            (rows // places * inputs.num_pages).int(),
            paths.flatten(),
            (rows * size).int(),
            starts,
            torch.full_like(starts, size),
            (inputs.count_up(drafts + 1) * places).int(),
            num_rows,
            drafts,
            inputs.plan.context,
            inputs.page_size,
        )
        return ForwardBatch.from_device_rows(device_rows, starts.device)


def _list_results(frontier: Frontier, children: Children) -> list[Tensor]:
    nodes = torch.where(frontier.is_valid, frontier.nodes, -1)
    tokens = torch.where(children.is_chosen, children.tokens, -1)
    return [nodes, frontier.offsets, tokens, children.log_probs.view(torch.int64)]


def read_results(numbers: Tensor, shapes: Sequence[tuple[int, int]], num_drafts: int) -> list[LevelResult]:
    """Read the results of all levels from the first output of a loop, on the host.

    Args:
        numbers: the output.
        shapes: places and children of every level.
        num_drafts: drafts, with those that pad.
    """
    levels, at = [], 0

    def read(*shape: int) -> Tensor:
        nonlocal at
        size = torch.Size(shape).numel()
        at += size
        return numbers[at - size : at].view(shape)

    for places, k in shapes:
        nodes, offsets = (read(num_drafts, places).tolist() for _ in range(2))
        tokens = read(num_drafts, places, k).tolist()
        log_probs = read(num_drafts, places, k).view(torch.float64).tolist()
        levels.append(LevelResult(nodes, offsets, tokens, log_probs))
    assert at == len(numbers), "the results have another shape"
    return levels
