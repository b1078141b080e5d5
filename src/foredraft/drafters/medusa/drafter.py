"""Medusa (2401.10774): heads on the target's last state; each predicts one token further ahead, all at once.

Head h reads h_{n-2}, the state before the last committed token x_{n-1}, and predicts the token at depth h + 1 below it.
The heads do not see each other's tokens. So a tree of any shape costs one pass of the heads, and all nodes of one depth
have the same distribution.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foredraft.drafters.common.device_loop.loop import make_replay_cache
from foredraft.drafters.common.last_hidden_state import LastHiddenStates, LinearFactory, stack_states
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.static_tree import StaticTree
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.common.tree_level import add_level
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.medusa.checkpoint import MedusaShape
from foredraft.drafters.medusa.loop import MedusaLoop
from foredraft.drafters.medusa.network import MedusaHeadRunner, OutputFunction, make_output_function
from foredraft.drafters.medusa.request_tree import MedusaRequest
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.request import Batch
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.filters import argmax_tokens
from foredraft.tree import Commit, TokenTree


def make_chain(depth: int) -> StaticTree:
    """Make the tree with one node per depth."""
    return StaticTree.from_accuracies([[1.0]] * depth, depth)


class Medusa:
    """Drafter of one static tree, cut to the depth and budget of each request.

    Args:
        shape: sizes of the heads.
        tensors: weights, by the names that MedusaShape documents.
        tree: tree to draft.
        context: target, device and vocabulary.
        min_confidence: see Config.
        quantization: see Config.
    """

    def __init__(
        self,
        shape: MedusaShape,
        tensors: dict[str, Tensor],
        tree: StaticTree,
        context: DrafterContext,
        min_confidence: float = 0.0,
        quantization: str | None = None,
    ) -> None:
        self.tree = tree
        self.context = context
        self.min_confidence = min_confidence
        self._chain_tree = make_chain(tree.depth)
        self._states = LastHiddenStates()
        self.mismatch_detector = MismatchDetector(context)
        products = LinearFactory(context, quantization)
        self.spec = DrafterSpec(
            len(tree),
            (AFTER_FINAL_NORM,),
            missed_states="pause",  # a draft needs the newest state alone
            silence_mismatch=self.mismatch_detector.silence,
            is_native=products.is_native,
        )
        self._heads = MedusaHeadRunner(shape, tensors, tree.depth, products)
        self._output_head = make_output_function(
            shape, tensors, tree.depth, products, context.target, context.vocab_size
        )
        cache = make_replay_cache(context.device)
        compute = partial(_compute_logits, self._heads, self._output_head)  # not a method, which would be a cycle
        self.loop = None if cache is None else MedusaLoop(compute, context.vocab_size, cache)

    def propose(self, batch: Batch) -> TokenTree:
        requests = [entry for b in batch.find_drafting() if (entry := self._make_request(batch, b)) is not None]
        drafted = self._draft(requests) if requests else {}
        tree = to_token_tree(batch, drafted)
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def _draft(self, requests: list[MedusaRequest]) -> dict[int, Draft]:
        """Draft for requests; returns the drafts by batch index."""
        drafts = self.loop.draft(requests) if self.loop is not None and not self.min_confidence else None
        if drafts is None:
            logits = self.compute_logits(
                stack_states([entry.state for entry in requests]), max(entry.tree.depth for entry in requests)
            )
            if self.min_confidence > 0:
                requests, logits = self._truncate_unconfident(requests, logits)
            drafts = self._draft_requests(requests, logits)
        return dict(zip([entry.batch_index for entry in requests], drafts, strict=True))

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)
        self._states.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self._states.forget(slots)

    def compute_logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Compute logits [R, D, W] of the first `depth` heads from states [R, H]."""
        return _compute_logits(self._heads, self._output_head, hidden, depth)

    def _make_request(self, batch: Batch, b: int) -> MedusaRequest | None:
        request = batch.requests[b]
        state = self._states.get(request)
        if state is None or request.max_draft_depth < 1:
            return None
        tree = self.tree if request.spec.rule.takes_trees else self._chain_tree
        tree = tree.restrict(request.max_draft_depth, batch.granted_nodes[b])
        return MedusaRequest(b, request, tree, state, batch.draft_stream)

    def _truncate_unconfident(
        self, requests: Sequence[MedusaRequest], logits: Tensor
    ) -> tuple[list[MedusaRequest], Tensor]:
        """Cut every tree at the depth where confidence falls below `min_confidence`; drop requests without a node.

        The cut depends on distributions alone, not on sampled tokens, so q stays valid.
        """
        is_confident = (
            logits.float().log_softmax(-1).amax(-1).cumsum(-1).exp() >= self.min_confidence
        )  # [R, D]; a prefix is True
        depths = is_confident.sum(-1).tolist()
        selected = [i for i, depth in enumerate(depths) if depth > 0]
        cut = [replace(requests[i], tree=requests[i].tree.restrict(depths[i], len(requests[i].tree))) for i in selected]
        return cut, logits[selected]

    def _draft_requests(self, requests: Sequence[MedusaRequest], logits: Tensor) -> list[Draft]:
        """Make the draft of each request from logits [R, D, W]."""
        methods = {True: self._build_trees, False: self._sample_drafts}
        drafts: dict[int, Draft] = {}
        greedy = [i for i, entry in enumerate(requests) if not entry.is_random and not entry.shapes_logits]
        rest = [i for i in range(len(requests)) if i not in greedy] if len(greedy) < len(requests) else []
        if greedy:
            greedy_drafts = _draft_likeliest([requests[i] for i in greedy], logits[greedy] if rest else logits)
            drafts.update(zip(greedy, greedy_drafts, strict=True))
        for is_shaped, method in methods.items():
            group = [i for i in rest if requests[i].shapes_logits == is_shaped]
            if group:
                drafts.update(zip(group, method([requests[i] for i in group], logits[group]), strict=True))
        return [drafts[i] for i in range(len(requests))]

    def _sample_drafts(self, requests: Sequence[MedusaRequest], logits: Tensor) -> list[Draft]:
        """Sample all nodes at once from the heads' distributions under each request's settings."""
        size, depth = self.context.vocab_size, logits.shape[1]
        samplings = [entry.request.spec.sampling for entry in requests for _ in range(depth)]
        probs = distribution(NodeLogits(logits.flatten(0, 1), size).to_full_vocab(), samplings)
        rows, keys = [], []  # one per race: per depth under `match`, per node otherwise
        for i, entry in enumerate(requests):
            races = entry.list_races()
            rows += [i * depth + level for _, level in races]
            keys += [entry.derive_key(node, level) for node, level in races]
        ids = _sample_tokens(probs, rows, keys, max(entry.tree.width for entry in requests))
        drafts, first = [], 0
        for i, entry in enumerate(requests):
            drafts.append(entry.fill_sampled(ids[first:], probs[i * depth : (i + 1) * depth]))
            first += len(entry.list_races())
        return drafts

    def _build_trees(self, requests: Sequence[MedusaRequest], logits: Tensor) -> list[Draft]:
        """Draft level by level, since penalties give every node another distribution."""
        builders = [
            TreeBuilder(entry.request, TreeSpec.from_static_tree(entry.tree), draft_stream=entry.draft_stream)
            for entry in requests
        ]
        for depth in range(logits.shape[1]):
            growing = [(i, g) for i, g in enumerate(builders) if g.frontier and depth < g.tree_spec.max_depth]
            if growing:
                rows = [i for i, g in growing for _ in g.frontier]
                add_level([g for _, g in growing], NodeLogits(logits[rows, depth], self.context.vocab_size))
        return [builder.to_draft() for builder in builders]


