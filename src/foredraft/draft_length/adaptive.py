"""Adaptive draft-length policy: maximises predicted tokens per second with a bounded loss against plain decoding.

Pure: no model, no tensors, no clock. Draft lengths are chosen before drafting and from earlier steps alone: under
rejection sampling, a length that depended on the draft tokens would change the output distribution.
docs/controller.md explains the algorithm in a page. All times are in seconds.

- Plain step: a step without drafts. Its cost leaves prompt chunks out: it is that of one new token per request.
- Gain of a plan: its predicted speed-up over plain steps, minus 1.
- Survival of a draft node: probability that the node is accepted, if it is granted.
- Unread tokens of a request: the drafter reads them before it drafts again (it catches up). `UnreadCounter` estimates
  their number.
"""

from collections import Counter
from collections.abc import Sequence, Set

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.current_plan import RESUMPTION_GAIN, Candidates, CurrentPlan
from foredraft.draft_length.draft_trial import TRIAL_NODES, DraftTrial
from foredraft.draft_length.held_decision import HeldDecision
from foredraft.draft_length.intervals import SKIPPED_REPORTS, compute_plain_interval, get_skipped_reports, may_hold
from foredraft.draft_length.observer import RESTING_STEPS, StepObserver
from foredraft.draft_length.plain_run import PlainRun, count_run_steps
from foredraft.draft_length.planner import LengthPlan, cut_nodes
from foredraft.draft_length.policy import DecisionReason, LengthDecision, StepReport
from foredraft.draft_length.prober import Prober
from foredraft.draft_length.probes import PROBE_NODES, ProbeSchedule
from foredraft.draft_length.quiet_spell import QuietSpell

# Pausing and resuming
GAIN_MARGIN = 0.01  # a predicted gain below -GAIN_MARGIN pauses drafting
MAX_PAYBACK_STEPS = 100  # drafting resumes only if the gain of this many steps repays the time to catch up
MAX_WARMUP_REQUESTS = 2  # requests that draft during warm-up
MIN_READY_SHARE = 0.75  # of the requests: drafting resumes only if this many can draft
LONG_DRAFT_INTERVAL = 32  # one in this many steps has longer drafts than planned, to measure them


