"""Medusa (2401.10774): heads on the target's last state, each guessing one token further ahead, all at once.

Head h reads h_{n-2}, the state below the last committed token x_{n-1}, and guesses the token at depth h + 1 below it.
No head sees what the others guess, so a draft of any shape costs one pass of the heads, and every node of one depth has
the same law.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft import noise
from foredraft.checkpoints.base import Checkpoint, MedusaShape
from foredraft.drafters.base import Context, Draft, draft_key, plant
from foredraft.drafters.borrowed import loaded
from foredraft.drafters.fit import Fit
from foredraft.drafters.growth import MOST_NODES, Growth, Plan, Scores, extend
from foredraft.drafters.medusa_heads import RANKS, Heads, outputs
from foredraft.drafters.medusa_training import TrainConfig, trainee
from foredraft.drafters.newest import NewestStates, Products, stacked
from foredraft.drafters.rank_tree import Accuracies, RankTree, usual
from foredraft.errors import ForedraftError
from foredraft.filters import likeliest
from foredraft.models.window import NORMED
from foredraft.request import Batch, Request
from foredraft.sampling import distribution
from foredraft.tree import Commit, TokenTree

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "medusa"


@dataclass(frozen=True)
class Config:
    """`tree`: paths of ranks, as published `medusa_choices` have them. `tree_nodes`: the best tree of so many nodes, by
    the accuracies measured when the heads were trained. Neither: a chain. `min_confidence`: a draft ends at the depth
    where the product of the heads' largest probabilities falls below it."""

    tree: tuple[tuple[int, ...], ...] | None = None
    tree_nodes: int | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def shape(self, num_tokens: int, num_heads: int, accuracies: Accuracies) -> RankTree:
        """The tree to draft, no deeper than there are heads. Raises ForedraftError where the options make none."""
        if not 0 <= self.min_confidence < 1:
            raise ForedraftError(f"min_confidence must lie in 0..1, got {self.min_confidence}")
        if self.tree is not None:
            if self.tree_nodes is not None:
                raise ForedraftError("tree fixes every node; give it without tree_nodes")
            return RankTree.of(self.tree, accuracies[:num_heads])
        if self.tree_nodes is None:
            return chain(min(num_tokens, num_heads))
        if not 1 <= self.tree_nodes <= MOST_NODES:
            raise ForedraftError(f"tree_nodes must be positive and at most {MOST_NODES}, got {self.tree_nodes}")
        return RankTree.best(accuracies[: min(num_tokens, num_heads)], self.tree_nodes)


def chain(depth: int) -> RankTree:
    return RankTree.best([[1.0]] * depth, depth)


@dataclass(frozen=True)
class Asked:
    """One request to draft for."""

    b: int
    request: Request
    tree: RankTree
    state: Tensor  # [H]

    @property
    def is_shaped(self) -> bool:
        """What is drafted depends on the tokens before it."""
        return self.request.sampling.shapes_logits

    @property
    def draws(self) -> bool:
        return not self.request.sampling.is_greedy and self.request.verify in ("reject", "block")

    @property
    def is_random(self) -> bool:
        return self.draws or (not self.request.sampling.is_greedy and self.request.verify == "match")


