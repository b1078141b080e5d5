"""Suffix decoding: drafts by the counts of the tokens that followed the longest matching suffix of the sequence.

There are three sources: the request's own sequence; with `store_tokens` past outputs of the same tenant; with `files`
texts read at start. Each is a suffix automaton (`automaton.py`) with the current match of the sequence, so adding and
matching a token costs O(1). The sources are blended into one distribution. The longest context comes first; it
backs off to the next shorter one. Equal lengths are in the order of the sources, and the newest output comes first.

Reference: SuffixDecoding (2411.04975), SAM-Decoding (2411.10666), REST (2311.08252).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.common.chain_loop import is_native_chain, plan_sampling
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.common.tree_level import add_level
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.interface import NO_DRAFT
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.drafters.suffix.automaton import (
    MAX_CONTEXT_LENGTH,
    Continuations,
    RankedDraftSpec,
    SuffixAutomaton,
    SuffixMatch,
    build_discount_table,
)
from foredraft.drafters.suffix.native_automaton import get_automaton_class
from foredraft.drafters.suffix.native_chain import create_chain_sampler
from foredraft.drafters.suffix.output_cache import NUM_SECTIONS, SuffixCache, SuffixCacheSection, select_longest
from foredraft.request import Batch, Request, RequestStatus
from foredraft.tree import Commit, TokenTree

# Subtracted from every count of a context of 1, 2, ... tokens; the last value holds for all longer contexts. They
# minimise the loss in bits per token on greedy and sampled code of the built-in target. The values published for the
# sequence memoizer on prose are close to them.
DISCOUNTS = (0.75, 0.7, 0.75, 0.75, 0.8, 0.95)
MIN_STORE_TOKENS = 256  # smallest store
DEFAULT_CONTEXT = 2048  # longest output in tokens, without a target


@dataclass(frozen=True)
class Config:
    """Shape of the drafts and sources beside the request's own sequence.

    A draft is a chain of at most num_speculative_tokens, or a tree if `tree_nodes` or `top_k` is set.

    Attributes:
        min_confidence: a draft ends if its likeliest path is less likely than this.
        min_match: fewest matched tokens of a draft.
        tokens_per_match: draft depth per matched token, in addition to `free_tokens`.
        free_tokens: draft depth that needs no match length.
        tree_nodes: number of the likeliest nodes in a tree.
        top_k: most children of a node in a tree.
        store_tokens: capacity of the store of past outputs, in tokens. A request sees only outputs with its cache salt.
        store_outputs: most outputs in the store; 0 = no store. Without `store_tokens` they may have any length. None =
            limited by `store_tokens` alone.
        store_tenants: most tenants (cache salts) in the store.
        files: further texts to draft from: plain text, .jsonl, or .npy of token ids.
    """

    min_confidence: float = 0.1
    min_match: int = 1
    tokens_per_match: float = 4.0
    free_tokens: int = 2
    tree_nodes: int | None = None
    top_k: int | None = None
    store_tokens: int = 0
    store_outputs: int | None = None
    store_tenants: int = 64
    files: str | tuple[str, ...] = ()

    def compute_store_capacity(self, context_length: int) -> int:
        """Return the capacity of the store in tokens; 0 = no store.

        Args:
            context_length: longest sequence of the target, in tokens.
        """
        if self.store_outputs is None or (self.store_outputs and self.store_tokens):
            return self.store_tokens
        return (self.store_outputs + NUM_SECTIONS) * context_length if self.store_outputs else 0


@dataclass
class SuffixState:
    """One request's automaton, its matches in every source, and the expected result of its last draft."""

    request: Request
    automaton: SuffixAutomaton
    num_read: int = 0  # tokens in the automaton
    # by section: the section's version at the time, and the match
    cache_matches: dict[SuffixCacheSection, tuple[int, SuffixMatch]] = field(default_factory=dict)
    file_matches: list[SuffixMatch] = field(default_factory=list)
    matches: list[SuffixMatch] = field(default_factory=list)  # of all sources after the last update
    match_length: int = 0  # tokens of the longest match after the last update
    expected_accepted: float = 0.0  # expected accepted tokens of that draft by its own probabilities

    def update(self, sections: Sequence[SuffixCacheSection]) -> None:
        """Read the new committed tokens, and update the matches."""
        request = self.request
        if self.num_read == request.num_tokens and self.matches and not sections:  # a section may have changed
            return
        new_tokens = request.get_tokens(self.num_read, request.num_tokens)
        self.automaton.extend(new_tokens)
        self.num_read = request.num_tokens
        self.file_matches = self.automaton.advance(self.file_matches, new_tokens)
        self.cache_matches = {section: self._match_section(section, new_tokens) for section in sections}
        self.matches = [
            self.automaton.match_end(),
            *select_longest(match for _, match in self.cache_matches.values()),
            *self.file_matches,
        ]
        self.match_length = max(match.length for match in self.matches)

    def _match_section(self, section: SuffixCacheSection, new_tokens: list[int]) -> tuple[int, SuffixMatch]:
        version, match = self.cache_matches.get(section, (-1, SuffixMatch(section.automaton)))
        if version != section.version:  # a changed section may have a longer match
            match = SuffixMatch(section.automaton)
            new_tokens = self.request.get_tokens(max(0, self.num_read - MAX_CONTEXT_LENGTH), self.num_read)
        return section.version, self.automaton.advance([match], new_tokens)[0]


