"""Planning of a step: the requests of its batch."""

from foredraft.draft_length.policy import DraftLengthPolicy
from foredraft.engine.mask_budget import MaskBudget
from foredraft.engine.request_memory import RequestMemory
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler
from foredraft.request import Batch, Request


class BatchPlanner:
    """Plans the batch of each step: the scheduler's choice, without the requests that the mask budget defers."""

    def __init__(self, scheduler: Scheduler, drafter: SandboxedDrafter, memory: RequestMemory) -> None:
        """Set up a planner without requests.

        Args:
            scheduler: chooses the batch.
            drafter: limits the draft nodes of a request.
            memory: preempts requests before a batch is scheduled.
        """
        self.scheduler = scheduler
        self.drafter = drafter
        self.memory = memory
        self.mask_budget = MaskBudget()  # defers requests whose grammar masks take too much time

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.scheduler.add(request)
        self.mask_budget.add_request(request)

    def plan(self, length_policy: DraftLengthPolicy, allowed: frozenset[Request] | None) -> Batch:
        """Preempt requests as far as the next batch needs it, and schedule the batch.

        If no other request can run, the mask budget releases some of those that it defers, and the batch is scheduled
        again.

        Args:
            length_policy: grants draft nodes to each request.
            allowed: requests that may run in the step. None = all.
        """
        deferred = self.mask_budget.find_deferred()
        batch = self._schedule(length_policy, allowed, deferred)
        if deferred and not batch.requests and self.mask_budget.release_deferred(allowed):
            batch = self._schedule(length_policy, allowed, self.mask_budget.find_deferred())
        return batch

    def _schedule(
        self, length_policy: DraftLengthPolicy, allowed: frozenset[Request] | None, deferred: frozenset[Request]
    ) -> Batch:
        if deferred:
            allowed = self.scheduler.exclude(deferred, allowed)
        # `allowed` is already without the deferred requests. They are passed too, because a full batch preempts them.
        self.memory.apply_releases(allowed, deferred)
        # The spec is read after the releases: a drafter that fails in `flush` may be in quarantine now.
        return self.scheduler.schedule(self.drafter.spec.max_nodes, length_policy, allowed)
