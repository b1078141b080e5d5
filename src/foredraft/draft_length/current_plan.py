"""The plan in use: draft nodes per request, the batch that they were computed for, and the plan's age in steps."""

from collections.abc import Sequence, Set
from dataclasses import replace

from foredraft.draft_length.intervals import LARGE_BATCH, RESUMPTION_INTERVAL, get_paused_lifetime, get_plan_lifetime
from foredraft.draft_length.observer import StepObserver
from foredraft.draft_length.planner import LengthPlan, StepShape
from foredraft.draft_length.policy import DraftCandidate

Candidates = Sequence[DraftCandidate]

RESUMPTION_GAIN = 0.02  # a predicted gain above this ends a pause: estimates are less certain then
MAX_FEW_REQUESTS = 4  # a plan for so few requests that drafts nothing ends with any of them
# Steps in a row with prompts that have plans of their own. A longer run of them is treated like any batch: each plan
# takes time, and drafting may have to be paused or resumed.
MAX_PROMPT_STEPS = 8


class CurrentPlan:
    """Plan that is computed anew when its lifetime ends (`intervals.py`).

    Args:
        observer: estimates that the plan is computed from.

    Attributes:
        plan: draft nodes with the highest predicted rate, whether or not they are granted.
        is_passing: whether the last update was for a step with a prompt, whose plan holds for that step alone.
    """

    def __init__(self, observer: StepObserver) -> None:
        self.plan = LengthPlan()
        self.is_passing = False
        self._observer = observer
        self._age = 0  # in steps
        self._key: object = None  # batch that the plan was computed for; None = compute a new plan
        self._is_tree = False  # whether it was computed for trees
        self._levels: tuple[int, ...] = ()  # of confidence that it was computed with
        self._kinds: frozenset[int] = frozenset()  # kinds of the requests in that batch
        self._num_prompt_steps = 0  # steps in a row with prompts
        self._has_prompt = False  # whether the plan was computed for a pass with a prompt

    @property
    def can_be_kept(self) -> bool:
        """Whether no new plan is due in the next step while drafting is paused."""
        return self.num_kept_steps > 0

    @property
    def num_kept_steps(self) -> int:
        """Number of steps from the next one on in which no new plan is due, while drafting is paused."""
        if self._key is None:
            return 0
        return max(get_paused_lifetime(self._observer.is_paused_long) - 1 - self._age, 0)

    @property
    def is_resumption_due(self) -> bool:
        """Whether the next step compares the time credit with a plan that pays. Every step would take too long."""
        return (self._age + 1) % RESUMPTION_INTERVAL == 0

    def can_resume_within(self, num_steps: int) -> bool:
        """Return whether the plan pays, and the time credit may permit it within so many steps of a pause."""
        return self.plan.speedup > 1.0 + RESUMPTION_GAIN and self._observer.credit.can_resume_within(num_steps)

    @property
    def can_be_held(self) -> bool:
        """Whether the next steps need not ask for the plan: it is not for one step alone, and no prediction ends it."""
        return not self.is_passing and not self._levels

    def list_nodes(self, candidates: Candidates) -> list[int]:
        """List the nodes of the plan for these requests, within their limits."""
        return [min(self.plan.nodes_by_slot.get(c.slot, 0), c.max_nodes) for c in candidates]

    def covers(self, kinds: Set[int]) -> bool:
        """Return whether the plan was computed with all of these kinds of requests."""
        return self._kinds >= kinds

    def expire(self) -> None:
        """Let the next step compute a new plan."""
        self._key = None

    def keep(self, num_steps: int = 1) -> None:
        """Keep the plan for steps that repeat the last decision."""
        self._age += num_steps

    def update(
        self, candidates: Candidates, adjustable: Candidates, num_pass_tokens: int, attended_tokens: int
    ) -> LengthPlan:
        """Return the plan for the adjustable candidates; a new one unless the current plan may still be used.

        Draft tokens of a pass with a prompt have other costs: the pass waits for arithmetic already. So a step with a
        prompt among a few requests has a plan of its own, and the current plan stays for the steps after it.
        """
        observer = self._observer
        survival = observer.survival
        levels = survival.list_confidence_levels([c.slot for c in candidates])
        key = (num_pass_tokens, tuple(candidates), observer.num_others)
        self._age += 1
        has_prompt = num_pass_tokens > len(candidates) + observer.num_others
        self._num_prompt_steps = self._num_prompt_steps + 1 if has_prompt else 0
        self.is_passing = (
            has_prompt
            and self._num_prompt_steps <= MAX_PROMPT_STEPS
            and len(adjustable) < LARGE_BATCH
            and observer.warmup.is_over
            and (observer.is_drafting or self._key is not None)  # a pause needs a plan of the kinds in the batch
        )
        if self.is_passing and not observer.is_drafting:
            return self.plan
        if self.is_passing:
            return self._compute(candidates, adjustable, num_pass_tokens, attended_tokens)
        is_like_it = survival.is_tree == self._is_tree and levels == self._levels and has_prompt == self._has_prompt
        if self._is_current(key, is_like_it, adjustable):
            self._add_newcomers(adjustable)
            return self.plan
        self._is_tree, self._levels, self._has_prompt = survival.is_tree, levels, has_prompt
        self._key, self._age, self._kinds = key, 0, frozenset(c.kind for c in candidates)
        self.plan = self._compute(candidates, adjustable, num_pass_tokens, attended_tokens)
        return self.plan

    def _compute(
        self, candidates: Candidates, adjustable: Candidates, num_pass_tokens: int, attended_tokens: int
    ) -> LengthPlan:
        observer = self._observer
        observer.settle()
        survival = observer.survival
        fixed = [c for c in candidates if c.min_nodes]
        fixed_longest = max((c.min_nodes for c in fixed), default=0)
        fixed_survival = survival.estimate_survival([c.slot for c in fixed], fixed_longest)
        shape = StepShape(
            num_requests=len(candidates) + observer.num_others,
            num_pass_tokens=num_pass_tokens,
            context_per_token=attended_tokens / max(num_pass_tokens, 1),
            fixed_longest=fixed_longest,
            fixed_nodes=sum(c.min_nodes for c in fixed),
            fixed_accepted=sum(sum(row[: c.min_nodes]) for c, row in zip(fixed, fixed_survival, strict=True)),
        )
        slots, limits = [c.slot for c in adjustable], [(c.min_nodes, c.max_nodes) for c in adjustable]
        longest = max(c.max_nodes for c in adjustable)
        rates, draft_probs = survival.estimate_survival(slots, longest), survival.estimate_draft_probs(slots, longest)
        return observer.costs.planner.find_best_plan(shape, slots, limits, rates, draft_probs)

    def _is_current(self, key: object, has_same_estimates: bool, adjustable: Candidates) -> bool:
        """Return whether the plan may still be used for the batch `key` with these adjustable requests."""
        if not self._observer.warmup.is_over or self._key is None:
            return False
        if not self._observer.is_drafting:
            return self._age < get_paused_lifetime(self._observer.is_paused_long)
        nodes_by_slot = self.plan.nodes_by_slot
        if not nodes_by_slot:  # its requests have ended; the next ones may have their slots
            return False
        is_covered = all(c.slot in nodes_by_slot for c in adjustable)
        has_similar = self.covers({c.kind for c in adjustable})  # newcomers get their length
        return self._age < get_plan_lifetime(
            len(adjustable),
            self._observer.step,
            is_same_batch=has_same_estimates and key == self._key,
            is_comparable=has_same_estimates and (is_covered or has_similar),
        )

    def _add_newcomers(self, adjustable: Candidates) -> None:
        """Give requests that joined after the plan was computed the mean length of the others."""
        nodes_by_slot = self.plan.nodes_by_slot
        newcomers = [c for c in adjustable if c.slot not in nodes_by_slot]
        if newcomers and nodes_by_slot:
            mean = round(sum(nodes_by_slot.values()) / len(nodes_by_slot))
            added = {c.slot: min(max(mean, c.min_nodes), c.max_nodes) for c in newcomers}
            self.plan = replace(self.plan, nodes_by_slot=nodes_by_slot | added)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the nodes of these slots.

        Drafting may be paused for what these few requests accepted, so the plan for the next ones is not theirs.
        """
        nodes_by_slot = self.plan.nodes_by_slot
        remaining = {slot: nodes for slot, nodes in nodes_by_slot.items() if slot not in slots}
        is_paused_briefly = not (self._observer.is_drafting or self._observer.is_paused_long)
        if is_paused_briefly and len(remaining) < len(nodes_by_slot) <= MAX_FEW_REQUESTS:
            self.expire()
        self.plan = replace(self.plan, nodes_by_slot=remaining)