class SuffixDrafter:
    """Drafter from suffix matches. No draft without a match."""

    def __init__(
        self,
        config: Config,
        tree_spec: TreeSpec,
        context: DrafterContext,
        file_automaton: SuffixAutomaton | None = None,
    ) -> None:
        self.config = config
        self.tree_spec = tree_spec
        context_length = DEFAULT_CONTEXT if context.target is None else context.target.context_length
        capacity = config.compute_store_capacity(context_length)
        self.spec = DrafterSpec(
            tree_spec.max_nodes, reads_commits=capacity > 0, is_token_source=True, samples_drafts=True
        )
        self.context = context
        self.discount_table = build_discount_table(DISCOUNTS)
        self.automaton_class = get_automaton_class()
        self.chain_sampler = create_chain_sampler(context.vocab_size, self.discount_table)
        self.file_automaton = file_automaton
        self.cache = (
            SuffixCache(capacity, config.store_tenants, self.automaton_class, config.store_outputs)
            if capacity
            else None
        )
        self._states: dict[int, SuffixState] = {}  # by slot
        self._requests: dict[int, Request] = {}  # by slot; empty without a store
        self._released: list[Request] = []  # requests that left their slots since the last `_cache_finished`

    def get_match_length(self, slot: int) -> int:
        """Return the longest match in tokens at a slot's last draft; 0 without one."""
        state = self._states.get(slot)
        return 0 if state is None else state.match_length

    def get_expected_accepted(self, slot: int) -> float:
        """Return the expected accepted tokens of a slot's last draft; 0 without one."""
        state = self._states.get(slot)
        return 0.0 if state is None else state.expected_accepted

    def propose(self, batch: Batch) -> TokenTree:
        self._cache_finished()
        return to_token_tree(
            batch, {b: self._draft_request(batch.requests[b], batch.granted_nodes[b]) for b in batch.find_drafting()}
        )

    def draft(self, request: Request, budget: int) -> Draft:
        self._cache_finished()
        return self._draft_request(request, budget)

    def match_strength(self, request: Request) -> int:
        self._cache_finished()
        match_length = self._update_state(request).match_length
        return match_length if match_length >= self.config.min_match else NO_DRAFT

    def continue_draft(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """Draft by rank for every sampling setting, as if `path` were committed."""
        config = self.config
        matches = self.automaton_class.advance(self._update_state(request).matches, path)
        matched = max(match.length for match in matches)
        depth = min(self._limit_depth(matched, request.max_draft_depth - len(path)), budget)
        if matched < config.min_match or depth < 1:
            return Draft()
        draft = self.automaton_class.draft(
            matches, self.discount_table, RankedDraftSpec(depth, depth, 1, config.min_confidence, request.spec.end_ids)
        )
        return Draft(tuple(draft.tokens), tuple(draft.parents))

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Record the requests of the slots for the store. Tokens are read in `propose`."""
        if self.cache is not None:
            self._cache_finished()
            self._requests.update((request.slot, request) for request in batch.requests)

    def forget(self, slots: Sequence[int]) -> None:
        self._cache_finished()
        for slot in slots:
            self._states.pop(slot, None)
            if slot in self._requests:
                self._released.append(self._requests.pop(slot))

    def _cache_finished(self) -> None:
        """Store the outputs of finished requests.

        `forget` cannot distinguish a finished request from a preempted one; at the next call the status can.
        """
        for request in self._released:
            if request.status is RequestStatus.FINISHED and self.cache is not None:
                self.cache.add(request.spec.options.salt, request.output)
        self._released.clear()

    def _update_state(self, request: Request) -> SuffixState:
        """Return a request's state, updated to its last committed token."""
        state = self._states.get(request.slot)
        if state is None or state.request is not request or state.num_read > request.num_tokens:
            file_matches = [] if self.file_automaton is None else [SuffixMatch(self.file_automaton)]
            state = self._states[request.slot] = SuffixState(request, self.automaton_class(), file_matches=file_matches)
        state.update(() if self.cache is None else self.cache.list_sections(request.spec.options.salt))
        return state

    @property
    def _min_path_prob(self) -> float:
        """Probability below which a path ends."""
        return max(self.config.min_confidence, 1e-9)

    def _limit_depth(self, match_length: int, max_depth: int) -> int:
        """Return the largest draft depth for a match length."""
        return int(
            min(
                match_length * self.config.tokens_per_match + self.config.free_tokens,
                self.context.num_speculative_tokens,
                max_depth,
            )
        )

    def _draft_request(self, request: Request, budget: int) -> Draft:
        state, config, spec = self._update_state(request), self.config, request.spec
        matches = state.matches
        state.expected_accepted = 0.0
        plan = self.tree_spec.restrict(
            self._limit_depth(state.match_length, request.max_draft_depth), budget, not spec.rule.takes_trees
        )
        if state.match_length < config.min_match or plan.max_nodes < 1 or plan.max_depth < 1:
            return Draft()
        if spec.sampling.is_greedy and not spec.sampling.shapes_logits:
            shape = RankedDraftSpec(plan.max_nodes, plan.max_depth, plan.width, config.min_confidence, spec.end_ids)
            draft = self.automaton_class.draft(matches, self.discount_table, shape)
            state.expected_accepted = sum(draft.path_probs)
            return Draft(tuple(draft.tokens), tuple(draft.parents))
        builder = TreeBuilder(request, plan)
        chain = self._sample_chain(builder, state)
        return self._grow_tree(builder, state, matches) if chain is None else chain

    def _sample_chain(self, builder: TreeBuilder, state: SuffixState) -> Draft | None:
        """Sample a chain natively; None if that is left to `_grow_tree`."""
        if self.chain_sampler is None or not is_native_chain(builder):
            return None
        chain = self.chain_sampler.sample(state.matches, plan_sampling(builder), self._min_path_prob)
        if chain is None:
            return None
        state.expected_accepted = chain.expected_accepted
        return Draft.from_chain(chain.tokens, None if chain.q is None else chain.q.to(self.context.device))

    def _grow_tree(self, builder: TreeBuilder, state: SuffixState, matches: list[SuffixMatch]) -> Draft:
        """Grow a draft level by level, for sampling or logits that depend on earlier tokens."""
        # by node: its matches, and the probability that its path is accepted
        node_matches, path_probs = {0: matches}, {0: 1.0}
        while True:
            continuations_by_node = {
                node: self.automaton_class.predict(node_matches[node], self.discount_table) for node in builder.frontier
            }
            builder.frontier = [
                n
                for n, continuations in continuations_by_node.items()
                if continuations.tokens and path_probs[n] * continuations.probs[0] >= self._min_path_prob
            ]
            if not builder.frontier:
                return builder.to_draft()
            num_before = len(builder.tokens)
            add_level(
                [builder],
                NodeLogits(
                    self._make_logits([continuations_by_node[n] for n in builder.frontier]), self.context.vocab_size
                ),
            )
            for node in range(num_before + 1, len(builder.tokens) + 1):
                token, parent = builder.tokens[node - 1], builder.parents[node - 1]
                prob = dict(zip(*continuations_by_node[parent], strict=True)).get(token, 0.0)
                state.expected_accepted += path_probs[parent] * prob
                # with sampled nodes the growth may depend on their distributions, never on the sampled tokens
                path_probs[node] = path_probs[parent] * (
                    continuations_by_node[parent].probs[0] if builder.uses_q else prob
                )
                node_matches[node] = self.automaton_class.advance(node_matches[parent], [token])

    def _make_logits(self, continuations: Sequence[Continuations]) -> Tensor:
        """Convert continuations to logits [R, V]; -inf for tokens that never followed.

        The logarithm is that of the C library, so the native chains have the same bits.
        """
        logits = torch.full((len(continuations), self.context.vocab_size), -math.inf, dtype=torch.float32)
        for row, one in zip(logits, continuations, strict=True):
            row[one.tokens] = torch.tensor([math.log(prob) for prob in one.probs])
        return logits.to(self.context.device)
