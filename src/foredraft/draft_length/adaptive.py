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
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from foredraft.draft_length.acceptance import SurvivalEstimator
from foredraft.draft_length.costs import CostCurve, DraftCost, LengthPlan, Planner, StepShape
from foredraft.draft_length.credit import TimeCredit
from foredraft.draft_length.intervals import LARGE_BATCH, PAUSED_LIFETIME, compute_plain_interval, get_plan_lifetime
from foredraft.draft_length.policy import DecisionReason, DraftCandidate, LengthDecision, StepReport
from foredraft.draft_length.probes import PROBE_NODES, PROBE_STEPS, ProbeSchedule
from foredraft.draft_length.unread import UnreadCounter

# Pausing and resuming
GAIN_MARGIN = 0.01  # a predicted gain above this starts drafting; a gain below -GAIN_MARGIN pauses it
MAX_PAYBACK_STEPS = 100  # drafting resumes only if the gain of this many steps repays the time to catch up
# Warm-up: the first steps, to measure costs
WARMUP_NODES = (0, 0, 1, 1, 3, 3, 3)  # draft nodes per request: entry i is for step i
MAX_WARMUP_REQUESTS = 2  # requests that draft during warm-up
MIN_WARMUP_STEPS = 4  # steps before a negative credit may end it; the first draft is slow: the drafter reads the prompt
# Probes: short drafts of requests that have none (`probes.py`)
PROBE_COST_FACTOR = 1.5  # a probe of several requests may cost this many times as much as a probe of one
MIN_CREDIT_AFTER_PROBE = 2  # plain steps of credit that remain if no node of the probe is accepted
# Measurements while requests draft
LONG_DRAFT_INTERVAL = 32  # one in this many steps has drafts 1.5 times as long as planned, to measure longer ones
SLOWDOWN_SMOOTHING = 0.2  # weight of the newest step in the slowdown of the machine
PLAIN_COST_SMOOTHING = 0.1  # weight of the newest plain step in the ratio of measured to predicted cost
MAX_UNOBSERVED_STEPS = 3  # reports in a row that may be skipped (`_skip_observation`)

Candidates = Sequence[DraftCandidate]


