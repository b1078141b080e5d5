"""One engine step: plan, propose draft tokens, verify them in one forward pass of the target, commit.

The engine holds no model-specific code: target, drafter, verification rule and draft-length policy are interfaces.

A step has one token tree per request. The picture at the top of `tree.py` defines its parts. First comes the chunk: the
committed tokens that the step computes. They are a part of a prompt, or the last token of a request that decodes. If
the chunk ends with the request's last committed token, that token is the root, and the draft nodes follow. Otherwise
the tree has no root and no draft, and `TokenTree.roots[b]` is equal to `TokenTree.sizes[b]`. The root and the draft
nodes are scored: each has one row of logits. b is always a batch index, the index of a request in the step's `Batch`.

Letters of tensor shapes in the files of a step: B requests, T nodes of all trees together (the tokens of the forward
pass), R scored nodes, V vocabulary, P longest committed path, F width of the hidden states that the drafter reads.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from foredraft.draft_length.policy import DraftLengthPolicy, FixedLengthPolicy, StepReport
from foredraft.drafters.interface import Drafter
from foredraft.engine.mask_budget import MaskBudget
from foredraft.engine.releases import NO_RELEASES
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler, SchedulerLimits
from foredraft.engine.step_clock import StepClock
from foredraft.engine.step_output import append_tokens, emit_deltas
from foredraft.engine.step_result import NO_STEP, StepResult, collect_outcomes, count_attended_tokens
from foredraft.engine.step_tree import prepend_chunks
from foredraft.engine.target_output import TargetOutput, collect_output
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.kernels.process import check_process
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import compact_accepted
from foredraft.kv.prefix_cache import PrefixCache
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import LM
from foredraft.outputs import FinishReason
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import SeededNoise
from foredraft.verification.rules import combine_rules

log = logging.getLogger(__name__)


class Engine:
    """Continuous-batching engine: runs all requests to their end, one step at a time.

    A `Transcript` is the output side of one request: its text, log-probabilities and statistics. A caller adds requests
    with their transcripts, calls `step` while `has_work`, and reads the new text of each request from
    `Transcript.deltas`. Not thread-safe: `SharedEngine` and `Worker` wrap it for several threads.
    """

    def __init__(
        self,
        target: LM,
        drafter: Drafter | None,
        allocator: PageAllocator,
        limits: SchedulerLimits,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        is_debug: bool = False,
        length_policy: DraftLengthPolicy | None = None,
        prefix_cache: bool = True,
    ) -> None:
        """Set up an engine without requests.

        Args:
            target: model that verifies the drafts.
            drafter: proposes the drafts. It is wrapped in a SandboxedDrafter, which turns a fault of the drafter into a
                step without a draft. None = plain decoding.
            allocator: pages of the KV pools.
            limits: limits of one step, in requests and tokens.
            device: device of the target.
            clock: returns the time in seconds.
            is_debug: check page and queue invariants in every step.
            length_policy: decides draft lengths. None = FixedLengthPolicy, which always grants the longest draft.
            prefix_cache: keep KV pages for later requests. False = share them only among the samples of one prompt.
        """
        self.target = target
        self.drafter = SandboxedDrafter(drafter, target.vocab_size, clock=clock)
        self.length_policy = length_policy or FixedLengthPolicy()
        self.scheduler = Scheduler(allocator, limits, PrefixCache(allocator, self.drafter, is_shared=prefix_cache))
        self.transcripts: dict[Request, Transcript] = {}  # requests that have not ended: text and statistics
        self.mask_budget = MaskBudget()  # defers requests whose grammar masks take too much time
        self.clock = StepClock(clock)
        self.device = device
        self.is_debug = is_debug
        # Requests of the step that runs. They stay here if it raises, because it then returns no result with them.
        self.current_requests: tuple[Request, ...] = ()
        self.is_reserved = False  # True while the thread of a Worker owns this engine

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise ForedraftError if the request needs more KV memory than the pool has, or in a forked process."""
        check_process()
        allocator = self.scheduler.allocator
        max_length = len(request.spec.prompt) + request.spec.max_output_tokens
        # One page of the pool is the null page, which only padding uses.
        if allocator.count_pages(max_length) > allocator.num_pages - 1:
            raise ForedraftError(
                f"prompt and max_tokens need {max_length} tokens of KV memory and the pool holds "
                f"{(allocator.num_pages - 1) * allocator.page_size}; raise kv_tokens or lower max_tokens"
            )

    def add(self, transcript: Transcript) -> None:
        """Queue a request.

        Raises:
            ForedraftError: by `check`, if it can never run. The engine is then unchanged and needs no `recover`.
        """
        request = transcript.request
        self.check(request)
        self.scheduler.add(request)
        self.transcripts[request] = transcript
        self.mask_budget.add_request(request)

    def abort(self, request: Request, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a waiting or running request now and free its slot and pages. Ignores a request that has ended.

        Args:
            request: request to end.
            reason: finish reason of its completion.
            error: error message of its completion.
        """
        transcript = self.transcripts.pop(request, None)
        if transcript is not None:
            self._remove([request])
            transcript.fail(reason, error)

    def recover(self) -> None:
        """Restore a consistent state after an exception in `step`, `abort` or `add`, except the errors of `check`.

        Tokens in deltas are final. Each request is cut back to its last delta and requeued, and all KV is dropped. A
        request whose text cannot be rebuilt ends with an error. If `recover` raises (KeyboardInterrupt), call it again.

        No delta may be read from a transcript between the exception and `recover`. A step queues a delta first, and
        then marks its tokens as final. If the exception comes in between, `recover` marks them, but only while the
        delta is still in the queue. If it was read before, its tokens would be generated twice.
        """
        self.clock.reset()
        for request, transcript in list(self.transcripts.items()):
            # `Transcript.emit` queues a delta and then calls `mark_emitted`. It may have been interrupted in between.
            transcript.mark_emitted()
            if transcript.has_final_delta:  # the request ended, and the step raised before removing it
                del self.transcripts[request]
        self.scheduler.reset({request: transcript.num_emitted for request, transcript in self.transcripts.items()})
        self._clear_memory()
        for request, transcript in list(self.transcripts.items()):
            if request.matcher is not None:  # matcher of the request's grammar
                request.matcher.restart()
            try:
                transcript.rewind()
            except Exception:
                log.exception("the text of a request could not be rebuilt; the request ends")
                self.abort(request, "error", "the text of this request cannot be decoded")

    @torch.inference_mode()
    def step(self, allowed: frozenset[Request] | None = None) -> StepResult:
        """Run one step and queue the new text as deltas on the transcripts. If it raises, call `recover`.

        Args:
            allowed: requests that may run in this step. None = all.
        """
        self.clock.start_step()
        batch = self._plan(allowed)
        if not batch.requests:
            return NO_STEP
        tree = self._propose(batch)
        output = self._forward(batch, tree)
        commit = self._verify(batch, tree, output)
        commit = self._append_tokens(batch, tree, commit, output)
        self._compact_kv(batch, commit)
        self._observe(batch, tree, commit, output)
        attended_tokens = count_attended_tokens(batch, tree)  # `Scheduler.commit` advances `num_computed`
        self.scheduler.commit(batch, commit)
        progressed = self._emit_deltas(batch, tree, commit)
        return self._finish_step(batch, tree, commit, progressed, attended_tokens)

    # -- the parts of a step, in order

    def _plan(self, allowed: frozenset[Request] | None) -> Batch:
        """Schedule a batch without the requests that `mask_budget` defers.

        If no other request can run, the mask budget releases some of the deferred ones, and the batch is scheduled
        again.
        """
        self.current_requests = ()
        deferred = self.mask_budget.find_deferred()
        batch = self._schedule(allowed, deferred)
        if deferred and not batch.requests and self.mask_budget.release_deferred(allowed):
            batch = self._schedule(allowed, self.mask_budget.find_deferred())
        self.current_requests = batch.requests
        if self.is_debug:
            for request in batch.requests:
                self.scheduler.check_writes(request)
        return batch

    def _schedule(self, allowed: frozenset[Request] | None, deferred: frozenset[Request]) -> Batch:
        """Preempt requests as far as the next batch needs it, then schedule the batch.

        A drafter may defer the computation of its KV; this KV is pending. It is written before pages are shared or
        freed, so that requests that share or later reuse the pages get their draft KV too.
        """
        if deferred:
            allowed = self.scheduler.exclude(deferred, allowed)
        # `allowed` is already without the deferred requests. They are passed too, because a full batch preempts them.
        releases = self.scheduler.find_releases(allowed, deferred)
        if releases is not NO_RELEASES:
            self.drafter.flush(releases.unwritten_slots)  # writes their pending draft KV
            self._forget(self.scheduler.preempt(releases.preempted))
        return self.scheduler.schedule(self.drafter.spec.max_nodes, self.length_policy, allowed)

    def _propose(self, batch: Batch) -> TokenTree:
        """Return the tree to verify: each request's chunk of uncomputed tokens, then its draft."""
        self.clock.start_part()
        draft = self.drafter.propose(batch)
        self.clock.end_propose()
        return prepend_chunks(batch, draft)

    def _forward(self, batch: Batch, tree: TokenTree) -> TargetOutput:
        """Run the target's forward pass over the nodes of the tree."""
        forward_batch, with_prompt_logits = self._build_forward_batch(batch, tree)
        logits, features = self.target.forward(forward_batch, self.drafter.spec.hidden_layers)
        return collect_output(batch, tree, logits, features, with_prompt_logits)

    def _build_forward_batch(self, batch: Batch, tree: TokenTree) -> tuple[ForwardBatch, list[int]]:
        """Build the forward batch. Returns it with the batch indices of requests that need prompt logits too."""
        requests = batch.requests
        with_prompt_logits = [
            b
            for b, r in enumerate(requests)
            if r.spec.sampling.prompt_logprobs is not None and self.transcripts[r].needs_prompt_logits
        ]
        forward_batch = ForwardBatch.from_token_tree(
            tree,
            [r.num_computed for r in requests],
            [r.pages for r in requests],
            batch.page_size,
            self.device,
            full_logit_requests=with_prompt_logits,
            sources=[r.spec.source for r in requests],  # encoder inputs; None for decoder-only models
        )
        return forward_batch, with_prompt_logits

    def _verify(self, batch: Batch, tree: TokenTree, output: TargetOutput) -> Commit:
        specs = [r.spec for r in batch.requests]
        verify = combine_rules([s.rule for s in specs])  # a batch may hold requests with different rules
        noise = SeededNoise(tree, [(s.seed, s.sample_index) for s in specs], [r.num_computed for r in batch.requests])
        return verify(tree, output.probs, noise)

    def _append_tokens(self, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput) -> Commit:
        """Push the new tokens to the transcripts. Returns the commit without the tokens after the end of an output."""
        # For the statistics: an equal share of this step's `propose` and of the last step's `observe`.
        draft_seconds = (self.clock.propose_seconds + self.clock.observe_seconds) / len(batch)
        return append_tokens(self.transcripts, batch, tree, commit, output, draft_seconds)

    def _compact_kv(self, batch: Batch, commit: Commit) -> None:
        """Move the KV of each accepted path to consecutive positions, if rejected nodes lie between its nodes."""
        # The nodes of a path increase from 0. So a path is 0, 1, 2 and so on if its last node is its length - 1.
        moved = [b for b, path in enumerate(commit.paths) if path and path[-1] >= len(path)]
        if moved:
            requests = [batch.requests[b] for b in moved]
            starts, pages = [r.num_computed for r in requests], [r.pages for r in requests]
            paths = [commit.paths[b] for b in moved]
            compact_accepted(self.target.pool, paths, starts, pages, batch.page_size, self.device)

    def _observe(self, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput) -> None:
        """Show the commit to the drafter, with the outputs of the target that it reads."""
        self.clock.start_part()
        self.drafter.observe(batch, output.attach_to(commit, tree, self.drafter.spec.needs_target_argmax))
        self.clock.end_observe()

    def _emit_deltas(self, batch: Batch, tree: TokenTree, commit: Commit) -> tuple[Request, ...]:
        """Queue the new text as deltas, and remove the requests that ended. Returns the requests with a delta."""
        progressed = emit_deltas(self.transcripts, batch, tree, commit)
        ended = [request for request in progressed if self.transcripts[request].is_finished]
        if ended:
            self._remove(ended, frozenset([batch.requests[b] for b in commit.failed]))
            for request in ended:
                del self.transcripts[request]
        return progressed

    def _finish_step(
        self, batch: Batch, tree: TokenTree, commit: Commit, progressed: tuple[Request, ...], attended_tokens: int
    ) -> StepResult:
        """Report the step to the policies, and check the invariants."""
        clock = self.clock
        report = StepReport(
            num_requests=len(batch),
            num_pass_tokens=sum(tree.sizes),
            num_logit_rows=tree.row_offsets[-1],
            attended_tokens=attended_tokens,
            draft_time=clock.propose_seconds + clock.observe_seconds,
            step_time=clock.step_seconds,
            outcomes=collect_outcomes(batch, tree, commit),
        )
        self.length_policy.record_step(report)
        self.mask_budget.record_step(batch.requests, report.step_time)
        if self.is_debug:
            self.scheduler.check_integrity()
        elif not self.has_work:
            self.scheduler.check_idle()
        self.current_requests = ()
        return StepResult(batch.requests, progressed, report)

    # -- memory of requests that leave

    def _remove(self, requests: Sequence[Request], failed: frozenset[Request] = frozenset()) -> None:
        """Remove requests and free their memory.

        Args:
            requests: requests to remove.
            failed: those with invalid logits (`Commit.failed`). Their KV may be invalid too, so none of their pages
                stays in the prefix cache.
        """
        # The prefix cache may keep pages of these requests. Their draft KV cannot be written after the end.
        unwritten_slots = self.scheduler.find_unwritten_slots([r for r in requests if r not in failed])
        if unwritten_slots:
            self.drafter.flush(unwritten_slots)  # writes their pending draft KV
        for request in requests:
            self._forget(self.scheduler.finish(request, has_invalid_kv=request in failed))

    def _forget(self, slots: Sequence[int]) -> None:
        """Drop the state of drafter and draft-length policy for slots that became free."""
        if slots:
            self.drafter.forget(slots)
            self.length_policy.forget(slots)

    def _clear_memory(self) -> None:
        """Drop all KV, and the drafter's state of all slots: an interrupted step may have lost the owner of a slot."""
        self._forget(range(self.scheduler.limits.max_batch))
        draft_kv = self.drafter.draft_kv
        for pool in (self.target.pool, *([] if draft_kv is None else [draft_kv.pool])):
            pool.clear()
