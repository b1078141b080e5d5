"""Adaptive draft-length policy: maximises predicted tokens per second with a bounded loss against plain decoding.

Pure: no model, no tensors, no clock. Draft lengths are chosen before drafting and from earlier steps alone: under
rejection sampling, a length that depended on the draft tokens would change the output distribution.
docs/controller.md explains the algorithm in a page. All times are in seconds.

A plain step is a step without drafts. The gain of a plan is its predicted speed-up over plain steps minus 1. Unread
tokens of a request were committed since its last draft; a drafter reads them before it drafts again (it catches up).
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from foredraft.draft_length.acceptance import SurvivalEstimator
from foredraft.draft_length.costs import CostCurve, DraftCost, LengthPlan, Planner, StepShape
from foredraft.draft_length.credit import TimeCredit
from foredraft.draft_length.policy import DecisionReason, DraftCandidate, LengthDecision, StepReport

# Pausing and resuming
GAIN_MARGIN = 0.01  # predicted gain that starts drafting; a predicted loss of as much ends it
MAX_PAYBACK_STEPS = 100  # drafting resumes only if the predicted gain of this many steps repays the time to catch up
# Warm-up: the first steps, to measure costs
WARMUP_NODES = (0, 0, 1, 1, 3, 3, 3)  # draft nodes per request: entry i is for step i
MAX_WARMUP_REQUESTS = 2  # requests that draft during warm-up
MIN_WARMUP_STEPS = 3  # steps before a used-up credit may end warm-up; the first draft also reads the prompt
# Probes: short drafts of requests that have none, to measure acceptance again
PROBE_NODES = 2  # draft nodes per request and step
PROBE_STEPS = 4  # consecutive steps of a probe
PROBE_COST_FACTOR = 1.5  # a probe of several requests may cost this many times as much as a probe of one
MIN_CREDIT_AFTER_PROBE = 2  # plain steps of credit that remain if no node of the probe is accepted
MIN_PROBE_INTERVAL = 32  # steps between probes; doubles after each probe without a gain
MAX_PROBE_INTERVAL = 256
# Measurements while requests draft
LONG_DRAFT_INTERVAL = 32  # one in this many steps has drafts 1.5 times as long as planned, to measure longer ones
# A plain step measures the cost of plain decoding. The steps with drafts between two of them are the predicted gain
# times PLAIN_INTERVAL_PER_GAIN, within two limits. A plain step loses the gain of one step, so the loss is 1 / 200.
PLAIN_INTERVAL_PER_GAIN = 200
MIN_PLAIN_INTERVAL = 16
MAX_PLAIN_INTERVAL = 256
SLOWDOWN_SMOOTHING = 0.2  # weight of the newest step in the slowdown of the machine
PLAIN_COST_SMOOTHING = 0.1  # weight of the newest plain step in the ratio of measured to predicted cost
# Savings of the policy's own time

# Steps that a plan is used for an unchanged batch. Twice as many for a large batch, and for any batch if paused. Half
# as many for a large batch that changes.
PLAN_LIFETIME = 16
LARGE_BATCH = 16  # number of requests from which a batch is large
MAX_UNOBSERVED_STEPS = 3  # consecutive reports that are not evaluated while no request drafts

Candidates = Sequence[DraftCandidate]


class AdaptiveLengthPolicy:
    """Draft-length policy that maximises predicted tokens per second, and drafts nothing if no draft pays.

    It has three parts:

    - The plan sets the draft nodes of each request. It is computed from measured costs and estimated survival, the
      probability that a draft node is accepted.
    - Probes and occasional plain steps keep the measurements current.
    - The time credit (`credit.py`) bounds the loss. If it is used up, no request drafts, whatever the plan predicts.

    Greedy and sampled requests have separate estimates; `kind` is 0 for greedy and 1 for sampled.

    Args:
        curve: time of a forward pass of the target by its rows; None = learned from steps.
        draft_cost: time of a draft; None = learned from steps.
    """

    def __init__(self, curve: CostCurve | None = None, draft_cost: DraftCost | None = None) -> None:
        self.curve = curve or CostCurve()
        self.draft_cost = draft_cost or DraftCost()
        self.survival = SurvivalEstimator()
        self.planner = Planner(self.curve, self.draft_cost)
        self._cost_kind = 0  # kind of request that curve, draft_cost and planner are for
        self._costs_by_kind = dict[int, tuple[CostCurve, DraftCost, Planner]]()  # those of the other kinds
        self.decision = LengthDecision("start")
        self.counts: Counter[DecisionReason] = Counter()  # steps by reason
        self._step = 0  # number of finished steps
        self._warmup_step = 0  # index in WARMUP_NODES; its length = warm-up is over
        self._is_drafting = True  # False = paused: no request drafts, probes apart
        self._plan, self._plan_age = LengthPlan(), 0  # age in steps
        self._plan_key: object = None  # batch that the plan was computed for; None = compute a new plan
        self._plan_kinds: frozenset[int] = frozenset()  # kinds of the requests in that batch
        self._next_unread_step: dict[int, int] = {}  # slot -> step after its last draft; absent = never drafted
        self._num_unobserved = 0  # steps since the last report that was evaluated
        self._num_candidates = 0  # candidates of the current step
        self._num_others = 0  # requests of the last step that got a new token but were no candidates
        self._has_fixed = False  # the current step has drafts of fixed length
        self._steps_since_plain = 0  # steps with drafts since the last plain step
        self._slowdown = 1.0  # current step time over the usual one; all other times are divided by it
        self._credit = TimeCredit()
        self._probed_slots: tuple[int, ...] = ()  # requests of the current probe
        self._probe_steps_left = 0
        self._probe_interval, self._next_probe_step = MIN_PROBE_INTERVAL, 0  # in steps; index of a step
        self._probe_load = 0  # number of adjustable requests for which the probe interval was last reset

    # Decisions, before a step

    def allocate(self, candidates: Candidates, num_rows: int, attended_tokens: int = 0) -> list[int]:
        """Grant draft nodes for the next step; arguments as in `DraftLengthPolicy.allocate`."""
        if self._is_idle(candidates):
            return [0] * len(candidates)
        self._select_kind(candidates)
        # A fixed length is granted as it is. The policy decides only about the other candidates, the adjustable ones.
        adjustable = [c for c in candidates if not c.is_fixed and c.max_nodes > 0]
        budgets = {c.slot: c.max_nodes for c in candidates if c.is_fixed}
        self._num_candidates, self._has_fixed = len(candidates), bool(budgets)
        reason: DecisionReason = "fixed"
        if adjustable:
            self._replan(candidates, adjustable, num_rows, attended_tokens)
            reason, chosen = self._choose_budgets(adjustable, num_rows)
            budgets |= chosen
        granted = [min(budgets.get(c.slot, 0), c.max_nodes) for c in candidates]
        plan = self._plan if adjustable else LengthPlan()
        rates = plan.plain_rate / self._slowdown, plan.rate / self._slowdown
        self.decision = LengthDecision(reason, sum(granted), max(granted, default=0), *rates, plan.acceptance)
        self.counts[reason] += 1
        return granted

    def _select_kind(self, candidates: Candidates) -> None:
        """Register the candidates, and switch to the cost estimates of their kind: sampled if any of them is sampled.

        Sampling tokens and drafts takes longer than argmax. A kind without estimates starts from the current curve.
        """
        for candidate in candidates:
            self.survival.register(candidate.slot, candidate.kind)
        kind = max((candidate.kind for candidate in candidates), default=self._cost_kind)
        if kind != self._cost_kind:
            self._costs_by_kind[self._cost_kind] = self.curve, self.draft_cost, self.planner
            if kind not in self._costs_by_kind:
                curve, draft_cost = deepcopy(self.curve), DraftCost()
                self._costs_by_kind[kind] = curve, draft_cost, Planner(curve, draft_cost)
            self.curve, self.draft_cost, self.planner = self._costs_by_kind[kind]
            self._cost_kind, self._plan_key = kind, None

    def _is_idle(self, candidates: Candidates) -> bool:
        """Return true if drafting is paused and no probe or new plan is due. The step then skips all other work."""
        is_plan_due = self._plan_age + 1 >= 2 * PLAN_LIFETIME
        if self._is_drafting or self._probed_slots or self._is_warming_up or is_plan_due:
            return False
        if any(c.kind not in self._plan_kinds for c in candidates):  # the plan was computed without this kind
            self._plan_key = None
            return False
        is_steady = (
            self.decision.nodes == 0 and self._plan.speedup <= 1.0 + GAIN_MARGIN and self._step < self._next_probe_step
        )
        if not is_steady or not self._is_load_similar(len(candidates)) or any(c.is_fixed for c in candidates):
            return False
        self._plan_age += 1
        self._num_candidates, self._has_fixed = len(candidates), False
        self.counts[self.decision.reason] += 1
        return True

    @property
    def _is_warming_up(self) -> bool:
        return self._warmup_step < len(WARMUP_NODES)

    def _is_load_similar(self, load: int) -> bool:
        """Return whether the number of adjustable requests has neither halved nor doubled since `_probe_load`."""
        return self._probe_load / 2 < load < self._probe_load * 2

    def _replan(self, candidates: Candidates, adjustable: Candidates, num_rows: int, attended_tokens: int) -> None:
        """Compute a new plan for the adjustable candidates, unless the current plan may still be used."""
        key = (num_rows, tuple(candidates), self._num_others, self.survival.is_tree)
        self._plan_age += 1
        if self._is_plan_current(key, len(adjustable)):
            return
        self._plan_key, self._plan_age, self._plan_kinds = key, 0, frozenset(c.kind for c in candidates)
        fixed = [c for c in candidates if c.is_fixed]
        fixed_depth = max((c.max_nodes for c in fixed), default=0)
        fixed_gains = self.survival.estimate_gains([c.slot for c in fixed], fixed_depth) if fixed_depth else []
        shape = StepShape(
            num_requests=len(candidates) + self._num_others,
            num_rows=num_rows,
            context_per_row=attended_tokens / max(num_rows, 1),
            fixed_depth=fixed_depth,
            fixed_nodes=sum(c.max_nodes for c in fixed),
            fixed_gain=sum(sum(gain[: c.max_nodes]) for c, gain in zip(fixed, fixed_gains, strict=False)),
        )
        slots, max_nodes = [c.slot for c in adjustable], [c.max_nodes for c in adjustable]
        gains = self.survival.estimate_gains(slots, max(max_nodes))
        draft_probs = self.survival.estimate_draft_probs(slots, max(max_nodes))
        self._plan = self.planner.find_best_plan(shape, slots, max_nodes, gains, draft_probs)

    def _is_plan_current(self, key: object, count: int) -> bool:
        """Return whether the plan may still be used for the batch `key` with `count` adjustable requests."""
        if self._is_warming_up or self._plan_key is None:
            return False
        if not self._is_drafting:  # the plan only has to show when drafting would pay, for any batch
            return self._plan_age < 2 * PLAN_LIFETIME
        if key == self._plan_key:
            return self._plan_age < (PLAN_LIFETIME if count < LARGE_BATCH else 2 * PLAN_LIFETIME)
        # A large batch changes often. A new request has no draft until the next plan.
        return count >= LARGE_BATCH and self._plan_age < PLAN_LIFETIME // 2

    def _choose_budgets(self, adjustable: Candidates, num_rows: int) -> tuple[DecisionReason, dict[int, int]]:
        """Return the reason of the decision, and the draft nodes by slot; a slot without an entry gets none."""
        if self._is_warming_up:
            nodes = WARMUP_NODES[self._warmup_step]
            return "start", {c.slot: min(nodes, c.max_nodes) for c in adjustable[:MAX_WARMUP_REQUESTS]}
        self._update_mode(adjustable)
        if self._is_drafting:
            reason: DecisionReason = "pays"
        else:  # if a draft would pay and is not made, `_update_mode` refused it
            reason = "guard" if self._plan.speedup > 1.0 + GAIN_MARGIN else "does not pay"
        granted = self._plan.nodes_by_slot if self._is_drafting else {}
        plain_interval = max(PLAIN_INTERVAL_PER_GAIN * (self._plan.speedup - 1.0), MIN_PLAIN_INTERVAL)
        if self._is_drafting and self._steps_since_plain >= min(plain_interval, MAX_PLAIN_INTERVAL):
            return "measure", {}
        if self._is_drafting and self._step % LONG_DRAFT_INTERVAL == 0:  # half as long again, rounded up
            granted = {slot: nodes + (nodes + 1) // 2 for slot, nodes in granted.items()}
        self._update_probe(adjustable, granted, num_rows)
        if self._probed_slots:
            granted = granted | {slot: max(PROBE_NODES, granted.get(slot, 0)) for slot in self._probed_slots}
            reason = reason if self._is_drafting else "probe"
        return reason, self._limit_to_credit(granted, num_rows) if self._is_drafting else granted

    def _limit_to_credit(self, granted: dict[int, int], num_rows: int) -> dict[int, int]:
        """Halve the drafts until the time credit covers the loss if none of their nodes is accepted.

        Otherwise a few rejected long drafts could use up the credit, and prevent the short drafts that would pay.
        """
        if self._credit.is_ample:
            return granted
        while granted and self._credit.available < self._estimate_added_cost(granted, num_rows):
            granted = {slot: nodes // 2 for slot, nodes in granted.items() if nodes > 1}
        return granted

    def _estimate_added_cost(self, granted: dict[int, int], num_rows: int) -> float:
        """Return the seconds that these drafts add to the step, in the drafter and in the target's forward pass."""
        nodes, longest = sum(granted.values()), max(granted.values())
        return self.planner.estimate_added_pass_time(num_rows, nodes) + self.draft_cost.predict(0, longest, nodes)

    def _update_mode(self, adjustable: Candidates) -> None:
        """Resume drafting if it pays and the credit covers it; pause it if it does not pay or the credit is used up."""
        if self._is_drafting:
            self._is_drafting = self._plan.speedup >= 1.0 - GAIN_MARGIN and not self._credit.is_used_up
            if self._credit.is_used_up:  # the plan was wrong, so the estimates behind it lose weight
                self.survival.discount_evidence()
            if not self._is_drafting:
                self._probed_slots, self._next_probe_step = (), self._step + self._probe_interval
        elif self._plan.speedup > 1.0 + GAIN_MARGIN and self._credit.seconds > self._credit.plain_step_cost:
            slots = [c.slot for c in adjustable if self._plan.nodes_by_slot.get(c.slot)]
            catch_up = self._estimate_catch_up_cost(slots)
            if catch_up <= MAX_PAYBACK_STEPS * (self._plan.speedup - 1.0) * self._credit.plain_step_cost:
                self._is_drafting, self._probe_interval = True, MIN_PROBE_INTERVAL
                self._credit.grant_loan(catch_up)

    def _estimate_catch_up_cost(self, slots: Sequence[int]) -> float:
        """Return the seconds that the drafter takes to read the unread tokens of these requests."""
        unread, newcomers = self._count_unread(slots)
        return self.draft_cost.predict(0, 1, 0, unread, newcomers) - self.draft_cost.predict(0, 1, 0)

    def _count_unread(self, slots: Sequence[int]) -> tuple[int, int]:
        """Return (unread tokens, newcomers), where a newcomer is a request that never drafted.

        One token is unread for each step since a request's last draft. The prompt of a newcomer is not counted: this
        policy does not see its length.
        """
        pauses = [self._step - self._next_unread_step[slot] for slot in slots if slot in self._next_unread_step]
        return sum(pauses), len(slots) - len(pauses)

    def _update_probe(self, adjustable: Candidates, granted: dict[int, int], num_rows: int) -> None:
        """Start a probe of requests without drafts if one is due and the credit covers it; end one that is over.

        A probe lasts several consecutive steps, because the time of the first one includes reading the unread tokens.
        Only the later ones measure the cost of a draft.
        """
        if self._probe_steps_left:
            self._probe_steps_left -= 1
            if self._probe_steps_left:
                return
            # The probe is over. It has paid if the plan now grants drafts to a probed request.
            has_paid = any(granted.get(slot, 0) for slot in self._probed_slots)
            self._probe_interval = MIN_PROBE_INTERVAL if has_paid else min(2 * self._probe_interval, MAX_PROBE_INTERVAL)
            self._probed_slots, self._next_probe_step = (), self._step + self._probe_interval
        load = len(adjustable)
        if not self._is_load_similar(load):
            self._probe_load, self._probe_interval = load, MIN_PROBE_INTERVAL
            self._next_probe_step = min(self._next_probe_step, self._step)
        if self._step < self._next_probe_step:
            return
        slots = [c.slot for c in adjustable if not granted.get(c.slot, 0)]
        if not slots:
            return
        # The request with the oldest draft comes first. Requests without any draft come last.
        slots.sort(key=lambda slot: self._next_unread_step.get(slot, self._step))
        max_cost = PROBE_COST_FACTOR * self._estimate_probe_cost(slots[:1], num_rows)
        count = 1
        while count < len(slots) and self._estimate_probe_cost(slots[: 2 * count], num_rows) <= max_cost:
            count *= 2
        cost = self._estimate_probe_cost(slots[:count], num_rows)
        if self._credit.seconds > cost + MIN_CREDIT_AFTER_PROBE * self._credit.plain_step_cost:
            self._probed_slots, self._probe_steps_left = tuple(slots[:count]), PROBE_STEPS

    def _estimate_probe_cost(self, slots: Sequence[int], num_rows: int) -> float:
        """Return the seconds that a probe of these requests adds if none of its nodes is accepted.

        While other requests draft, the drafter runs in any case. The time of a few more nodes in it is then neglected.
        """
        nodes = PROBE_NODES * len(slots)
        per_step = self.planner.estimate_added_pass_time(num_rows, nodes)
        if not self._is_drafting:
            per_step += self.draft_cost.predict(0, PROBE_NODES, nodes)
        return PROBE_STEPS * per_step + self._estimate_catch_up_cost(slots)

    # Estimates, after a step

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        outcomes = report.outcomes
        slots = [o.slot for o in outcomes if o.max_draft_nodes > 0]  # requests that were granted a draft
        if self._skip_observation(bool(slots)):
            return
        longest = max((o.max_draft_nodes for o in outcomes), default=0)  # largest grant; 0 = a plain step
        nodes = sum([o.num_drafted for o in outcomes])
        unread, newcomers = self._count_unread(slots)
        counts = report.num_requests, report.num_rows, report.num_logit_rows, report.attended_tokens
        predicted = self.curve.predict(*counts)
        # `update` returns the measured time, clipped if it is an outlier.
        pass_time = self.curve.update(*counts, max(report.step_time - report.draft_time, 0.0) / self._slowdown)
        drafting = report.draft_time / self._slowdown
        drafting = self.draft_cost.update(len(outcomes), longest, nodes, unread, newcomers, drafting, pass_time)
        if predicted > 0.0:
            ratio = pass_time / predicted
            self._slowdown *= 1.0 + SLOWDOWN_SMOOTHING * (ratio - 1.0)
            if not longest:
                self.planner.plain_cost_ratio += PLAIN_COST_SMOOTHING * (ratio - self.planner.plain_cost_ratio)
        if outcomes:
            self._update_credit(report, nodes, pass_time + drafting, has_drafts=longest > 0)
        for o in outcomes:
            if o.max_draft_nodes > 0:
                self.survival.record_draft(o.slot, o.max_draft_nodes, o.num_drafted, o.accepted_nodes)
                self._next_unread_step[o.slot] = self._step + 1
            else:
                self.survival.record_idle(o.slot, self._num_unobserved + 1)
        if not longest:
            self.survival.record_pause(self._num_unobserved + 1)
        self._num_unobserved = 0
        self._num_others = max(0, len(outcomes) - self._num_candidates) if self._num_candidates else 0
        self._num_candidates = 0
        self._steps_since_plain = self._steps_since_plain + 1 if longest else 0
        if self._is_warming_up and outcomes:
            is_too_costly = self._credit.seconds < 0.0 and self._warmup_step >= MIN_WARMUP_STEPS
            self._warmup_step = len(WARMUP_NODES) if is_too_costly else self._warmup_step + 1
        self._step += 1

    def _skip_observation(self, has_drafts: bool) -> bool:
        """Return true if the report of a step is not evaluated: three in four while no request drafts, to save time.

        Such a step only adds its allowance to the credit.
        """
        is_busy = self._num_candidates > 0 and (self._is_drafting or self._is_warming_up)
        if has_drafts or is_busy or self._num_unobserved == MAX_UNOBSERVED_STEPS:
            return False
        self._num_unobserved += 1
        self._step += 1
        self._num_candidates = 0
        self._steps_since_plain = 0
        self._credit.record_unobserved_step()
        return True

    def _update_credit(self, report: StepReport, nodes: int, seconds: float, has_drafts: bool) -> None:
        """Add the time that a step saved to the time credit, or subtract the time that it lost.

        Args:
            report: the step.
            nodes: draft nodes of all requests.
            seconds: time of forward pass and drafter, without outliers.
            has_drafts: whether a request was granted a draft.
        """
        count, context = len(report.outcomes), report.attended_tokens / max(report.num_rows, 1)
        observing = self.draft_cost.predict(count, 0, 0)  # seconds in the drafter without drafts
        rows, scored = report.num_rows - nodes, report.num_logit_rows - nodes
        ratio = self.planner.plain_cost_ratio
        without_drafts = ratio * self.curve.predict(report.num_requests, rows, scored, context * rows) + observing
        plain = without_drafts  # cost without drafts and without prompt chunks
        if rows != count:  # the step has prompt chunks
            plain = ratio * self.curve.predict(count, count, count, context * count) + observing
        if has_drafts and not self._has_fixed:
            # An accepted token saves its request a later plain step, of which the share of one request is 1 / count.
            num_accepted = sum([len(o.accepted_nodes) for o in report.outcomes])
            self._credit.record_step(plain, without_drafts, (seconds, num_accepted * plain / count))
        else:
            self._credit.record_step(plain, without_drafts, None)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots: estimates, probe and plan."""
        self.survival.forget(slots)
        for slot in slots:
            self._next_unread_step.pop(slot, None)
        if not set(self._probed_slots).isdisjoint(slots):  # a probe ends with any of its requests
            self._probed_slots, self._probe_steps_left = (), 0
        remaining = {slot: nodes for slot, nodes in self._plan.nodes_by_slot.items() if slot not in slots}
        self._plan = replace(self._plan, nodes_by_slot=remaining)
        if self._is_drafting and len(remaining) < LARGE_BATCH:  # compute a new plan for the remaining requests
            self._plan_key = None