class AdaptiveLengthPolicy:
    """Draft-length policy that maximises predicted tokens per second, and drafts nothing if no draft pays.

    It has three parts:

    - The plan sets the draft nodes of each request. It is computed from measured costs and estimated survival.
    - Probes and occasional plain steps keep the measurements current.
    - The time credit (`credit.py`) bounds the loss. If it is used up, drafting is paused, whatever the plan predicts.

    The policy grants fixed lengths as they are, without plan and credit.

    Greedy and sampled requests have separate estimates; `kind` is 0 for greedy and 1 for sampled.

    Args:
        curve: time of a forward pass of the target by its number of tokens; None = learned from steps.
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
        self._is_drafting = True  # False = paused: only probes and requests of fixed length draft
        self._plan, self._plan_age = LengthPlan(), 0  # age in steps
        self._plan_key: object = None  # batch that the plan was computed for; None = compute a new plan
        self._plan_kinds: frozenset[int] = frozenset()  # kinds of the requests in that batch
        self._unread = UnreadCounter()
        self._num_unobserved = 0  # steps since the last report that was evaluated
        self._num_candidates = 0  # candidates of the current step
        # Requests that got a token but could not draft, such as those of fixed length 0, in the last step whose report
        # was evaluated. The plan includes them as requests without drafts.
        self._num_others = 0
        self._has_fixed = False  # the current step has drafts of fixed length
        self._steps_since_plain = 0  # steps with drafts since the last plain step
        self._slowdown = 1.0  # current step time over the usual one; all other times are divided by it
        self._credit = TimeCredit()
        self._probes = ProbeSchedule()

    # Decisions, before a step

    def allocate(self, candidates: Candidates, num_pass_tokens: int, attended_tokens: int = 0) -> list[int]:
        """Grant draft nodes for the next step; arguments as in `DraftLengthPolicy.allocate`."""
        if not self._is_drafting and not self._probes.slots:
            if any(c.kind not in self._plan_kinds for c in candidates):
                self._plan_key = None  # the plan was computed without this kind, so this step computes a new one
            elif self._would_draft_nothing_again(candidates):
                return self._repeat_decision(candidates)
        self._select_kind(candidates)
        # A fixed length is granted as it is. The policy decides only about the other candidates, the adjustable ones.
        adjustable = [c for c in candidates if not c.is_fixed and c.max_nodes > 0]
        nodes_by_slot = {c.slot: c.max_nodes for c in candidates if c.is_fixed}
        self._num_candidates, self._has_fixed = len(candidates), bool(nodes_by_slot)
        reason: DecisionReason = "fixed"
        if adjustable:
            self._replan(candidates, adjustable, num_pass_tokens, attended_tokens)
            reason, chosen = self._choose_nodes(adjustable, num_pass_tokens)
            nodes_by_slot |= chosen
        granted = [min(nodes_by_slot.get(c.slot, 0), c.max_nodes) for c in candidates]
        plan = self._plan if adjustable else LengthPlan()
        self.decision = LengthDecision(
            reason, nodes=sum(granted), longest=max(granted, default=0), plain_rate=plan.plain_rate / self._slowdown,
            rate=plan.rate / self._slowdown, acceptance=plan.acceptance,
        )  # fmt: skip
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

    def _repeat_decision(self, candidates: Candidates) -> list[int]:
        """Repeat the last decision, to draft nothing. It saves the time of a new decision."""
        self._plan_age += 1
        self._num_candidates, self._has_fixed = len(candidates), False
        self.counts[self.decision.reason] += 1
        return [0] * len(candidates)

    def _would_draft_nothing_again(self, candidates: Candidates) -> bool:
        """Return whether drafting stays paused, and neither a probe nor a fixed draft can start now."""
        return (
            self.decision.nodes == 0  # otherwise the last decision cannot be repeated
            and self._plan_age + 1 < PAUSED_LIFETIME  # this step computes no new plan
            and self._plan.speedup <= 1.0 + GAIN_MARGIN  # drafting does not resume
            and self._step < self._probes.next_step  # no probe is due
            and self._probes.is_load_similar(len(candidates))  # and none becomes due, as it would at a new load
            and not any(c.is_fixed for c in candidates)  # a fixed length is always granted
        )

    @property
    def _is_warming_up(self) -> bool:
        return self._warmup_step < len(WARMUP_NODES)

    def _replan(
        self, candidates: Candidates, adjustable: Candidates, num_pass_tokens: int, attended_tokens: int
    ) -> None:
        """Compute a new plan for the adjustable candidates, unless the current plan may still be used."""
        key = (num_pass_tokens, tuple(candidates), self._num_others, self.survival.is_tree)
        self._plan_age += 1
        if self._is_plan_current(key, len(adjustable)):
            return
        self._plan_key, self._plan_age, self._plan_kinds = key, 0, frozenset(c.kind for c in candidates)
        fixed = [c for c in candidates if c.is_fixed]
        fixed_longest = max((c.max_nodes for c in fixed), default=0)
        fixed_survival = self.survival.estimate_survival([c.slot for c in fixed], fixed_longest)
        shape = StepShape(
            num_requests=len(candidates) + self._num_others,
            num_pass_tokens=num_pass_tokens,
            context_per_token=attended_tokens / max(num_pass_tokens, 1),
            fixed_longest=fixed_longest,
            fixed_nodes=sum(c.max_nodes for c in fixed),
            fixed_accepted=sum(sum(row[: c.max_nodes]) for c, row in zip(fixed, fixed_survival, strict=True)),
        )
        slots, max_nodes = [c.slot for c in adjustable], [c.max_nodes for c in adjustable]
        survival = self.survival.estimate_survival(slots, max(max_nodes))
        draft_probs = self.survival.estimate_draft_probs(slots, max(max_nodes))
        self._plan = self.planner.find_best_plan(shape, slots, max_nodes, survival, draft_probs)

    def _is_plan_current(self, key: object, count: int) -> bool:
        """Return whether the plan may still be used for the batch `key` with `count` adjustable requests."""
        if self._is_warming_up or self._plan_key is None:
            return False
        return self._plan_age < get_plan_lifetime(count, not self._is_drafting, is_same_batch=key == self._plan_key)

    def _choose_nodes(self, adjustable: Candidates, num_pass_tokens: int) -> tuple[DecisionReason, dict[int, int]]:
        """Return the reason of the decision, and the draft nodes by slot; a slot without an entry gets none."""
        if self._is_warming_up:
            nodes = WARMUP_NODES[self._warmup_step]
            return "start", {c.slot: min(nodes, c.max_nodes) for c in adjustable[:MAX_WARMUP_REQUESTS]}
        self._update_mode(adjustable)
        if self._is_drafting:
            reason: DecisionReason = "pays"
        elif self._plan.speedup > 1.0 + GAIN_MARGIN:  # drafting would pay, but `_update_mode` did not resume it
            reason = "guard"
        else:
            reason = "does not pay"
        granted = self._plan.nodes_by_slot if self._is_drafting else {}
        if self._is_drafting and self._steps_since_plain >= compute_plain_interval(self._plan.speedup - 1.0):
            return "measure", {}
        if self._is_drafting and self._step % LONG_DRAFT_INTERVAL == 0:  # half as long again, rounded up
            granted = {slot: nodes + (nodes + 1) // 2 for slot, nodes in granted.items()}
        self._update_probe(adjustable, granted, num_pass_tokens)
        if self._probes.slots:
            granted = granted | {slot: max(PROBE_NODES, granted.get(slot, 0)) for slot in self._probes.slots}
            reason = reason if self._is_drafting else "probe"
        return reason, self._limit_to_credit(granted, num_pass_tokens) if self._is_drafting else granted

    def _limit_to_credit(self, granted: dict[int, int], num_pass_tokens: int) -> dict[int, int]:
        """Halve the drafts until the time credit covers their cost: the time that is lost if every node is rejected.

        Otherwise a few rejected long drafts could use up the credit, and prevent the short drafts that would pay.
        """
        if self._credit.is_ample:
            return granted
        while granted and self._credit.available < self._estimate_added_cost(granted, num_pass_tokens):
            granted = {slot: nodes // 2 for slot, nodes in granted.items() if nodes > 1}
        return granted

    def _estimate_added_cost(self, granted: dict[int, int], num_pass_tokens: int) -> float:
        """Return the seconds that these drafts add to the step, in the drafter and in the target's forward pass.

        `requests=0` leaves out the cost of observing, because a step without drafts has it too.
        """
        nodes, longest = sum(granted.values()), max(granted.values())
        drafter_seconds = self.draft_cost.predict(requests=0, longest=longest, nodes=nodes)
        return self.planner.estimate_added_pass_time(num_pass_tokens, nodes) + drafter_seconds

    def _update_mode(self, adjustable: Candidates) -> None:
        """Resume drafting if it pays; pause it if it does not pay or the credit is used up.

        Resuming takes more than one plain step of credit. When drafting resumes, the drafter first has to catch up.
        The credit lends the time for it (`TimeCredit.grant_loan`), if the gain of MAX_PAYBACK_STEPS repays it.
        """
        if self._is_drafting:
            self._is_drafting = self._plan.speedup >= 1.0 - GAIN_MARGIN and not self._credit.is_used_up
            if self._credit.is_used_up:  # the plan was wrong, so the estimates behind it lose weight
                self.survival.discount_evidence()
            if not self._is_drafting:
                self._probes.postpone(self._step)
        elif self._plan.speedup > 1.0 + GAIN_MARGIN and self._credit.seconds > self._credit.plain_step_cost:
            slots = [c.slot for c in adjustable if self._plan.nodes_by_slot.get(c.slot)]
            catch_up = self._estimate_catch_up_cost(slots)
            if catch_up <= MAX_PAYBACK_STEPS * (self._plan.speedup - 1.0) * self._credit.plain_step_cost:
                self._is_drafting = True
                self._probes.reset_interval()
                self._credit.grant_loan(catch_up)

    def _estimate_catch_up_cost(self, slots: Sequence[int]) -> float:
        """Return the seconds that the drafter takes to read the unread tokens of these requests.

        It is the difference between two drafts that are equal in all but the unread tokens.
        """
        unread, newcomers = self._unread.count(slots, self._step)
        with_unread = self.draft_cost.predict(requests=0, longest=1, nodes=0, unread=unread, newcomers=newcomers)
        return with_unread - self.draft_cost.predict(requests=0, longest=1, nodes=0)

    def _update_probe(self, adjustable: Candidates, granted: dict[int, int], num_pass_tokens: int) -> None:
        """Start a probe of requests without drafts if one is due and the credit covers it; end one that is over.

        A probe lasts several consecutive steps, because the time of the first one includes reading the unread tokens.
        Only the later ones measure the cost of a draft.
        """
        if self._probes.slots:
            is_over = self._probes.count_step()  # counts the last step, which belonged to the probe
            if not is_over:
                return
            # The probe has paid if the plan now grants drafts to a probed request. If `_update_mode` has just decided
            # not to resume drafting, `granted` is empty.
            self._probes.finish(self._step, has_paid=any(granted.get(slot, 0) for slot in self._probes.slots))
        self._probes.adapt_to_load(len(adjustable), self._step)
        if self._step < self._probes.next_step:
            return
        slots = [c.slot for c in adjustable if not granted.get(c.slot, 0)]
        if not slots:
            return
        self._unread.sort_by_last_draft(slots, self._step)
        max_cost = PROBE_COST_FACTOR * self._estimate_probe_cost(slots[:1], num_pass_tokens)
        count = 1
        while count < len(slots) and self._estimate_probe_cost(slots[: 2 * count], num_pass_tokens) <= max_cost:
            count *= 2
        cost = self._estimate_probe_cost(slots[:count], num_pass_tokens)
        if self._credit.seconds > cost + MIN_CREDIT_AFTER_PROBE * self._credit.plain_step_cost:
            self._probes.start(tuple(slots[:count]))

    def _estimate_probe_cost(self, slots: Sequence[int], num_pass_tokens: int) -> float:
        """Return the seconds that a probe of these requests adds if none of its nodes is accepted.

        While other requests draft, the drafter runs in any case. The time that it takes for a few more nodes is then
        neglected.
        """
        nodes = PROBE_NODES * len(slots)
        per_step = self.planner.estimate_added_pass_time(num_pass_tokens, nodes)
        if not self._is_drafting:
            per_step += self.draft_cost.predict(requests=0, longest=PROBE_NODES, nodes=nodes)
        return PROBE_STEPS * per_step + self._estimate_catch_up_cost(slots)

    # Estimates, after a step

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        outcomes = report.outcomes
        slots = [o.slot for o in outcomes if o.granted_nodes > 0]  # requests that were granted a draft
        if self._skip_observation(bool(slots)):
            return
        longest = max((o.granted_nodes for o in outcomes), default=0)  # most nodes of one request; 0 = a plain step
        nodes = sum([o.num_drafted for o in outcomes])
        unread, newcomers = self._unread.count(slots, self._step)
        pass_size = report.num_requests, report.num_pass_tokens, report.num_logit_rows, report.attended_tokens
        predicted_pass = self.curve.predict(*pass_size)
        # Both calls of `update` return the measured seconds, clipped if they are an outlier.
        pass_seconds = self.curve.update(*pass_size, max(report.step_time - report.draft_time, 0.0) / self._slowdown)
        draft_seconds = self.draft_cost.update(
            requests=len(outcomes), longest=longest, nodes=nodes, unread=unread, newcomers=newcomers,
            seconds=report.draft_time / self._slowdown, scale=pass_seconds,
        )  # fmt: skip
        if predicted_pass > 0.0:
            ratio = pass_seconds / predicted_pass
            self._slowdown *= 1.0 + SLOWDOWN_SMOOTHING * (ratio - 1.0)
            if not longest:
                self.planner.plain_cost_ratio += PLAIN_COST_SMOOTHING * (ratio - self.planner.plain_cost_ratio)
        if outcomes:
            self._update_credit(report, nodes, pass_seconds + draft_seconds, has_drafts=longest > 0)
        for o in outcomes:
            if o.granted_nodes > 0:
                self.survival.record_draft(o.slot, o.granted_nodes, o.num_drafted, o.accepted_nodes)
                self._unread.record_draft(o.slot, self._step)
            else:
                self.survival.record_idle(o.slot, self._num_unobserved + 1)
        if not longest:
            self.survival.record_pause(self._num_unobserved + 1)
        self._num_unobserved = 0
        # After a step without candidates, its requests may become candidates, so they are not counted as others.
        self._num_others = max(0, len(outcomes) - self._num_candidates) if self._num_candidates else 0
        self._num_candidates = 0
        self._steps_since_plain = self._steps_since_plain + 1 if longest else 0
        if self._is_warming_up and outcomes:
            self._warmup_step += 1
            if self._credit.seconds < 0.0 and self._warmup_step >= MIN_WARMUP_STEPS:
                self._warmup_step = len(WARMUP_NODES)
        self._step += 1

    def _skip_observation(self, has_drafts: bool) -> bool:
        """Skip the report of a step without drafts, to save time, if drafting is paused or there was no candidate.

        One report in four is evaluated even then. A skipped step only adds its allowance to the time credit. Returns
        whether the report was skipped.
        """
        is_busy = self._num_candidates > 0 and self._is_drafting  # true during warm-up
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

        Two costs of the step are predicted: its cost without its drafts, and that of the plain step, which leaves out
        the prompt chunks too. Both include the time that the drafter needs to observe a step.

        Args:
            report: the step.
            nodes: draft nodes of all requests.
            seconds: time of forward pass and drafter, clipped if it is an outlier.
            has_drafts: whether a request was granted a draft.
        """
        count = len(report.outcomes)  # requests that got a new token
        context = report.attended_tokens / max(report.num_pass_tokens, 1)  # attended tokens per token of the pass
        observing = self.draft_cost.predict(requests=count, longest=0, nodes=0)  # seconds in the drafter without drafts

        def predict_cost(num_requests: int, num_tokens: int, num_rows: int) -> float:
            pass_cost = self.curve.predict(num_requests, num_tokens, num_rows, context * num_tokens)
            return self.planner.plain_cost_ratio * pass_cost + observing

        num_tokens, num_rows = report.num_pass_tokens - nodes, report.num_logit_rows - nodes  # those without drafts
        cost_without_drafts = plain_step_cost = predict_cost(report.num_requests, num_tokens, num_rows)
        if num_tokens != count:  # the step has prompt chunks
            plain_step_cost = predict_cost(count, count, count)
        if has_drafts and not self._has_fixed:
            # Each accepted token saves one request's share of a later plain step: plain_step_cost / count.
            saved_later = sum([len(o.accepted_nodes) for o in report.outcomes]) * plain_step_cost / count
            self._credit.record_step(plain_step_cost, cost_without_drafts, seconds, saved_later)
        else:
            self._credit.record_step(plain_step_cost, cost_without_drafts)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots: estimates, probe and plan."""
        self.survival.forget(slots)
        self._unread.forget(slots)
        self._probes.forget(slots)
        remaining = {slot: nodes for slot, nodes in self._plan.nodes_by_slot.items() if slot not in slots}
        self._plan = replace(self._plan, nodes_by_slot=remaining)
        if self._is_drafting and len(remaining) < LARGE_BATCH:  # compute a new plan for the remaining requests
            self._plan_key = None
