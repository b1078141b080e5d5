"""Selection of the members that draft in a step, by expected tokens per second. No tensors, no clock.

The value of a draft is (expected tokens gained) - (seconds added) * (current tokens per second). A draft of positive
value raises the rate; the largest value maximises it after the rate has converged (Dinkelbach's method). A model
member's pass is shared by all requests and is charged once.

A selection depends on earlier steps and on committed tokens (match strength and size of a draft of a token member),
never on tokens sampled in this step. So rejection sampling stays lossless.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from foredraft.drafters.draft import Draft
from foredraft.drafters.ensemble.kind_costs import KindCosts
from foredraft.drafters.ensemble.member_stats import MIN_DRAFTS, MemberStats
from foredraft.drafters.ensemble.value import EstimateKey, ValueEstimates, estimate_gain

SelectionMode = Literal["auto", "merge", "sequence"]
SELECTION_MODES: tuple[SelectionMode, ...] = ("auto", "merge", "sequence")
CATCH_UP_STEPS = 8.0  # steps that share the time in which a member reads the tokens that it has not read yet
MIN_MERGE_NODES = 4  # smallest budget for which two drafts are merged


@dataclass(slots=True)
class CandidateDraft:
    """A draft of token members that the selection weighs against those of model members."""

    draft: Draft | None  # None = it is made after the selection, because that takes time
    key: EstimateKey
    members: tuple[int, ...]
    size: int
    depth: float
    is_sampled: bool  # it has a q; the selection must not depend on its tokens
    past_index: int = -1  # index in ProposalRecord.past_drafts; -1 = not recorded
    rates: tuple[float, float] = (0.0, 0.0)  # acceptance rates of the first node and of later ones


@dataclass(slots=True)
class RequestChoices:
    """Candidates and limits of one request in a step."""

    slot: int
    budget: int
    candidates: list[CandidateDraft]  # two or more deterministic drafts are followed by their union
    may_merge: bool = True
    is_sampled: bool = False  # drafts of model members are samples, none of which may be dropped
    stale_members: tuple[int, ...] = ()  # model members that must catch up before they draft
    unready_members: tuple[int, ...] = ()  # model members that propose nothing: they missed states of the request


@dataclass(slots=True)
class RequestDraftPlan:
    """Draft of one request: a candidate, a model member's draft, or a merged tree of both."""

    candidate: CandidateDraft | None = None
    node_budget: int = 0  # of the selected model member; 0 = it does not draft
    value: float = 0.0
    merged_budgets: tuple[int, ...] = ()  # of the selected model members, if several draft

    def get_budget(self, rank: int) -> int:
        """Return the node budget of a selected model member. `rank`: 0 = first selected member."""
        return self.merged_budgets[rank] if self.merged_budgets else self.node_budget