class Medusa:
    """Drafts a tree of one fixed shape, cut to what a request has room for."""

    taps: tuple[int, ...] = (NORMED,)

    def __init__(
        self,
        shape: MedusaShape,
        tensors: dict[str, Tensor],
        tree: RankTree,
        context: Context,
        min_confidence: float = 0.0,
        quantization: str | None = None,
    ) -> None:
        self.tree = tree
        self.context = context
        self.min_confidence = min_confidence
        self._chain = chain(tree.depth)
        self._states = NewestStates()
        self.fit = Fit(context)
        products = Products(context, quantization)
        self._heads = Heads(shape, tensors, tree.depth, products)
        self._outputs = outputs(shape, tensors, tree.depth, products, context.target, context.vocab_size)

    @property
    def num_nodes(self) -> int:
        return len(self.tree)

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        asked = [one for b in batch.drafting() if (one := self._asked(batch, b)) is not None]
        if asked:
            logits = self.logits(stacked([one.state for one in asked]), max(one.tree.depth for one in asked))
            if self.min_confidence > 0:
                asked, logits = self._sure(asked, logits)
            drafts = dict(zip([one.b for one in asked], self._drafted(asked, logits), strict=True))
        return self.fit.proposed(batch, plant(batch, drafts))

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.fit.observed(batch, commit)
        self._states.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self._states.forget(slots)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[R, H] -> [R, D, W] of the first heads."""
        return self._outputs(self._heads(hidden)[:, :depth], depth)

    def _asked(self, batch: Batch, b: int) -> Asked | None:
        request = batch.requests[b]
        state = self._states.of(request)
        if state is None or request.room < 1:
            return None
        tree = self._chain if request.verify == "block" else self.tree
        return Asked(b, request, tree.cut(request.room, batch.budgets[b]), state)

    def _sure(self, asked: Sequence[Asked], logits: Tensor) -> tuple[list[Asked], Tensor]:
        """Cut to the depth the heads are sure of, and without those not sure of anything.

        That depends on laws which were there before anything was drawn, so the length tells nothing of the draft.
        """
        sure = logits.float().log_softmax(-1).amax(-1).cumsum(-1).exp() >= self.min_confidence  # [R, D], falling
        depths = sure.sum(-1).tolist()
        kept = [i for i, depth in enumerate(depths) if depth > 0]
        cut = [replace(asked[i], tree=asked[i].tree.cut(depths[i], len(asked[i].tree))) for i in kept]
        return cut, logits[kept]

    def _drafted(self, asked: Sequence[Asked], logits: Tensor) -> list[Draft]:
        """logits [R, D, W] of the requests in order."""
        ways = {True: self._grown, False: self._sampled}
        drafts: dict[int, Draft] = {}
        guessing = [i for i, one in enumerate(asked) if not one.is_random and not one.is_shaped]
        rest = [i for i in range(len(asked)) if i not in guessing] if len(guessing) < len(asked) else []
        if guessing:
            found = _guessed([asked[i] for i in guessing], logits[guessing] if rest else logits)
            drafts.update(zip(guessing, found, strict=True))
        for is_shaped, way in ways.items():
            mine = [i for i in rest if asked[i].is_shaped == is_shaped]
            if mine:
                drafts.update(zip(mine, way([asked[i] for i in mine], logits[mine]), strict=True))
        return [drafts[i] for i in range(len(asked))]

    def _sampled(self, asked: Sequence[Asked], logits: Tensor) -> list[Draft]:
        """Drawn from the heads' laws under each request's parameters, all nodes at once."""
        size, depth = self.context.vocab_size, logits.shape[1]
        samplings = [one.request.sampling for one in asked for _ in range(depth)]
        laws = distribution(Scores(logits.flatten(0, 1), size).full(), samplings)
        rows, keys = [], []  # one for every race: of a depth under `match`, of a node under the others
        for i, one in enumerate(asked):
            runs = [(0, level) for level in range(one.tree.depth)]
            if one.draws:
                runs = [(node, one.tree.depth_of(node)) for node in one.tree.inner]
            rows += [i * depth + level for _, level in runs]
            keys += [draft_key(one.request, node, level) for node, level in runs]
        ids = _drawn(laws, rows, keys, max(one.tree.width for one in asked))
        drafts, first = [], 0
        for i, one in enumerate(asked):
            if one.draws:
                own = laws[i * depth : (i + 1) * depth]
                drafts.append(_filled(one.tree, ids[first:], one.tree.draws, own))
                first += len(one.tree.inner)
            else:
                drafts.append(_filled(one.tree, ids[first:], [level - 1 for level in one.tree.depths]))
                first += one.tree.depth
        return drafts

    def _grown(self, asked: Sequence[Asked], logits: Tensor) -> list[Draft]:
        """Level by level: penalties and the like make every node's law its own."""
        growths = [Growth(one.request, Plan.shaped(one.tree)) for one in asked]
        for depth in range(logits.shape[1]):
            growing = [(i, g) for i, g in enumerate(growths) if g.frontier and depth < g.plan.depth]
            if growing:
                rows = [i for i, g in growing for _ in g.frontier]
                extend([g for _, g in growing], Scores(logits[rows, depth], self.context.vocab_size))
        return [growth.draft() for growth in growths]