class AdaptiveLengthPolicy:
    """Draft-length policy that maximises predicted tokens per second, and drafts nothing if no draft pays.

    It has four parts:

    - The observer (`observer.py`) measures costs and survival.
    - The plan (`current_plan.py`) sets the draft nodes of each request. It is computed from these estimates.
    - Probes (`prober.py`) and occasional plain steps keep the measurements current.
    - The time credit (`credit.py`) bounds the loss. If it is used up, drafting is paused, whatever the plan predicts.

    The policy chooses within the bounds of every request. It grants fixed lengths and the least lengths as they are,
    and neither plan nor credit reduces them. They count as a part of the step without drafts.

    Greedy and sampled requests have separate estimates; `kind` is 0 for greedy and 1 for sampled.

    Args:
        curve: time of a forward pass of the target by its number of tokens; None = learned from steps.
        draft_cost: time of a draft; None = learned from steps.

    Attributes:
        observer: estimates from finished steps.
        decision: last decision.
        counts: number of steps by reason.
    """

    def __init__(self, curve: CostCurve | None = None, draft_cost: DraftCost | None = None) -> None:
        self.observer = StepObserver(curve, draft_cost)
        self.decision = LengthDecision("start")
        self.counts: Counter[DecisionReason] = Counter()
        self._plan = CurrentPlan(self.observer)
        self._prober = Prober(self.observer)
        self._held = HeldDecision()
        self._trial = DraftTrial()
        self._plain_run = PlainRun()
        self._quiet = QuietSpell()
        self._probes = self._prober.schedule  # when the next probe is due, and the slots of the current one

    @property
    def curve(self) -> CostCurve:
        """Time of a forward pass of the target."""
        return self.observer.costs.curve

    @property
    def is_resting(self) -> bool:
        """Whether drafting has been paused for a while; probes do not end it."""
        return self.observer.is_resting

    @property
    def needs_observation(self) -> bool:
        """Whether the drafter observes the current step. At rest it observes for probes, if observing takes long."""
        if self._quiet.is_taken:
            return self._quiet.needs_observation
        return _needs_observation(self.observer, self._plan, self._probes)

    def allocate(self, candidates: Candidates, num_pass_tokens: int, attended_tokens: int = 0) -> list[int]:
        """Grant draft nodes for the next step; arguments as in `DraftLengthPolicy.allocate`."""
        observer = self.observer
        self._end_quiet_spell()
        if self.decision.reason == "measure":
            self._plan.expire()  # the run has shown the cost of a plain step
        held = self._held.find(observer.step, num_pass_tokens, candidates)
        if held is not None and observer.credit.is_ample:
            self._repeat(len(candidates))
            return held
        kinds = {c.kind for c in candidates}
        if not any(c.min_nodes for c in candidates) and self.repeat_none(len(candidates), kinds):
            return [0] * len(candidates)
        # A fixed length is granted as it is. The policy decides only about the other candidates, the adjustable ones.
        adjustable = [c for c in candidates if c.min_nodes < c.max_nodes]
        if not (observer.is_drafting or (self._plan.covers(kinds) and self._probes.is_load_similar(len(adjustable)))):
            self._plan.expire()  # `update` below computes a new one
        if observer.register(candidates):  # the kind of the batch has changed: sampled if any request is
            self._plan.expire()
        if observer.is_drafting:  # during a pause, a plan shows whether drafting would pay once all are ready
            adjustable = [c for c in adjustable if c.is_ready] or adjustable
        nodes_by_slot = {c.slot: c.min_nodes for c in candidates if c.min_nodes}
        observer.begin_step(len(candidates), bool(nodes_by_slot))
        reason: DecisionReason = "fixed"
        plan = LengthPlan()
        if adjustable:
            if observer.warmup.is_over or observer.warmup.num_nodes:
                plan = self._plan.update(candidates, adjustable, num_pass_tokens, attended_tokens)
            reason, chosen = self._choose_nodes(plan, adjustable, num_pass_tokens)
            nodes_by_slot |= _cut_to_buckets(chosen, self.curve, candidates, num_pass_tokens)
        granted = [min(max(nodes_by_slot.get(c.slot, 0), c.min_nodes), c.max_nodes) for c in candidates]
        slowdown = observer.costs.slowdown  # current over usual step time; the plan uses usual times
        self.decision = LengthDecision(
            reason, nodes=sum(granted), longest=max(granted, default=0), plain_rate=plan.plain_rate / slowdown,
            rate=plan.rate / slowdown, acceptance=plan.acceptance,
        )  # fmt: skip
        self.counts[reason] += 1
        self._held.release()
        if self._can_hold(reason, granted, candidates):
            self._held.hold(num_pass_tokens, candidates, granted)
        return granted

    def _can_hold(self, reason: DecisionReason, granted: Sequence[int], candidates: Candidates) -> bool:
        """Return whether the next steps may repeat this one: it drafts what the plan says, and the credit is ample."""
        is_usual = reason == "pays" and not self._probes.slots and not self.observer.has_fixed
        if not (is_usual and self._plan.can_be_held and may_hold(self.observer.step)):
            return False
        return self.observer.credit.is_ample and list(granted) == self._plan.list_nodes(candidates)

    def _repeat(self, num_requests: int) -> None:
        """Make the last decision again."""
        self._plan.keep()
        self.observer.begin_step(num_requests, has_fixed=False)
        self.counts[self.decision.reason] += 1

    def repeat_none(self, num_requests: int, kinds: Set[int]) -> bool:
        """Decide for no draft again; see `DraftLengthPolicy.repeat_none`."""
        if self._quiet.take_step(num_requests, kinds):
            return True
        self._end_quiet_spell()
        if self._probes.slots or not self._plan.covers(kinds):
            return False
        if self.observer.is_drafting and self.decision.reason == "measure":  # it decides as little as plain decoding
            can_repeat = self._plain_run.take_next(num_requests, self.observer.is_disturbed)
        else:
            can_repeat = self._would_draft_nothing_again(num_requests)
        if can_repeat:
            self._repeat(num_requests)
            num_steps = _count_quiet_steps(self.observer, self._plan, self._probes)
            if num_steps:
                self._quiet.begin(num_requests, kinds, num_steps, self.needs_observation)
        return can_repeat

    def _end_quiet_spell(self) -> None:
        """Record the steps of the spell, before anything depends on them."""
        reports = self._quiet.end()
        if reports:
            self._plan.keep(len(reports))
            self.counts[self.decision.reason] += len(reports)
            self.observer.record_paused_steps(self._quiet.num_requests, reports)

    def _would_draft_nothing_again(self, num_requests: int) -> bool:
        """Return whether drafting stays paused, and no probe can start now."""
        return (
            not self.observer.is_drafting
            and self.decision.nodes == 0  # otherwise the last decision cannot be repeated
            and self._plan.can_be_kept  # this step computes no new plan
            and not (self._plan.is_resumption_due and self._plan.can_resume_within(SKIPPED_REPORTS - 1))  # it pauses on
            and self.observer.step < self._probes.next_step  # no probe is due
            and self._probes.is_load_similar(num_requests)  # nor is a plan for a new load
        )

    def _choose_nodes(
        self, plan: LengthPlan, adjustable: Candidates, num_pass_tokens: int
    ) -> tuple[DecisionReason, dict[int, int]]:
        """Return the reason of the decision, and the draft nodes by slot; a slot without an entry gets none."""
        observer = self.observer
        if not observer.warmup.is_over:
            nodes = observer.warmup.num_nodes
            return "start", {c.slot: nodes for c in adjustable[:MAX_WARMUP_REQUESTS]}
        pays = plan.speedup >= 1.0 - GAIN_MARGIN
        if self._trial.take_step(pays, len(adjustable), observer.credit.plain_steps):
            self._plan.expire()  # every step of it may show that drafts pay
            return "start", {c.slot: TRIAL_NODES for c in adjustable}
        if self._plain_run.adapt_to_load(len(adjustable)):
            observer.credit.limit_at_larger_load()
        _update_mode(observer, self._plan, self._probes, plan, adjustable)
        is_drafting = observer.is_drafting
        granted = {c.slot: c.min_nodes for c in adjustable if c.min_nodes}
        reason: DecisionReason = "pays"
        if not is_drafting:  # "guard": drafting would pay, but `_update_mode` did not resume it
            reason = "guard" if plan.speedup > 1.0 + RESUMPTION_GAIN else "does not pay"
            self._plain_run.stop()
        elif plan.speedup < 1.0 - GAIN_MARGIN:  # in this step alone, which has a prompt
            return "does not pay", granted
        else:
            granted = _vary_lengths(_select_ready(plan.nodes_by_slot, adjustable), observer.step)
        # The time of a plain step that is not well known would make drafts seem to save more, or less, than they do.
        gain, num_requests = plan.speedup - 1.0, observer.num_requests
        interval = compute_plain_interval(gain, count_run_steps(gain), self.curve.get_confidence(num_requests))
        is_typical = num_pass_tokens == num_requests  # no prompt, and all requests can draft
        due = observer.steps_since_plain, interval, gain, is_typical, observer.is_disturbed
        if is_drafting and not observer.has_fixed and self._plain_run.take_step(*due):
            observer.begin_plain_step(self._plain_run.num_transition_steps)
            return "measure", {}
        was_probing = bool(self._probes.slots)
        probed = self._prober.update(adjustable, granted, num_pass_tokens, plan.speedup)
        if was_probing and (not probed or self._probes.is_in_first_step):
            self._plan.expire()  # the next step compares what the probe has shown
        if probed:
            granted = granted | {slot: max(PROBE_NODES, granted.get(slot, 0)) for slot in probed}
            reason = reason if is_drafting else "probe"
        return reason, _limit_to_credit(granted, observer, num_pass_tokens) if is_drafting else granted

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        if not self._quiet.keep(report):
            self.observer.record_step(report)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots: estimates, probe and plan."""
        self._end_quiet_spell()
        self.observer.forget(slots)
        self._probes.forget(slots)
        self._plan.forget(slots)
        self._held.release()


def _needs_observation(observer: StepObserver, current: CurrentPlan, schedule: ProbeSchedule) -> bool:
    """Return whether the drafter observes steps from this one on. At rest it does for probes, if that takes long."""
    if not observer.can_miss_steps:
        return True
    return current.can_resume_within(RESTING_STEPS) or schedule.is_due(observer.step)


def _count_quiet_steps(observer: StepObserver, current: CurrentPlan, schedule: ProbeSchedule) -> int:
    """Count the steps after this one that will repeat it for a batch of its size, whatever they take."""
    most = get_skipped_reports(observer.is_paused_long) - 1  # the report after them is evaluated
    if observer.is_drafting or current.can_resume_within(most):
        return 0
    return max(min(current.num_kept_steps, schedule.next_step - observer.step - 2, most), 0)


def _update_mode(
    observer: StepObserver, current: CurrentPlan, schedule: ProbeSchedule, plan: LengthPlan, adjustable: Candidates
) -> None:
    """Resume drafting if it pays; pause it if it does not pay or the credit is used up.

    Drafting resumes only with a credit of more than one plain step. The drafter then first has to catch up. The credit
    lends the time for it (`TimeCredit.grant_loan`), if the gain of MAX_PAYBACK_STEPS repays it.

    Args:
        observer: estimates, whose `is_drafting` is set.
        current: the plan in use, with its age.
        schedule: that of probes.
        plan: plan of this step.
        adjustable: requests whose draft length may change.
    """
    credit = observer.credit
    if observer.is_drafting:
        pays = plan.speedup >= 1.0 - GAIN_MARGIN or current.is_passing  # a step with a prompt pauses nothing
        observer.is_drafting = pays and not credit.is_used_up
        if credit.is_used_up:  # the plan was wrong, so the estimates behind it lose weight
            observer.survival.discount_evidence()
        if not observer.is_drafting:
            schedule.postpone(observer.step)
    elif plan.speedup > 1.0 + RESUMPTION_GAIN and credit.can_resume_within(0) and _are_ready(adjustable):
        catch_up = observer.estimate_catch_up([c.slot for c in adjustable if plan.nodes_by_slot.get(c.slot)])
        if catch_up <= MAX_PAYBACK_STEPS * (plan.speedup - 1.0) * credit.plain_step_cost:
            observer.is_drafting = True
            schedule.reset_interval()
            credit.grant_loan(catch_up)


def _are_ready(adjustable: Candidates) -> bool:
    """Return whether the drafter would propose something for most of these requests."""
    return sum([c.is_ready for c in adjustable]) >= MIN_READY_SHARE * len(adjustable)


def _select_ready(nodes_by_slot: dict[int, int], adjustable: Candidates) -> dict[int, int]:
    """Return the nodes of requests for which the drafter would propose something."""
    ready = {c.slot for c in adjustable if c.is_ready}
    if ready == nodes_by_slot.keys():
        return nodes_by_slot
    return {slot: nodes for slot, nodes in nodes_by_slot.items() if slot in ready}


def _vary_lengths(granted: dict[int, int], step: int) -> dict[int, int]:
    """Lengthen or shorten drafts in some steps, to measure other lengths than the plan's."""
    if step % (2 * LONG_DRAFT_INTERVAL) == LONG_DRAFT_INTERVAL:  # half as long again, rounded up
        return {slot: nodes + (nodes + 1) // 2 for slot, nodes in granted.items()}
    if step % LONG_DRAFT_INTERVAL == 0:  # one node more: the cost may rise steeply before half as many again
        return {slot: nodes + min(nodes, 1) for slot, nodes in granted.items()}
    if step % LONG_DRAFT_INTERVAL == LONG_DRAFT_INTERVAL // 2:  # a quarter shorter
        return {slot: max(nodes - (nodes + 3) // 4, min(nodes, 1)) for slot, nodes in granted.items()}
    return granted


def _cut_to_buckets(
    chosen: dict[int, int], curve: CostCurve, candidates: Candidates, num_pass_tokens: int
) -> dict[int, int]:
    """Cut drafts so that the pass stays in the last row bucket. Probes and long drafts could leave it."""
    if not curve.has_buckets:
        return chosen
    fixed_rows = sum(c.min_nodes for c in candidates if c.is_fixed)
    return cut_nodes(chosen, curve.count_free_rows(num_pass_tokens + fixed_rows))


def _limit_to_credit(granted: dict[int, int], observer: StepObserver, num_pass_tokens: int) -> dict[int, int]:
    """Halve the drafts until the time credit covers their cost: the time that is lost if every node is rejected.

    Otherwise a few rejected long drafts could use up the credit, and prevent the short drafts that would pay.
    """
    credit, costs = observer.credit, observer.costs
    if credit.is_ample:
        return granted
    while granted and credit.available < costs.estimate_draft(
        max(granted.values()), sum(granted.values()), num_pass_tokens
    ):
        granted = {slot: nodes // 2 for slot, nodes in granted.items() if nodes > 1}
    return granted