class EnsembleSelector:
    """Selection of candidates and model members from acceptance and cost estimates.

    Args:
        costs: costs of the members and of the target's pass, for greedy requests at first.
        mode: see `ensemble.Config`.

    Attributes:
        costs: those of the current kind of requests, greedy or sampled.
        estimates: acceptance rates.
    """

    def __init__(self, costs: KindCosts, mode: SelectionMode) -> None:
        self.costs, self.mode = costs, mode
        self.estimates = ValueEstimates()
        self._costs_by_kind = {False: costs}  # key: sampled

    def select_kind(self, is_sampled: bool) -> None:
        """Switch to the costs of greedy or of sampled requests; the second kind starts from those of the first."""
        if is_sampled not in self._costs_by_kind:
            self._costs_by_kind[is_sampled] = self.costs.copy_costs()
        self.costs = self._costs_by_kind[is_sampled]

    def select_candidate(self, choices: RequestChoices) -> RequestDraftPlan:
        """Select the candidate of largest value; none if no candidate pays for its rows."""
        best = RequestDraftPlan()
        for candidate in choices.candidates:
            candidate.rates = self.estimates.estimate_rates(choices.slot, candidate.key)
            value = self._estimate_value(candidate, choices.budget)
            if value > best.value or self.mode == "merge":
                best = RequestDraftPlan(candidate, 0, value)
        return best

    def _estimate_value(self, candidate: CandidateDraft, budget: int) -> float:
        """Estimate the value of a candidate. If it is not made yet, its size is chosen first; inf if it is due."""
        if candidate.draft is not None:
            return estimate_gain(candidate.rates, candidate.depth) - self._convert_rows_to_tokens(candidate.size)
        stats = self.costs.sampling_stats[candidate.members[0]]
        marginal_tokens = self.costs.tokens_per_second * (self.costs.pass_cost.slope + stats.cost.slope)
        candidate.size = _choose_num_nodes(stats, candidate.rates, min(budget, stats.max_nodes), marginal_tokens)
        candidate.depth = stats.estimate_depth(candidate.size)
        if stats.is_due:
            return math.inf
        return (
            estimate_gain(candidate.rates, candidate.depth)
            - self._convert_rows_to_tokens(candidate.depth)
            - self.costs.tokens_per_second * stats.cost.predict(candidate.depth)
        )

    def select_members(self, all_choices: Sequence[RequestChoices]) -> tuple[list[MemberStats], list[RequestDraftPlan]]:
        """Select the model members of this step, and make the plan of every request.

        The first selected member drafts for all plans with nodes; further ones only if `may_merge`.
        """
        plans = [self.select_candidate(choices) for choices in all_choices]
        if self.mode == "merge":
            return self._plan_merge(all_choices, plans)
        selected, best_gain, best = None, 0.0, plans
        tokens_per_second = self.costs.tokens_per_second
        for stats in self.costs.model_stats:
            row_seconds = self.costs.pass_cost.slope + stats.cost.slope / len(all_choices)
            marginal_tokens = tokens_per_second * row_seconds
            others = [
                self._plan_with_member(choices, stats, plan, marginal_tokens)
                for choices, plan in zip(all_choices, plans, strict=True)
            ]
            if stats.is_due and any(other.node_budget for other in others):
                return [stats], others
            gains = [other.value - plan.value for other, plan in zip(others, plans, strict=True)]
            member_plans = [
                other if value_gain > 0.0 else plan
                for other, plan, value_gain in zip(others, plans, gains, strict=True)
            ]
            deepest = max(
                [stats.estimate_depth(plan.node_budget) for plan in member_plans if plan.node_budget], default=0.0
            )
            is_stale = any(
                plan.node_budget and stats.index in choices.stale_members
                for choices, plan in zip(all_choices, member_plans, strict=True)
            )
            seconds = stats.cost.predict(deepest) + (stats.catch_up_seconds / CATCH_UP_STEPS if is_stale else 0.0)
            gain = sum([value_gain for value_gain in gains if value_gain > 0.0]) - tokens_per_second * seconds
            if deepest and gain > best_gain:
                selected, best_gain, best = stats, gain, member_plans
        return ([], plans) if selected is None else ([selected], best)

    def _plan_merge(
        self, all_choices: Sequence[RequestChoices], plans: Sequence[RequestDraftPlan]
    ) -> tuple[list[MemberStats], list[RequestDraftPlan]]:
        """Plan drafts of all members, the best first, with equal shares of the node budget.

        Shares are rounded up, and what does not fit is left out of the merged tree. Those of sampled drafts add up to
        the budget at most, since no sample may be left out. What equal samples leave free is for deterministic drafts.
        """
        usable = [stats for stats in self.costs.model_stats if stats.max_nodes]
        all_stats = sorted(usable, key=self._estimate_overall_value, reverse=True)
        if not all_stats:
            return [], list(plans)
        merged_plans = []
        for choices, plan in zip(all_choices, plans, strict=True):
            if not choices.may_merge:
                merged_plans.append(RequestDraftPlan(node_budget=choices.budget))
                continue
            candidate = None if plan.candidate is None or plan.candidate.is_sampled else plan.candidate
            limits = [stats.max_nodes for stats in all_stats]
            limits += [] if candidate is None else [candidate.size]
            rounding = 0 if choices.is_sampled else -choices.budget % len(limits)
            shares = share_nodes(choices.budget + rounding, limits)
            merged_plans.append(RequestDraftPlan(candidate, merged_budgets=shares[: len(all_stats)]))
        return all_stats, merged_plans

    def _estimate_overall_value(self, stats: MemberStats) -> float:
        """Estimate the value of a member over all requests, less the cost of its drafts."""
        if stats.num_uses < MIN_DRAFTS:
            return float("inf")
        depth = stats.estimate_depth(stats.max_nodes)
        return estimate_gain(
            self.estimates.estimate_rates(-1, stats.key), depth
        ) - self.costs.tokens_per_second * stats.cost.predict(depth)

    def should_try_extension(self, slot: int, key: EstimateKey, reach_probability: float) -> bool:
        """Return whether a member should extend a draft: one more node pays for its row and for the member's time.

        Args:
            slot: slot of the request.
            key: estimate of the member's extensions.
            reach_probability: probability that the node which is extended is accepted.
        """
        seconds = self.costs.extension_cost.predict(1)
        return self.should_extend(slot, key, reach_probability, 1, self.costs.tokens_per_second * seconds)

    def should_extend(
        self, slot: int, key: EstimateKey, reach_probability: float, num_tokens: int, drafting_tokens: float = 0.0
    ) -> bool:
        """Return whether an extension pays for its rows.

        Args:
            slot: slot of the request.
            key: estimate of the member's extensions.
            reach_probability: probability that the node which is extended is accepted.
            num_tokens: nodes of the extension.
            drafting_tokens: tokens that could be made in the time in which it is drafted; 0 = it is drafted already.
        """
        if self.estimates.count_tries(slot, key) < MIN_DRAFTS:
            return True
        gain = reach_probability * estimate_gain(self.estimates.estimate_rates(slot, key), num_tokens)
        return gain > self._convert_rows_to_tokens(num_tokens) + drafting_tokens

    def record_selection(self, selected: Collection[MemberStats]) -> None:
        """Record the members that drafted in a step, of those whose drafts take time."""
        for stats in self.costs.all_stats:
            stats.record_use(stats in selected)

    def _convert_rows_to_tokens(self, num_rows: float) -> float:
        """Convert rows of the target's pass to the tokens that could be made in their time."""
        return self.costs.tokens_per_second * self.costs.pass_cost.slope * num_rows

    def _plan_with_member(
        self, choices: RequestChoices, stats: MemberStats, plan: RequestDraftPlan, marginal_tokens: float
    ) -> RequestDraftPlan:
        """Make the best plan with a member's draft: alone, or merged with the best candidate.

        `marginal_tokens`: tokens that could be made in the time of one more node.
        """
        if stats.index in choices.unready_members:
            return plan
        shares = self.estimates.estimate_rates(choices.slot, stats.key)
        budget = _choose_num_nodes(stats, shares, min(choices.budget, stats.max_nodes), marginal_tokens)
        depth = stats.estimate_depth(budget)
        solo = RequestDraftPlan(None, budget, estimate_gain(shares, depth) - self._convert_rows_to_tokens(depth))
        candidate = plan.candidate
        if (
            candidate is None
            or candidate.is_sampled
            or not choices.may_merge
            or self.mode == "sequence"
            or choices.budget < MIN_MERGE_NODES
        ):
            return solo
        candidate_nodes = min(candidate.size, choices.budget // 2)
        nodes = min(choices.budget - candidate_nodes, budget)
        depth = stats.estimate_depth(nodes)
        first, _ = self.estimates.estimate_rates(
            choices.slot, make_union_key(stats, candidate), *_combine_rates(shares, candidate.rates)
        )
        # if only the member's first node is right, the gain is limited by the depth of the member's draft
        instead = max(first - candidate.rates[0], 0.0) * estimate_gain((1.0, shares[1]), depth)
        value = (
            estimate_gain(candidate.rates, min(candidate.depth, candidate_nodes))
            + instead
            - self._convert_rows_to_tokens(depth + candidate_nodes)
        )
        merged = RequestDraftPlan(candidate, nodes, value)
        return merged if value > solo.value or stats.is_due else solo


def make_union_key(stats: MemberStats, candidate: CandidateDraft) -> EstimateKey:
    """Return the estimate key of a member's draft merged with a candidate."""
    return (stats.index, *candidate.members), candidate.key[1]


def _choose_num_nodes(stats: MemberStats, rates: tuple[float, float], max_nodes: int, marginal_tokens: float) -> int:
    """Choose the nodes of a draft: as many as gain more than they cost, if each node is one level.

    `marginal_tokens`: tokens that could be made in the time of one more node.
    """
    first, later = rates
    if (
        stats.is_due
        or stats.estimate_depth(max_nodes) < 0.9 * max_nodes
        or not 0.0 < later < 1.0
        or marginal_tokens <= 0.0
    ):
        return max_nodes
    if marginal_tokens >= first:
        return min(max_nodes, 1)
    return min(max_nodes, 1 + int(math.log(marginal_tokens / first) / math.log(later)))


def _combine_rates(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Return a prior for the union of two drafts. Their outcomes are strongly correlated."""
    best = max(a, b, key=lambda shares: shares[0] * shares[1])
    return best[0] + 0.25 * min(a[0], b[0]) * (1.0 - best[0]), best[1]


def share_nodes(budget: int, limits: Sequence[int]) -> tuple[int, ...]:
    """Share a node budget equally; what a member cannot use is shared by the others.

    Args:
        budget: nodes to share.
        limits: maximum nodes of each member; among equals, the first gets a node more.

    Returns:
        Nodes of each member; they add up to the budget, or to the sum of the limits if that is smaller.
    """
    shares, num_left = [0] * len(limits), budget
    for rank, i in enumerate(sorted(range(len(limits)), key=limits.__getitem__)):
        shares[i] = min(limits[i], -(-num_left // (len(limits) - rank)))
        num_left -= shares[i]
    return tuple(shares)