def _drawn(laws: Tensor, rows: Sequence[int], keys: Sequence[int], width: int) -> list[list[int]]:
    """The first of the races from some rows of laws, one key each; -1 for what has no probability and was not drawn."""
    if width == 1 and laws.device.type == "cpu":  # the noise is kept for the target, which draws by it under `match`
        values = laws.numpy()
        found = [noise.winner(values[row], key) for row, key in zip(rows, keys, strict=True)]
        return [[token if values[row, token] > 0 else -1] for row, token in zip(rows, found, strict=True)]
    raced = noise.race(laws[list(rows)], torch.tensor(keys, device=laws.device))
    best = raced.topk(min(width, laws.shape[-1]), -1)
    return [
        [token if score > 0 else -1 for token, score in zip(*row, strict=True)]
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _guessed(asked: Sequence[Asked], logits: Tensor) -> list[Draft]:
    """The likeliest tokens of every head, and the tree is a table to look them up."""
    width = max((one.tree.width for one in asked), default=0)
    if width <= 1:
        depth = logits.shape[1]
        found = likeliest(logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1))
        ids = [[[token] for token in found[i * depth : (i + 1) * depth]] for i in range(len(asked))]
    else:
        ids = logits.topk(min(width, logits.shape[-1]), -1).indices.tolist()
    return [
        _filled(one.tree, ids_of, [depth - 1 for depth in one.tree.depths])
        for one, ids_of in zip(asked, ids, strict=True)
    ]


def _filled(tree: RankTree, ids: Sequence[Sequence[int]], of_node: Sequence[int], laws: Tensor | None = None) -> Draft:
    """The tree with tokens: node n takes the one of its rank from ids[of_node[n - 1]]; -1, or none, ends the branch.

    laws [D, V] by depth, where the children were drawn from them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    index = {0: 0}
    for node, (parent, rank, row) in enumerate(zip(tree.parents, tree.ranks, of_node, strict=True), 1):
        if parent in index and rank < len(ids[row]) and ids[row][rank] >= 0:
            tokens.append(ids[row][rank])
            parents.append(index[parent])
            index[node] = len(tokens)
    if laws is None:
        return Draft(tuple(tokens), tuple(parents))
    below = torch.cat([laws, laws.new_zeros(1, laws.shape[-1])])  # nothing is drawn below the deepest level
    depths = [0, *(tree.depths[node - 1] for node in index if node)]
    return Draft(tuple(tokens), tuple(parents), below[depths])


def create(config: Config, context: Context) -> Medusa:
    """Load the heads. Raises ForedraftError if they are not the target's."""
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> Medusa:
    """From heads that are loaded."""
    shape = checkpoint.shape
    if not isinstance(shape, MedusaShape):
        raise ForedraftError(f"{checkpoint.folder} holds no Medusa heads but {checkpoint.format}")
    tree = config.shape(context.num_tokens, shape.num_heads, measured(shape))
    return Medusa(shape, checkpoint.tensors, tree, context, config.min_confidence, config.quantization)


def measured(shape: MedusaShape) -> Accuracies:
    """By head and rank, from the checkpoint or assumed."""
    return shape.accuracies or usual(shape.num_heads, RANKS)
