"""Memory of requests: their KV pages and slots, and what drafter and draft-length policy keep by slot."""

from collections.abc import Sequence

from foredraft.draft_length.policy import DraftLengthPolicy
from foredraft.engine.releases import NO_RELEASES
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.state_memory import StateMemory
from foredraft.errors import ForedraftError
from foredraft.kv.pool import KVPool
from foredraft.request import Request


class RequestMemory:
    """Frees the memory of requests that leave: they are preempted, end, or are computed again after a fault.

    A drafter may defer the computation of its KV; this KV is pending. It is written before pages are shared or freed,
    so that requests that share or later reuse the pages get their draft KV too. While drafting rests it is not written:
    for a drafter that never pays, that would be the largest part of its cost.
    """

    def __init__(
        self, scheduler: Scheduler, drafter: SandboxedDrafter, length_policy: DraftLengthPolicy, target_pool: KVPool
    ) -> None:
        """Set up the memory of an engine.

        Args:
            scheduler: holds the pages and slots of requests.
            drafter: holds state by slot, and may have draft KV.
            length_policy: decides draft lengths, and holds state by slot.
            target_pool: KV pool of the target.
        """
        self.scheduler = scheduler
        self.drafter = drafter
        self.length_policy = length_policy  # `LLM.calibrate` replaces it, by `Engine.length_policy`
        self.target_pool = target_pool
        self.states = StateMemory(scheduler.allocator, target_pool, drafter)

    def check_fits(self, request: Request) -> None:
        """Raise ForedraftError if the request needs more KV memory than the pool has, or more tokens than one step."""
        allocator, limits, images = self.scheduler.allocator, self.scheduler.limits, request.spec.images
        if images is not None and images.longest_block > limits.max_step_tokens - limits.max_batch:
            raise ForedraftError(
                f"the {images.longest_block} tokens of an image are computed in one step, and a step has "
                f"{limits.max_step_tokens - limits.max_batch} for a prompt; raise max_step_tokens or lower max_batch"
            )
        max_length = len(request.spec.prompt) + request.spec.max_output_tokens
        # One page of the pool is the null page, which only padding uses.
        if allocator.count_pages(max_length) > allocator.num_pages - 1:
            raise ForedraftError(
                f"prompt and max_tokens need {max_length} tokens of KV memory and the pool holds "
                f"{(allocator.num_pages - 1) * allocator.page_size}; raise kv_tokens or lower max_tokens"
            )

    def apply_releases(self, allowed: frozenset[Request] | None, deferred: frozenset[Request]) -> None:
        """Write pending draft KV and preempt requests, as far as the next batch needs it.

        Args:
            allowed: requests that may run in the next step. None = all.
            deferred: requests that may not run. If the batch is full, they are preempted for waiting requests.
        """
        draft_kv = self.drafter.draft_kv
        if draft_kv is not None:
            draft_kv.is_resting = self.length_policy.is_resting
        releases = self.scheduler.find_releases(allowed, deferred)
        if releases is not NO_RELEASES:
            self._write_pending(releases.unwritten_slots)
            self._forget(self.scheduler.preempt(releases.preempted))
        self.states.trim(self.scheduler.running)

    def remove(self, requests: Sequence[Request], failed: frozenset[Request] = frozenset()) -> None:
        """Remove requests and free their memory.

        Args:
            requests: requests to remove.
            failed: those with invalid logits (`Commit.failed`). Their KV may be invalid too, so none of their pages
                stays in the prefix cache.
        """
        # The prefix cache may keep pages of these requests. Their draft KV cannot be written after the end.
        self._write_pending(self.scheduler.find_unwritten_slots([r for r in requests if r not in failed]))
        for request in requests:
            self._forget(self.scheduler.finish(request, has_invalid_kv=request in failed))

    def _write_pending(self, slots: Sequence[int]) -> None:
        """Write the pending draft KV of these slots, unless drafting rests."""
        if slots and not self.length_policy.is_resting:
            self.drafter.flush(slots)

    def clear(self) -> None:
        """Drop all KV, and the state of all slots: an interrupted step may have lost the owner of a slot.

        `Scheduler.reset` frees the pages and slots.
        """
        self._forget(range(self.scheduler.limits.max_batch))
        draft_kv = self.drafter.draft_kv
        for pool in (self.target_pool, *([] if draft_kv is None else [draft_kv.pool])):
            pool.clear()

    def _forget(self, slots: Sequence[int]) -> None:
        """Drop the state of drafter and draft-length policy for slots that became free."""
        if slots:
            self.drafter.forget(slots)
            self.length_policy.forget(slots)
