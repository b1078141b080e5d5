"""Several drafters as one, chosen anew for every request of every step (see choice.py), or merged (see merging.py).

Parts that read nothing but the text are asked first: that is nearly free, and how good their drafts are is known by how
much of the text speaks for them. One part that costs a pass of its own may be asked in a step, for the requests where
that pays. Below the end of its draft a text part goes on, if there is room. What became of all drafts is counted
against the text that came, whether they were verified or not.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.base import Draft, bare
from foredraft.drafters.choice import Case, Choice, Mode, Offer, Plan, Use, union
from foredraft.drafters.joint_memory import joined
from foredraft.drafters.merging import Joint, first_rows, own_path, planted
from foredraft.drafters.parts import Part, Step, alone, fate, together
from foredraft.drafters.probation import Probation
from foredraft.kv.memory import DraftMemory
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

BACKLOG = 4  # steps unread beyond which a draft's time says what reading costs, not what drafting does


class Composed:
    """The verbs. `parts` in order; `title` says what they are."""

    def __init__(
        self, parts: Sequence[Part], mode: Mode, title: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.parts, self.mode, self.title = list(parts), mode, title
        self.texts = [i for i, part in enumerate(parts) if part.is_text]
        self.uses = {i: Use(i) for i in range(len(parts)) if i not in self.texts}
        self.choice = Choice(list(self.uses.values()), mode)
        self.counts: Counter[str] = Counter()  # drafts by who made them
        self._clock = clock
        self._own_taps: list[tuple[int, ...]] = []
        self._taps: tuple[int, ...] = ()
        self._places: dict[tuple[int, int], list[int]] = {}  # (part, b) -> its nodes in the tree that is verified
        self._steps: dict[int, Step] = {}  # by slot
        self._asked: list[Use] = []
        self._seen: dict[tuple[int, int], int] = {}  # (part, slot) -> the step it was last asked in
        self._count = 0
        self._began = self._ended = 0.0  # of the last proposal
        self._num_nodes = self._most()
        self._rows = 0

    # -- what it is

    @property
    def taps(self) -> tuple[int, ...]:
        """Of all parts. What a part sees of a pass goes by its taps when this was last asked for, before the pass."""
        taps = [part.drafter.taps for part in self.parts]
        if taps != self._own_taps:
            self._own_taps, self._taps = taps, _union(taps)
            for part, own in zip(self.parts, taps, strict=True):
                part.columns = [self._taps.index(tap) for tap in own]
        return self._taps

    def attach(self, target: object) -> None:
        """Say to the parts that draft in the target's own memory whose that is. Raises what they raise."""
        for part in self.parts:
            attach = getattr(part.drafter, "attach", None)
            if attach is not None:
                attach(target)

    @property
    def num_nodes(self) -> int:
        """Asked for several times a step; it changes between steps, when a part begins or ends a rest."""
        return self._num_nodes

    def _most(self) -> int:
        texts = [self.parts[i].num_nodes for i in self.texts]
        others = [self.parts[i].num_nodes for i in self.uses]
        if self.mode == "merge":
            return sum(texts) + sum(others)
        return max(texts, default=0) + max(others, default=0)

    @property
    def memory(self) -> DraftMemory | None:
        held = [getattr(part.guarded, "memory", None) for part in self.parts]
        return joined([memory for memory in held if memory is not None])

    @property
    def decides_length(self) -> bool:
        """Every draft is weighed against its price here, with more to go by than its length."""
        return self.mode != "merge"

    @property
    def wants_answers(self) -> bool:
        return any(getattr(part.guarded, "wants_answers", False) for part in self.parts)

    @property
    def probations(self) -> tuple[Probation, ...]:
        """Of all parts: each fails, and rests, alone."""
        return tuple(one for part in self.parts for one in part.probations)

    # -- the verbs

    def propose(self, batch: Batch) -> TokenTree:
        self._began = self._clock()
        self._places.clear()
        self._steps.clear()
        rows = batch.drafting()
        cases = {b: self._case(batch, b) for b in rows}
        for index, use in self.uses.items():
            use.most = self.parts[index].num_nodes
        self._asked, found = self.choice.choose(list(cases.values()))
        plans = dict(zip(rows, found, strict=True))
        trees = [self._ask(batch, use, n, cases, plans) for n, use in enumerate(self._asked)]
        tree = self._merged(batch, trees, cases, plans)
        self._rows = sum(tree.sizes)
        self._ended = self._clock()
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        now = self._clock()
        if self._steps:
            self._learn(batch, commit, now)
        for i, part in enumerate(self.parts):
            if part.observes and not part.probation.is_resting:
                part.guarded.observe(batch, self._view(i, batch, commit))
            part.probation.wake()
        self._num_nodes = self._most()
        self._places.clear()
        self._steps.clear()

    def forget(self, slots: Sequence[int]) -> None:
        for part in self.parts:
            part.forget(slots)
        for slot in slots:
            self.choice.worth.forget(slot)
            self._steps.pop(slot, None)
        self._seen = {key: step for key, step in self._seen.items() if key[1] not in slots}

    # -- proposing

    def _case(self, batch: Batch, b: int) -> Case:
        request, budget = batch.requests[b], batch.budgets[b]
        self.choice.worth.meet(request.slot, not request.sampling.is_greedy)
        offers = [offer for i in self.texts if (offer := self.parts[i].offer(i, request, budget)) is not None]
        is_chain = request.verify == "block"
        if len(offers) > 1 and self.mode != "sequence" and not is_chain and not any(o.is_drawn for o in offers):
            offers.append(together(offers, budget))
        step = self._steps[request.slot] = Step()
        for offer in offers:
            for i in offer.parts:
                self._places[i, b] = [0]  # until it is chosen, all nodes are another's
            if not offer.is_drawn:  # a draw that is not verified says nothing of those that are
                offer.trial = step.tries(offer.key, offer.draft.tokens, offer.draft.parents)
        draws = not request.sampling.is_greedy and request.verify == "reject"
        stale = tuple(i for i in self.uses if not self._is_fresh(i, request.slot))
        return Case(request.slot, budget, offers, not is_chain, not is_chain and not draws, stale)

    def _ask(self, batch: Batch, use: Use, n: int, cases: dict[int, Case], plans: dict[int, Plan]) -> TokenTree:
        """What a part, the n-th that is asked, proposes for the requests whose plans want it."""
        part, budgets = self.parts[use.index], [0] * len(batch)
        for b, plan in plans.items():
            budgets[b] = min(plan.nodes, use.most) if n == 0 or cases[b].may_merge_all else 0
        began = self._clock()
        tree = part.guarded.propose(replace(batch, budgets=tuple(budgets)))
        seconds = self._clock() - began
        deepest, is_fresh = 0, True
        for b, budget in enumerate(budgets):
            if budget:
                depth = max(tree.depths[b])
                use.saw(budget, depth)
                deepest = max(deepest, depth)
                slot = batch.requests[b].slot
                is_fresh &= self._is_fresh(use.index, slot)
                self._seen[use.index, slot] = self._count
        if deepest:
            use.took(deepest, seconds, is_fresh)
        return tree

    def _is_fresh(self, part: int, slot: int) -> bool:
        return self._count - self._seen.get((part, slot), -BACKLOG - 1) <= BACKLOG

    def _merged(
        self, batch: Batch, trees: Sequence[TokenTree], cases: dict[int, Case], plans: dict[int, Plan]
    ) -> TokenTree:
        """Everybody's tree by their plans; that of the only part that was asked as it is, where nothing joins it."""
        first = trees[0] if trees else bare(batch)
        rows = first_rows(batch, first) if first.q is not None else [0] * len(batch)
        joints, is_whole = [], len(trees) == 1
        for b in range(len(batch)):
            joint = Joint.of(first, b, rows[b])
            size = joint.size
            if b in cases:
                joint = self._joint(batch, b, joint, trees[1:], cases[b], plans[b])
                is_whole &= joint.size == size
            joints.append(joint)
        return first if is_whole else planted(batch, joints)

    def _joint(self, batch: Batch, b: int, joint: Joint, others: Sequence[TokenTree], case: Case, plan: Plan) -> Joint:
        """One request's tree: what was asked, then what was at hand, then an extension."""
        request, step = batch.requests[b], self._steps[batch.requests[b].slot]
        offer = plan.offer
        if joint.size:
            self._count_asked(self._asked[0], step, case, joint.tokens[1:], joint.parents[1:])
        for use, tree in zip(self._asked[1:], others, strict=True):
            tokens, parents = tree.token_lists[b][1:], tree.parent_lists[b][1:]
            if tokens:
                self._places[use.index, b] = joint.graft(Draft(tuple(tokens), tuple(parents)), case.budget)
                self._count_asked(use, step, case, tokens, parents)
        if offer is None and not joint.size:  # the part had nothing
            offer = self.choice.best_offer(case).offer
        if offer is not None:
            self.counts["+".join(self.parts[i].name for i in offer.parts)] += 1
            if not offer.is_drawn:
                self._graft(joint, b, offer, case.budget)
            elif not joint.size:
                step.tries(offer.key, offer.draft.tokens, offer.draft.parents)
                del self._places[offer.parts[0], b]
                return alone(offer.draft, batch.root(b))
        elif joint.size:
            self._extend(joint, request, self._asked[0], case.budget)
        return joint

    def _count_asked(self, use: Use, step: Step, case: Case, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.counts[self.parts[use.index].name] += 1
        trial = step.tries(use.key, tokens, parents)
        step.pairs += [(union(use, offer), offer.trial, trial) for offer in case.offers if offer.trial >= 0]

    def _graft(self, joint: Joint, b: int, offer: Offer, budget: int) -> None:
        places = joint.graft(offer.draft, budget)
        for i in offer.parts:  # where each of several stands is not known, and no text part asks
            self._places[i, b] = places if len(offer.parts) == 1 else [0]

    def _extend(self, joint: Joint, request: Request, use: Use, budget: int) -> None:
        """A text part goes on below the end of another's draft."""
        left = budget - joint.size
        if left <= 0 or request.room <= joint.size:
            return
        tip, path = joint.tip()
        if path[-1] in request.end_ids:
            return
        first, later = self.choice.worth.shares(request.slot, use.key)
        for i in self.texts:
            part = self.parts[i]
            text, key = part.text, (("below", i), 0)
            if text is None:
                continue
            draft = part.ask("extend", request, partial(text.extended, request, path, left)) or Draft()
            reach = first * later ** (len(path) - 1)
            if draft.tokens and draft.q is None and self.choice.takes(request.slot, key, reach, len(draft.tokens)):
                joint.graft(draft, budget, tip)
                step = self._steps[request.slot]
                step.tail, step.path, step.tail_tokens = key, tuple(path), draft.tokens
                return

    # -- learning

    def _learn(self, batch: Batch, commit: Commit, now: float) -> None:
        self._count += 1
        worth, total = self.choice.worth, 0
        for b, request in enumerate(batch.requests):
            step = self._steps.get(request.slot)
            text = commit.token_lists[b][batch.chunks[b] - 1 :]
            total += len(text)
            if step is None or not text:
                continue
            found = [fate(trial.tokens, trial.parents, text) for trial in step.trials]
            for trial, (kept, reached) in zip(step.trials, found, strict=True):
                worth.learn(request.slot, trial.key, kept, reached)
            for key, one, other in step.pairs:
                kept = max(found[one][0], found[other][0])
                worth.learn(request.slot, key, kept, max(found[one][1], found[other][1]))
            if step.tail is not None and tuple(text[: len(step.path)]) == step.path:
                tail = step.tail_tokens
                worth.learn(request.slot, step.tail, *fate(tail, range(len(tail)), text[len(step.path) :]))
        self.choice.asked(self._asked)
        if max(batch.chunks) == 1:  # a prompt's pass says nothing of rows that are drafted
            self.choice.passes.learn(self._rows, now - self._ended)
            self.choice.passed(total, now - self._began)

    def _view(self, i: int, batch: Batch, commit: Commit) -> Commit:
        """What a part would have seen alone: its own nodes' numbers, its own boundaries."""
        part = self.parts[i]
        changes: dict[str, Any] = {}
        if any(len(commit.path_lists[b]) > batch.chunks[b] for (j, b) in self._places if j == i):
            changes["path"] = [
                own_path(path, batch.chunks[b] - 1, self._places[i, b]) if (i, b) in self._places else path
                for b, path in enumerate(commit.path_lists)
            ]
        if commit.features is not None and part.columns and part.columns != list(range(len(self._taps))):
            changes["features"] = _columns(commit.features, part.columns, len(self._taps))
        return replace(commit, **changes) if changes else commit


def _union(taps: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Every boundary once; those of the part with the most stand side by side."""
    return tuple(dict.fromkeys(tap for some in sorted(taps, key=len, reverse=True) for tap in some))


def _columns(features: Tensor, columns: Sequence[int], count: int) -> Tensor:
    """Some of `count` boundaries side by side, [B, P, count H]; a view where they are neighbours."""
    width = features.shape[-1] // count
    if list(columns) == list(range(columns[0], columns[0] + len(columns))):
        return features[..., columns[0] * width : (columns[-1] + 1) * width]
    return torch.cat([features[..., c * width : (c + 1) * width] for c in columns], -1)
