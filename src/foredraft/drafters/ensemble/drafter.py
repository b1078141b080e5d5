"""The ensemble: several drafters as one, selected per request and step, or merged into one tree.

Members that read tokens alone (token members) draft first: their drafts are nearly free, and the match strength
predicts their acceptance. In a step at most one member with a forward pass of its own (model member) drafts, except in
mode "merge". A token member extends its draft if the budget has room. Every draft is compared with the committed
tokens, whether it was verified or not. selector.py selects, tree_merge.py merges.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from foredraft.drafters.draft import Draft, root_tree
from foredraft.drafters.ensemble.members import (
    EnsembleMember,
    ProposalRecord,
    make_single_tree,
    measure_match,
    merge_drafts,
)
from foredraft.drafters.ensemble.selector import (
    CandidateDraft,
    EnsembleSelector,
    ModelMemberStats,
    RequestChoices,
    RequestDraftPlan,
    SelectionMode,
    make_union_key,
)
from foredraft.drafters.ensemble.spec_union import SpecUnion
from foredraft.drafters.ensemble.tree_merge import MergedTree, compute_q_offsets, map_path_to_member, stack_trees
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

MAX_UNREAD_STEPS = 4  # steps without a draft; beyond, the time of a draft measures catching up, not drafting


class EnsembleDrafter:
    """Drafter of an ensemble.

    Args:
        members: members in order of preference.
        mode: see `ensemble.Config`.
        title: names of the members for logs and reports.
        clock: source of seconds.
    """

    def __init__(
        self,
        members: Sequence[EnsembleMember],
        mode: SelectionMode,
        title: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.members, self.mode = list(members), mode
        self.specs = SpecUnion(self.members, mode, title)
        self.token_member_indices = [i for i, member in enumerate(members) if member.is_token_only]
        self.model_stats = {i: ModelMemberStats(i) for i in range(len(members)) if i not in self.token_member_indices}
        self.selector = EnsembleSelector(list(self.model_stats.values()), mode)
        self.draft_counts: Counter[str] = Counter()  # drafts by the names of the members
        self._clock = clock
        self._node_maps: dict[
            tuple[int, int], list[int]
        ] = {}  # (member, b) -> node in the verified tree by member node
        self._records: dict[int, ProposalRecord] = {}  # by slot
        self._selected: list[ModelMemberStats] = []
        self._last_used: dict[tuple[int, int], int] = {}  # (member, slot) -> step of its last draft
        self._num_steps = 0
        self._propose_started = self._propose_ended = 0.0  # seconds, start and end of the last proposal
        self._num_rows = 0

    # -- interface of a drafter

    @property
    def spec(self) -> DrafterSpec:
        """Union of the members' specs."""
        return self.specs.read()

    def propose(self, batch: Batch) -> TokenTree:
        self._propose_started = self._clock()
        self._node_maps.clear()
        self._records.clear()
        rows = batch.find_drafting()
        all_choices = {b: self._collect_choices(batch, b) for b in rows}
        for index, stats in self.model_stats.items():
            stats.max_nodes = self.members[index].max_nodes
        self._selected, found = self.selector.select_members(list(all_choices.values()))
        plans = dict(zip(rows, found, strict=True))
        trees = [self._propose_with(batch, stats, n, all_choices, plans) for n, stats in enumerate(self._selected)]
        tree = self._merge(batch, trees, all_choices, plans)
        self._num_rows = sum(tree.sizes)
        self._propose_ended = self._clock()
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        now = self._clock()
        if self._records:
            self._update_estimates(batch, commit, now)
        for i, member in enumerate(self.members):
            if member.is_observed and not member.backoff.is_quarantined:
                member.sandboxed.observe(batch, self._make_member_view(i, batch, commit))
            member.backoff.release_if_due()
        self.specs.update_max_nodes()
        self._node_maps.clear()
        self._records.clear()

    def forget(self, slots: Sequence[int]) -> None:
        for member in self.members:
            member.forget(slots)
        for slot in slots:
            self.selector.estimates.forget(slot)
            self._records.pop(slot, None)
        self._last_used = {key: step for key, step in self._last_used.items() if key[1] not in slots}

    # -- proposing

    def _collect_choices(self, batch: Batch, b: int) -> RequestChoices:
        request, budget = batch.requests[b], batch.granted_nodes[b]
        self.selector.estimates.register(request.slot, not request.sampling.is_greedy)
        candidates = [
            candidate
            for i in self.token_member_indices
            if (candidate := self.members[i].draft_from_tokens(i, request, budget)) is not None
        ]
        is_chain = not request.rule.takes_trees
        if (
            len(candidates) > 1
            and self.mode != "sequence"
            and not is_chain
            and not any(o.is_sampled for o in candidates)
        ):
            candidates.append(merge_drafts(candidates, budget))
        step = self._records[request.slot] = ProposalRecord()
        for candidate in candidates:
            for i in candidate.members:
                self._node_maps[i, b] = [0]  # until its draft is selected, no node is its own
            if not candidate.is_sampled:  # a sampled draft is recorded only if it is verified
                candidate.past_index = step.add_draft(candidate.key, candidate.draft.tokens, candidate.draft.parents)
        is_sampled = not request.sampling.is_greedy and request.rule.uses_q
        stale = tuple(i for i in self.model_stats if not self._is_fresh(i, request.slot))
        return RequestChoices(request.slot, budget, candidates, not is_chain, not is_chain and not is_sampled, stale)

    def _propose_with(
        self,
        batch: Batch,
        stats: ModelMemberStats,
        rank: int,
        all_choices: dict[int, RequestChoices],
        plans: dict[int, RequestDraftPlan],
    ) -> TokenTree:
        """Let a member draft for the requests whose plans have nodes for it. `rank`: 0 = first selected member."""
        member, budgets = self.members[stats.index], [0] * len(batch)
        for b, plan in plans.items():
            budgets[b] = min(plan.node_budget, stats.max_nodes) if rank == 0 or all_choices[b].may_merge_all else 0
        started = self._clock()
        tree = member.sandboxed.propose(replace(batch, granted_nodes=tuple(budgets)))
        seconds = self._clock() - started
        deepest, is_fresh = 0, True
        for b, budget in enumerate(budgets):
            if budget:
                depth = max(tree.depths[b])
                stats.record_depth(budget, depth)
                deepest = max(deepest, depth)
                slot = batch.requests[b].slot
                is_fresh &= self._is_fresh(stats.index, slot)
                self._last_used[stats.index, slot] = self._num_steps
        if deepest:
            stats.record_time(deepest, seconds, is_fresh)
        return tree

    def _is_fresh(self, index: int, slot: int) -> bool:
        return self._num_steps - self._last_used.get((index, slot), -MAX_UNREAD_STEPS - 1) <= MAX_UNREAD_STEPS

    def _merge(
        self,
        batch: Batch,
        trees: Sequence[TokenTree],
        all_choices: dict[int, RequestChoices],
        plans: dict[int, RequestDraftPlan],
    ) -> TokenTree:
        """Build all trees by their plans. Returns the only member's tree itself if nothing was added to it."""
        first = trees[0] if trees else root_tree(batch)
        rows = compute_q_offsets(batch, first) if first.q is not None else [0] * len(batch)
        merged_trees, is_whole = [], len(trees) == 1
        for b in range(len(batch)):
            merged = MergedTree.from_tree(first, b, rows[b])
            size = merged.num_draft_nodes
            if b in all_choices:
                merged = self._build_tree(batch, b, merged, trees[1:], all_choices[b], plans[b])
                is_whole &= merged.num_draft_nodes == size
            merged_trees.append(merged)
        return first if is_whole else stack_trees(batch, merged_trees)

    def _build_tree(
        self,
        batch: Batch,
        b: int,
        merged: MergedTree,
        other_trees: Sequence[TokenTree],
        choices: RequestChoices,
        plan: RequestDraftPlan,
    ) -> MergedTree:
        """Build one request's tree: drafts of model members, then the token members' candidate, else an extension."""
        request, step = batch.requests[b], self._records[batch.requests[b].slot]
        candidate = plan.candidate
        if merged.num_draft_nodes:
            self._record_draft(self._selected[0], step, choices, merged.tokens[1:], merged.parents[1:])
        for stats, tree in zip(self._selected[1:], other_trees, strict=True):
            tokens, parents = tree.tokens[b][1:], tree.parents[b][1:]
            if tokens:
                self._node_maps[stats.index, b] = merged.graft(Draft(tuple(tokens), tuple(parents)), choices.budget)
                self._record_draft(stats, step, choices, tokens, parents)
        if candidate is None and not merged.num_draft_nodes:  # the model member had no draft
            candidate = self.selector.select_candidate(choices).candidate
        if candidate is not None:
            self.draft_counts["+".join(self.members[i].name for i in candidate.members)] += 1
            if not candidate.is_sampled:
                self._graft(merged, b, candidate, choices.budget)
            elif not merged.num_draft_nodes:
                step.add_draft(candidate.key, candidate.draft.tokens, candidate.draft.parents)
                del self._node_maps[candidate.members[0], b]
                return make_single_tree(candidate.draft, batch.get_root_token(b))
        elif merged.num_draft_nodes:
            self._extend(merged, request, self._selected[0], choices.budget)
        return merged

    def _record_draft(
        self,
        stats: ModelMemberStats,
        record: ProposalRecord,
        choices: RequestChoices,
        tokens: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        self.draft_counts[self.members[stats.index].name] += 1
        trial = record.add_draft(stats.key, tokens, parents)
        record.union_pairs += [
            (make_union_key(stats, candidate), candidate.past_index, trial)
            for candidate in choices.candidates
            if candidate.past_index >= 0
        ]

    def _graft(self, merged: MergedTree, b: int, candidate: CandidateDraft, budget: int) -> None:
        node_map = merged.graft(candidate.draft, budget)
        for i in candidate.members:  # a joint candidate keeps no node map of its members; token members do not need one
            self._node_maps[i, b] = node_map if len(candidate.members) == 1 else [0]

    def _extend(self, merged: MergedTree, request: Request, stats: ModelMemberStats, budget: int) -> None:
        """Extend a model member's draft below its tip by a token member's draft."""
        num_free = budget - merged.num_draft_nodes
        if num_free <= 0 or request.max_draft_depth <= merged.num_draft_nodes:
            return
        tip, path = merged.find_tip()
        if path[-1] in request.end_ids:
            return
        first, later = self.selector.estimates.estimate_rates(request.slot, stats.key)
        for i in self.token_member_indices:
            member = self.members[i]
            source, key = member.token_drafter, (("below", i), 0)
            if source is None:
                continue
            draft = (
                member.call_drafter("extend", request, partial(source.continue_draft, request, path, num_free))
                or Draft()
            )
            reach = first * later ** (len(path) - 1)
            if (
                draft.tokens
                and draft.q is None
                and self.selector.should_extend(request.slot, key, reach, len(draft.tokens))
            ):
                merged.graft(draft, budget, tip)
                step = self._records[request.slot]
                step.extension_key, step.extension_path, step.extension_tokens = key, tuple(path), draft.tokens
                return

    # -- estimates

    def _update_estimates(self, batch: Batch, commit: Commit, now: float) -> None:
        self._num_steps += 1
        estimates, total = self.selector.estimates, 0
        for b, request in enumerate(batch.requests):
            step = self._records.get(request.slot)
            text = commit.tokens[b][batch.num_new_tokens[b] - 1 :]
            total += len(text)
            if step is None or not text:
                continue
            found = [measure_match(trial.tokens, trial.parents, text) for trial in step.past_drafts]
            for trial, (num_accepted, num_tested) in zip(step.past_drafts, found, strict=True):
                estimates.update(request.slot, trial.key, num_accepted, num_tested)
            for key, one, other in step.union_pairs:
                num_accepted = max(found[one][0], found[other][0])
                estimates.update(request.slot, key, num_accepted, max(found[one][1], found[other][1]))
            if step.extension_key is not None and tuple(text[: len(step.extension_path)]) == step.extension_path:
                tail = step.extension_tokens
                estimates.update(
                    request.slot,
                    step.extension_key,
                    *measure_match(tail, range(len(tail)), text[len(step.extension_path) :]),
                )
        self.selector.record_selection(self._selected)
        if max(batch.num_new_tokens) == 1:  # a pass with prompt chunks does not measure the cost of draft rows
            self.selector.pass_cost.update(self._num_rows, now - self._propose_ended)
            self.selector.record_step(total, now - self._propose_started)

    def _make_member_view(self, index: int, batch: Batch, commit: Commit) -> Commit:
        """Return the commit as the member would see it alone: its own node indices, its own layers."""
        changes: dict[str, Any] = {}
        if any(len(commit.paths[b]) > batch.num_new_tokens[b] for (j, b) in self._node_maps if j == index):
            changes["paths"] = [
                map_path_to_member(path, batch.num_new_tokens[b] - 1, self._node_maps[index, b])
                if (index, b) in self._node_maps
                else path
                for b, path in enumerate(commit.paths)
            ]
        if commit.features is not None:
            features = self.specs.select_features(index, commit.features)
            if features is not commit.features:
                changes["features"] = features
        return replace(commit, **changes) if changes else commit
