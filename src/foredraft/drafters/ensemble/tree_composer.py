"""Building of the verified trees of an ensemble by the plans of its selector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from foredraft.drafters.draft import Draft, root_tree
from foredraft.drafters.ensemble.member_stats import MemberStats
from foredraft.drafters.ensemble.members import EnsembleMember, compute_depth, make_single_tree
from foredraft.drafters.ensemble.node_maps import NodeMaps
from foredraft.drafters.ensemble.proposal_records import ProposalRecord, StepRecords
from foredraft.drafters.ensemble.selector import (
    CandidateDraft,
    EnsembleSelector,
    RequestChoices,
    RequestDraftPlan,
    make_union_key,
)
from foredraft.drafters.ensemble.tree_merge import MergedTree, compute_q_offsets, stack_trees
from foredraft.request import Batch, Request
from foredraft.tree import TokenTree


@dataclass(frozen=True)
class MemberProposal:
    """Trees of one model member for the requests of a step."""

    stats: MemberStats
    tree: TokenTree
    q_offsets: Sequence[int]  # [B] first row of q of each request


class TreeComposer:
    """Builder of one tree per request, from the drafts of model members and token members.

    Args:
        members: members in order of preference.
        selector: estimates of the members.
        node_maps: receives the members' nodes of this step.
        records: receives the drafts of this step.
        clock: source of seconds.

    Attributes:
        sampled: costs of the token members that made a draft after the selection, in the last step.
    """

    def __init__(
        self,
        members: Sequence[EnsembleMember],
        selector: EnsembleSelector,
        node_maps: NodeMaps,
        records: StepRecords,
        clock: Callable[[], float],
    ) -> None:
        self.members = members
        self.selector = selector
        self.node_maps = node_maps
        self.records = records
        self.clock = clock
        self.sampled: list[MemberStats] = []

    def compose(
        self,
        batch: Batch,
        selected: Sequence[MemberStats],
        trees: Sequence[TokenTree],
        all_choices: dict[int, RequestChoices],
        plans: dict[int, RequestDraftPlan],
    ) -> TokenTree:
        """Build all trees by their plans.

        Args:
            batch: requests of the step.
            selected: model members that drafted.
            trees: their trees.
            all_choices: candidates by batch index.
            plans: plans by batch index.

        Returns:
            The trees; the only member's tree itself if nothing was added to it.
        """
        self.sampled = []
        no_offsets = [0] * len(batch)
        proposals = [
            MemberProposal(stats, tree, no_offsets if tree.q is None else compute_q_offsets(batch, tree))
            for stats, tree in zip(selected, trees, strict=True)
        ]
        first, rows = (trees[0], proposals[0].q_offsets) if trees else (root_tree(batch), no_offsets)
        merged_trees, is_whole = [], len(trees) == 1
        for b in range(len(batch)):
            merged = MergedTree.from_tree(first, b, rows[b])
            size = merged.num_draft_nodes
            if b in all_choices:
                merged = self._build_tree(batch, b, merged, proposals, all_choices[b], plans[b])
                is_whole &= merged.num_draft_nodes == size
            merged_trees.append(merged)
        return first if is_whole else stack_trees(batch, merged_trees)

    def _build_tree(
        self,
        batch: Batch,
        b: int,
        merged: MergedTree,
        proposals: Sequence[MemberProposal],
        choices: RequestChoices,
        plan: RequestDraftPlan,
    ) -> MergedTree:
        """Build one request's tree: drafts of model members, then the token members' candidate, else an extension."""
        request, step = batch.requests[b], self.records.by_slot[batch.requests[b].slot]
        candidate = plan.candidate
        if merged.num_draft_nodes:
            self._record_draft(proposals[0].stats, step, choices, merged.tokens[1:], merged.parents[1:])
        for proposal in proposals[1:]:
            stats, tree = proposal.stats, proposal.tree
            tokens, parents = tree.tokens[b][1:], tree.parents[b][1:]
            if tokens:
                if choices.is_sampled:
                    node_map = merged.graft_samples(tree, b, proposal.q_offsets[b])
                else:
                    node_map = merged.graft(Draft(tuple(tokens), tuple(parents)), choices.budget)
                self.node_maps.set(stats.index, b, node_map)
                self._record_draft(stats, step, choices, tokens, parents)
        if candidate is None and not merged.num_draft_nodes:  # the model member had no draft
            candidate = self.selector.select_candidate(choices).candidate
        if candidate is not None:
            if not candidate.is_sampled:
                self._graft(merged, b, candidate, choices.budget)
            elif not merged.num_draft_nodes:
                draft = candidate.draft or self._make_draft(request, candidate)
                step.add_draft(candidate.key, draft.tokens, draft.parents)
                self.node_maps.drop(candidate.members[0], b)
                return make_single_tree(draft, batch.get_root_token(b))
        elif merged.num_draft_nodes:
            self._extend(merged, request, proposals[0].stats, choices.budget)
        return merged

    def _make_draft(self, request: Request, candidate: CandidateDraft) -> Draft:
        """Make the draft of a selected candidate, and record its time."""
        index = candidate.members[0]
        stats, started = self.selector.costs.sampling_stats[index], self.clock()
        draft = self.members[index].make_draft(request, candidate.size)
        depth = compute_depth(draft.parents)
        stats.record_depth(candidate.size, depth)
        stats.record_time(depth, self.clock() - started, is_fresh=True)
        self.sampled.append(stats)
        return draft

    def _record_draft(
        self,
        stats: MemberStats,
        record: ProposalRecord,
        choices: RequestChoices,
        tokens: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        trial = record.add_draft(stats.key, tokens, parents)
        record.union_pairs += [
            (make_union_key(stats, candidate), candidate.past_index, trial)
            for candidate in choices.candidates
            if candidate.past_index >= 0
        ]

    def _graft(self, merged: MergedTree, b: int, candidate: CandidateDraft, budget: int) -> None:
        assert candidate.draft is not None  # only drafts of samples are made late
        node_map = merged.graft(candidate.draft, budget)
        for i in candidate.members:  # a joint candidate keeps no node map of its members; token members do not need one
            self.node_maps.set(i, b, node_map if len(candidate.members) == 1 else [0])

    def _extend(self, merged: MergedTree, request: Request, stats: MemberStats, budget: int) -> None:
        """Extend a model member's draft below its tip by a token member's draft."""
        num_free = budget - merged.num_draft_nodes
        if num_free <= 0 or request.max_draft_depth <= merged.num_draft_nodes:
            return
        tip, path = merged.find_tip()
        if path[-1] in request.spec.end_ids:
            return
        first, later = self.selector.estimates.estimate_rates(request.slot, stats.key)
        reach = first * later ** (len(path) - 1)
        for i, member in enumerate(self.members):
            source, key = member.token_drafter, (("below", i), 0)
            if source is None or not self.selector.should_try_extension(request.slot, key, reach):
                continue
            started = self.clock()
            draft = (
                member.call_drafter("extend", request, partial(source.continue_draft, request, path, num_free))
                or Draft()
            )
            self.selector.costs.extension_cost.update(len(draft.tokens), self.clock() - started)
            if (
                draft.tokens
                and draft.q is None
                and self.selector.should_extend(request.slot, key, reach, len(draft.tokens))
            ):
                merged.graft(draft, budget, tip)
                step = self.records.by_slot[request.slot]
                step.extension_key, step.extension_path, step.extension_tokens = key, tuple(path), draft.tokens
                return