def _compute_logits(heads: MedusaHeadRunner, output: OutputFunction, hidden: Tensor, depth: int) -> Tensor:
    return output(heads(hidden)[:, :depth], depth)


def _sample_tokens(probs: Tensor, rows: Sequence[int], keys: Sequence[int], width: int) -> list[list[int]]:
    """Sample `width` different tokens from each of some rows of `probs` [N, V], in order of the exponential race.

    Args:
        probs: distributions.
        rows: row of each race.
        keys: noise key of each race.
        width: tokens per race; -1 stands for a token without probability.
    """
    if width == 1 and probs.device.type == "cpu":  # this path caches the noise, which the target uses under `match`
        values = probs.numpy()
        sampled = [rng.race_argmax(values[row], key) for row, key in zip(rows, keys, strict=True)]
        return [[token if values[row, token] > 0 else -1] for row, token in zip(rows, sampled, strict=True)]
    raced = rng.exponential_race(probs[list(rows)], torch.tensor(keys, device=probs.device))
    best = raced.topk(min(width, probs.shape[-1]), -1)
    return [
        [token if score > 0 else -1 for token, score in zip(*row, strict=True)]
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _draft_likeliest(requests: Sequence[MedusaRequest], logits: Tensor) -> list[Draft]:
    """Fill every tree with the likeliest tokens of the heads."""
    width = max((entry.tree.width for entry in requests), default=0)
    if width <= 1:
        depth = logits.shape[1]
        best = argmax_tokens(logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1))
        ids = [[[token] for token in best[i * depth : (i + 1) * depth]] for i in range(len(requests))]
    else:
        ids = logits.topk(min(width, logits.shape[-1]), -1).indices.tolist()
    return [entry.fill_likeliest(head_ids) for entry, head_ids in zip(requests, ids, strict=True)]
