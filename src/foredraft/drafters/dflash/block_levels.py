"""Growth of drafts from the rows of their blocks, level by level. No level needs a pass over the layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.drafters.common.chain_loop import is_native_chain
from foredraft.drafters.common.level_loop import GrowingDraft, LevelStates
from foredraft.drafters.common.tree_builder import NodeLogits
from foredraft.drafters.common.tree_level import add_level
from foredraft.drafters.dflash.network import DFlashNetwork
from foredraft.drafters.draft import Draft, draft_noise_key
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.filters import argmax_tokens


@dataclass
class BlockDraft(GrowingDraft):
    """Growing draft of one request.

    `min_confidence` is the predicted probability of acceptance below which a chain ends; 0 = never.
    """

    min_confidence: float = 0.0
    survival: float = 1.0  # predicted probability that all tokens so far are accepted
    confidences: tuple[float, ...] | None = None  # of the tokens of a finished chain

    def to_draft(self) -> Draft:
        return replace(super().to_draft(), confidences=self.confidences)

    def get_token(self, node: int) -> int:
        """Return the token of a node; node 0 is the last committed token."""
        request = self.builder.request
        return self.builder.tokens[node - 1] if node else request.get_token(request.num_tokens - 1)


class BlockLevels:
    """Levels of n drafts.

    Args:
        network: the head.
        states: states [n, D, H] of the rows that predict tokens, draft by draft.
        drafts: drafts with their roots only.
        vocab_size: number of tokens of the target.
    """

    def __init__(self, network: DFlashNetwork, states: Tensor, drafts: Sequence[BlockDraft], vocab_size: int) -> None:
        self.network = network
        self.states = states
        self.logits = network.compute_logits(states)  # [n, D, V], without the Markov head
        self.drafts = drafts
        self.vocab_size = vocab_size
        self._index = {id(draft): i for i, draft in enumerate(drafts)}
        markov = network.markov_head
        self._memory = LevelStates(states.new_zeros(len(drafts), 0) if markov is None else markov.start(len(drafts)))
        self._memory.start(drafts)

    def grow(self) -> None:
        """Grow all drafts to their end."""
        if self.logits.device.type == "cpu" and all(_is_plain_chain(draft) for draft in self.drafts):
            self._grow_chains()
            return
        growing = list(self.drafts)
        while growing := self._select_confident([draft for draft in growing if draft.builder.frontier]):
            add_level([draft.builder for draft in growing], NodeLogits(self._compute_level(growing), self.vocab_size))
        self._predict_acceptance([draft for draft in self.drafts if draft.builder.tree_spec.is_chain])

    def _grow_chains(self) -> None:
        """Grow chains of fixed length, whose tokens and q are those of `add_level`, in fewer operations."""
        tokens, memory, markov = (
            [draft.get_token(0) for draft in self.drafts],
            self._memory.states,
            self.network.markov_head,
        )
        for level in range(max(draft.builder.tree_spec.max_depth for draft in self.drafts)):
            if not any(draft.builder.frontier for draft in self.drafts):
                break
            logits = self.logits[:, level]
            if markov is not None:
                outputs, memory = markov.step(self._to_tensor(tokens), self.states[:, level], memory)
                logits = logits + markov(outputs).to(logits.dtype)
            chosen = self._choose_tokens(logits, level)
            for draft, token in zip(self.drafts, chosen, strict=True):
                if draft.builder.frontier:
                    draft.builder.add_children([[(token, 0.0)] if token >= 0 else []])
            tokens = [max(token, 0) for token in chosen]  # -1 = no token is possible
        self._predict_acceptance([*self.drafts])

    def _choose_tokens(self, logits: Tensor, node: int) -> list[int]:
        """Choose the token after a node of every chain: the likeliest one, or a sample; -1 = none is possible."""
        x = NodeLogits(logits if logits.dtype == torch.float64 else logits.float(), self.vocab_size).to_full_vocab()
        sampled = [i for i, draft in enumerate(self.drafts) if not draft.builder.is_greedy]
        tokens = argmax_tokens(x) if len(sampled) < len(self.drafts) else [-1] * len(sampled)
        if not sampled:
            return tokens
        builders = [self.drafts[i].builder for i in sampled]
        q = distribution(x[sampled], [builder.request.spec.sampling for builder in builders])
        for i, builder, row in zip(sampled, builders, q, strict=True):
            if builder.uses_q and builder.frontier:
                builder.draft_probs[node] = row
            key = draft_noise_key(builder.request, node, node, builder.draft_stream)
            tokens[i] = rng.race_argmax(row.numpy(), key) if row.sum() > 0 else -1
        return tokens

    def _predict_acceptance(self, chains: list[BlockDraft]) -> None:
        """Store the confidences of finished chains, for the lengths of later drafts."""
        head, nodes = self.network.confidence_head, [(d, node) for d in chains for node in range(len(d.builder.tokens))]
        if head is None or not nodes:
            return
        rows, levels = [self._index[id(draft)] for draft, _ in nodes], [node for _, node in nodes]
        before = self._to_tensor([draft.get_token(node) for draft, node in nodes])
        odds = head(self.states[rows, levels], self.network.markov_head, before)
        values, first = torch.sigmoid(odds).tolist(), 0
        for draft in chains:
            count = len(draft.builder.tokens)
            draft.confidences = tuple(values[first : first + count])
            first += count

    def _compute_level(self, growing: list[BlockDraft]) -> Tensor:
        """Compute the logits [R, V] after the frontier nodes."""
        rows, levels, tokens = self._list_frontier(growing)
        logits: Tensor = self.logits[rows, levels]
        markov = self.network.markov_head
        if markov is None:
            return logits
        before = self._memory.select_parents(growing)
        outputs, memory = markov.step(self._to_tensor(tokens), self.states[rows, levels], before)
        self._memory.record(growing, memory)
        bias: Tensor = markov(outputs)
        return logits + bias.to(logits.dtype)

    def _select_confident(self, growing: list[BlockDraft]) -> list[BlockDraft]:
        """Leave out chains whose next token is probably not accepted.

        The prediction depends on the tokens before that token alone, so the draft has its stated distribution.
        """
        head = self.network.confidence_head
        limited = [draft for draft in growing if draft.min_confidence]
        if head is None or not limited:
            return growing
        rows, levels, tokens = self._list_frontier(limited)
        odds = head(self.states[rows, levels], self.network.markov_head, self._to_tensor(tokens))
        for draft, probability in zip(limited, torch.sigmoid(odds).tolist(), strict=True):
            draft.survival *= probability
        return [draft for draft in growing if draft.survival >= draft.min_confidence]

    def _list_frontier(self, growing: Sequence[BlockDraft]) -> tuple[list[int], list[int], list[int]]:
        """List index of the draft, depth and token of every frontier node."""
        nodes = [(draft, node) for draft in growing for node in draft.builder.frontier]
        return (
            [self._index[id(draft)] for draft, _ in nodes],
            [draft.builder.depths[node] for draft, node in nodes],
            [draft.get_token(node) for draft, node in nodes],
        )

    def _to_tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self.states.device)


def _is_plain_chain(draft: BlockDraft) -> bool:
    """Return whether the draft is a chain of fixed length of likeliest tokens or of samples."""
    builder = draft.builder
    has_threshold = draft.min_confidence or builder.tree_spec.min_confidence
    return is_native_chain(builder) and not has_threshold
