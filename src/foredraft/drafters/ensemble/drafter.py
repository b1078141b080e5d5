"""The ensemble: several drafters as one, selected per request and step, or merged into one tree.

Members that read tokens alone (token members) draft first: their drafts are nearly free, and the match strength
predicts their acceptance. In a step at most one member with a forward pass of its own (model member) drafts, except in
mode "merge". A token member extends its draft if the budget has room. Every draft is compared with the committed
tokens, whether it was verified or not. selector.py selects, tree_merge.py merges.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.drafters.ensemble.kind_costs import KindCosts
from foredraft.drafters.ensemble.member_stats import MemberStats
from foredraft.drafters.ensemble.members import EnsembleMember, is_draft_sampled, merge_drafts
from foredraft.drafters.ensemble.node_maps import NodeMaps
from foredraft.drafters.ensemble.proposal_records import StepRecords
from foredraft.drafters.ensemble.proposal_timer import ProposalTimer
from foredraft.drafters.ensemble.recent_use import RecentUse
from foredraft.drafters.ensemble.selector import (
    EnsembleSelector,
    RequestChoices,
    RequestDraftPlan,
    SelectionMode,
)
from foredraft.drafters.ensemble.spec_union import SpecUnion
from foredraft.drafters.ensemble.tree_composer import TreeComposer
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


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
        model_stats = [MemberStats(i) for i, member in enumerate(members) if not member.is_token_only]
        sampling_stats = {i: MemberStats(i) for i, member in enumerate(members) if member.samples_drafts}
        self.selector = EnsembleSelector(KindCosts(model_stats, sampling_stats), mode)
        self._timer = ProposalTimer(clock)
        self._use = RecentUse()
        self._node_maps = NodeMaps()
        self._records = StepRecords()
        self._composer = TreeComposer(self.members, self.selector, self._node_maps, self._records, clock)
        self._selected: list[MemberStats] = []

    @property
    def spec(self) -> DrafterSpec:
        """Union of the members' specs."""
        return self.specs.read()

    def propose(self, batch: Batch) -> TokenTree:
        self._timer.start()
        self._node_maps.clear()
        self._records.clear()
        rows = batch.find_drafting()
        self.selector.select_kind(any(not batch.requests[b].spec.sampling.is_greedy for b in rows))
        all_choices = {b: self._collect_choices(batch, b) for b in rows}
        for stats in self.selector.costs.all_stats:
            stats.max_nodes = self.members[stats.index].max_nodes
        self._selected, found = self.selector.select_members(list(all_choices.values()))
        plans = dict(zip(rows, found, strict=True))
        trees = [self._propose_with(batch, stats, n, all_choices, plans) for n, stats in enumerate(self._selected)]
        tree = self._composer.compose(batch, self._selected, trees, all_choices, plans)
        self._timer.end(sum(tree.sizes))
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        now = self._timer.clock()
        if self._records.by_slot:
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
        self._records.forget(slots)
        self._use.forget(slots)

    def _collect_choices(self, batch: Batch, b: int) -> RequestChoices:
        request, budget = batch.requests[b], batch.granted_nodes[b]
        self.selector.estimates.register(request.slot, not request.spec.sampling.is_greedy)
        can_wait = self.mode != "merge"  # merged drafts are all needed
        candidates = [
            candidate
            for i, member in enumerate(self.members)
            if (candidate := member.find_candidate(i, request, budget, can_wait)) is not None
        ]
        is_chain = not request.spec.rule.takes_trees
        if (
            len(candidates) > 1
            and self.mode != "sequence"
            and not is_chain
            and not any(o.is_sampled for o in candidates)
        ):
            candidates.append(merge_drafts(candidates, budget))
        step = self._records.start(request.slot)
        for candidate in candidates:
            for i in candidate.members:
                self._node_maps.set(i, b, [0])  # until its draft is selected, no node is its own
            if candidate.draft is not None and not candidate.is_sampled:  # samples are recorded only if verified
                candidate.past_index = step.add_draft(candidate.key, candidate.draft.tokens, candidate.draft.parents)
        model_indices = [stats.index for stats in self.selector.costs.model_stats]
        stale = tuple(i for i in model_indices if not self._use.is_fresh(i, request.slot))
        unready = tuple(i for i in model_indices if request.lacks_states and self.members[i].reads_states)
        is_sampled = is_draft_sampled(request)
        return RequestChoices(request.slot, budget, candidates, not is_chain, is_sampled, stale, unready)

    def _propose_with(
        self,
        batch: Batch,
        stats: MemberStats,
        rank: int,
        all_choices: dict[int, RequestChoices],
        plans: dict[int, RequestDraftPlan],
    ) -> TokenTree:
        """Let a member draft for the requests whose plans have nodes for it.

        `rank`: 0 = first selected member. It is also the member's stream of draft noise, so all samples of a step are
        independent.
        """
        member, budgets = self.members[stats.index], [0] * len(batch)
        for b, plan in plans.items():
            budgets[b] = min(plan.get_budget(rank), stats.max_nodes) if rank == 0 or all_choices[b].may_merge else 0
        started = self._timer.clock()
        tree = member.sandboxed.propose(replace(batch, granted_nodes=tuple(budgets), draft_stream=rank))
        seconds = self._timer.clock() - started
        deepest, is_fresh = 0, True
        for b, budget in enumerate(budgets):
            if budget:
                depth = max(tree.depths[b])
                stats.record_depth(budget, depth)
                deepest = max(deepest, depth)
                slot = batch.requests[b].slot
                is_fresh &= self._use.is_fresh(stats.index, slot)
                self._use.record(stats.index, slot)
        if deepest:
            stats.record_time(deepest, seconds, is_fresh)
        return tree

    def _update_estimates(self, batch: Batch, commit: Commit, now: float) -> None:
        self._use.num_steps += 1
        num_tokens = self._records.update_estimates(self.selector.estimates, batch, commit)
        for slot, record in self._records.by_slot.items():
            keys = {draft.key for draft in record.past_drafts}
            for stats in self.selector.costs.model_stats:
                if stats.key not in keys:
                    self.selector.estimates.fade_request(slot, stats.key)
        self.selector.record_selection([*self._selected, *self._composer.sampled])
        if max(batch.num_new_tokens) == 1:  # a pass with prompt chunks does not measure the cost of draft rows
            self._timer.record(self.selector.costs, num_tokens, now)

    def _make_member_view(self, index: int, batch: Batch, commit: Commit) -> Commit:
        """Return the commit as the member would see it alone: its own node indices, its own layers."""
        paths, features = self._node_maps.map_paths(index, batch, commit), commit.path_features
        if features is not None:
            features = self.specs.select_features(index, features)
        if paths is commit.paths and features is commit.path_features:
            return commit
        return replace(commit, paths=paths, path_features=features)
