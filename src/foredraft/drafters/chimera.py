"""Chimera (2402.15758): short-range context from the last three tokens, long-range from the target's own states.

A layer over paged memory: entry t holds token t with the target's state t, which the pass that verified it gave. From
the last committed token on there is none yet; the trigram encoder's output stands for it, and is overwritten once the
true one is known. States are put off until somebody drafts, and read in by the pass that gives the root's law.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foredraft.checkpoints.base import Checkpoint
from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import lender, loaded, settle
from foredraft.drafters.branch import Branch
from foredraft.drafters.chimera_network import READ, ChimeraNetwork, DraftingHeads
from foredraft.drafters.chimera_training import TrainConfig, network_of, trainee
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.drafters.growth import TreeOptions as Config
from foredraft.drafters.newest import Products, stacked
from foredraft.drafters.recurrent import FeatureDrafter, Pending, feature_lm
from foredraft.models.window import Span, Window
from foredraft.request import Request

__all__ = ["METHOD", "Chimera", "Config", "TrainConfig", "create", "trainee"]

METHOD = "chimera"


class Chimera(FeatureDrafter):
    """The verbs. What is put off, settled and forgotten is EAGLE's; what stands at a position is not: a token with its
    own state, so that an entry needs no token after it."""

    def __init__(self, network: ChimeraNetwork, plan: Plan, context: Context) -> None:
        self.heads = DraftingHeads(network, Products(context))  # before the context encoder gives up its weights
        super().__init__(feature_lm(network, ChimeraNetwork.fused, context), network.shape.taps, plan, context)
        self.memory.lookahead = 0
        self._newest: dict[int, Tensor] = {}  # slot -> [H] the last state that was read

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        for slot in slots:
            self._newest.pop(slot, None)

    def _paired(self, request: Request, following: Sequence[int]) -> Sequence[int]:
        return [request.token(request.computed), *following[:-1]]

    def _is_read(self, slot: int) -> bool:
        return slot in self._newest or slot in self._pending

    def _read(self, slots: Iterable[int]) -> None:
        """Bring the memory of these slots up to all that was seen."""
        late = [self._pending[slot] for slot in slots if slot in self._pending]
        if late:
            states = self._states(late)
            self._pass([self._late(pending, []) for pending in late], torch.cat(states), late[0].page_size)
            self._settled(late, states)

    def _draft(self, branches: list[Branch], page_size: int) -> None:
        encoded = self._begin(branches, page_size)
        newest = stacked([self._newest[branch.growth.request.slot] for branch in branches])
        going, rows, depth = list(range(len(branches))), newest, 0
        while True:
            logits = self.heads(depth, encoded, rows)
            extend([branches[i].growth for i in going], Scores(logits, self.context.vocab_size))
            going = [i for i in going if branches[i].growth.frontier]
            if not going:
                return
            owners = [i for i in going for _ in branches[i].growth.frontier]
            last = [_last(branches[i].growth, node) for i in going for node in branches[i].growth.frontier]
            spans = [branches[i].span() for i in going]
            encoded = self._pass(spans, self.heads.encoded(last), page_size)
            rows = newest if owners == list(range(len(newest))) else newest[owners]
            depth += 1

    def _begin(self, branches: Sequence[Branch], page_size: int) -> Tensor:
        """[B, H] what the context encoder makes of every root, once it has read what was put off."""
        late = {b: self._pending.get(branch.growth.request.slot) for b, branch in enumerate(branches)}
        found = [pending for pending in late.values() if pending is not None]
        states = self._states(found)
        true, roots = iter(states), self.heads.encoded([_last(branch.growth, 0) for branch in branches])
        spans, inputs, ends = [], [], []
        total = 0
        for b, branch in enumerate(branches):
            request, pending = branch.growth.request, late[b]
            root = request.token(branch.start)
            if pending is None:
                spans.append(Span(request.pages, branch.start, [root], [0]))
            else:
                spans.append(self._late(pending, [root]))
                inputs.append(next(true))
            inputs.append(roots[b : b + 1])
            total += len(spans[-1].tokens)
            ends.append(total - 1)
        encoded = self._pass(spans, torch.cat(inputs), page_size)
        self._settled(found, states)
        return encoded if len(ends) == len(encoded) else encoded[ends]

    def _late(self, pending: Pending, more: list[int]) -> Span:
        """What was put off, with more tokens after it."""
        tokens = pending.tokens + more
        return Span(pending.request.pages, self.memory.valid.get(pending.request.slot, 0), tokens, range(len(tokens)))

    def _states(self, late: Sequence[Pending]) -> list[Tensor]:
        """[n, H] of each."""
        if not late:
            return []
        rows = [features for pending in late for features in pending.features]
        states = self.heads.taken(rows[0] if len(rows) == 1 else torch.cat(rows))
        return list(torch.split(states, [len(pending.tokens) for pending in late]))

    def _settled(self, late: Sequence[Pending], states: Sequence[Tensor]) -> None:
        """They are in memory: not said before the pass, which may fail."""
        for pending, true in zip(late, states, strict=True):
            slot = pending.request.slot
            self.memory.valid[slot] = self.memory.valid.get(slot, 0) + len(pending.tokens)
            self._newest[slot] = true[-1].clone()
            del self._pending[slot]

    def _pass(self, spans: Sequence[Span], states: Tensor, page_size: int) -> Tensor:
        """[T, H] the context encoder's outputs at the tokens of some spans, each with a state [T, H]."""
        return self.lm.forward(Window.build(spans, [], page_size, self.context.device), states)[1]


def _last(growth: Growth, node: int) -> list[int]:
    """A node's token and the two before it, the oldest first; the text's first stands for what is missing."""
    found: list[int] = []
    while node and len(found) < READ:
        found.append(growth.tokens[node - 1])
        node = growth.parents[node - 1]
    position = growth.request.num_tokens - 1
    while len(found) < READ:
        found.append(growth.request.token(max(position, 0)))
        position -= 1
    return found[::-1]


def create(config: Config, context: Context) -> Chimera:
    """Raises ForedraftError for heads of another kind or another target."""
    config.plan(context.num_tokens)  # options that make none are refused before anything is loaded
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> Chimera:
    """From heads that are loaded, beside context.target."""
    network = network_of(checkpoint, lender(context))
    settle(network, checkpoint.folder, context)
    return Chimera(network, config.plan(context.num_tokens), context)
