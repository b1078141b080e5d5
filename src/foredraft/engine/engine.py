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

import time
from collections.abc import Callable

import torch

from foredraft.draft_length.policy import DraftLengthPolicy, FixedLengthPolicy, StepReport
from foredraft.drafters.interface import Drafter
from foredraft.engine.batch_planner import BatchPlanner
from foredraft.engine.compaction import compact_kv
from foredraft.engine.forward_pass import build_forward_batch, find_prompt_logit_requests
from foredraft.engine.observation import choose_hidden_layers, show_commit
from foredraft.engine.recovery import rewind_output, settle_deltas
from foredraft.engine.request_memory import RequestMemory
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler, SchedulerLimits
from foredraft.engine.step_clock import StepClock
from foredraft.engine.step_output import append_tokens, emit_deltas
from foredraft.engine.step_result import NO_STEP, StepResult, build_report, count_attended_tokens
from foredraft.engine.step_tree import prepend_chunks
from foredraft.engine.target_output import TargetOutput, collect_output
from foredraft.engine.transcript import Transcript
from foredraft.kernels.process import check_process
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.prefix_cache import PrefixCache
from foredraft.models.hf import LM
from foredraft.outputs import FinishReason
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import SeededNoise
from foredraft.verification.step import verify_step


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
        states = target.pool.states.get_table(allocator.page_size) if target.pool.states else None
        cache = PrefixCache(allocator, self.drafter, is_shared=prefix_cache, states=states)
        self.scheduler = Scheduler(allocator, limits, cache)
        self.memory = RequestMemory(self.scheduler, self.drafter, length_policy or FixedLengthPolicy(), target.pool)
        self.planner = BatchPlanner(self.scheduler, self.drafter, self.memory)
        self.transcripts: dict[Request, Transcript] = {}  # requests that have not ended: text and statistics
        self.clock = StepClock(clock)
        self.device = device
        self.is_debug = is_debug
        # Requests of the step that runs. They stay here if it raises, because it then returns no result with them.
        self.current_requests: tuple[Request, ...] = ()
        self.is_reserved = False  # True while the thread of a Worker owns this engine

    @property
    def length_policy(self) -> DraftLengthPolicy:
        """Policy that decides draft lengths. It may be replaced while there are no requests."""
        return self.memory.length_policy

    @length_policy.setter
    def length_policy(self, policy: DraftLengthPolicy) -> None:
        self.memory.length_policy = policy

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise ForedraftError if the request needs more KV memory than the pool has, or in a forked process."""
        check_process()
        self.memory.check_fits(request)

    def add(self, transcript: Transcript) -> None:
        """Queue a request.

        Raises:
            ForedraftError: by `check`, if it can never run. The engine is then unchanged and needs no `recover`.
        """
        request = transcript.request
        self.check(request)
        self.planner.add(request)
        self.transcripts[request] = transcript

    def abort(self, request: Request, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a waiting or running request now and free its slot and pages. Ignores a request that has ended.

        Args:
            request: request to end.
            reason: finish reason of its completion.
            error: error message of its completion.
        """
        transcript = self.transcripts.pop(request, None)
        if transcript is not None:
            self.memory.remove([request])
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
        self.scheduler.reset(settle_deltas(self.transcripts))
        self.memory.clear()
        for request, transcript in list(self.transcripts.items()):
            if not rewind_output(transcript):
                self.abort(request, "error", "the text of this request cannot be decoded")

    @torch.inference_mode()
    def step(self, allowed: frozenset[Request] | None = None) -> StepResult:
        """Run one step and queue the new text as deltas on the transcripts. If it raises, call `recover`.

        Args:
            allowed: requests that may run in this step. None = all.
        """
        self.clock.start_step()
        batch = self._plan(allowed)
        self.clock.end_plan(has_drafts=any(batch.granted_nodes))
        if not batch.requests:
            return NO_STEP
        tree = self._propose(batch)
        output = self._forward(batch, tree)
        commit = self._append_tokens(batch, tree, self._verify(batch, tree, output), output)
        compact_kv(self.target.pool, batch, commit, self.device)
        is_observed = self._observe(batch, tree, commit, output)
        attended_tokens = count_attended_tokens(batch, tree)  # `Scheduler.commit` advances `num_computed`
        self.scheduler.commit(batch, commit)
        progressed = self._emit_deltas(batch, tree, commit)
        report = build_report(batch, tree, commit, self.clock, attended_tokens, is_observed)
        return self._finish_step(batch, progressed, report)

    # -- the parts of a step, in order

    def _plan(self, allowed: frozenset[Request] | None) -> Batch:
        self.current_requests = ()
        batch = self.planner.plan(self.length_policy, allowed)
        self.current_requests = batch.requests
        if self.is_debug:
            self.scheduler.check_writes(batch.requests)
        return batch

    def _propose(self, batch: Batch) -> TokenTree:
        """Return the tree to verify: each request's chunk of uncomputed tokens, then its draft."""
        self.clock.start_part()
        draft = self.drafter.propose(batch)
        self.clock.end_propose()
        return prepend_chunks(batch, draft)

    def _forward(self, batch: Batch, tree: TokenTree) -> TargetOutput:
        """Run the target's forward pass over the nodes of the tree."""
        with_prompt_logits = find_prompt_logit_requests(self.transcripts, batch)
        forward_batch = build_forward_batch(batch, tree, with_prompt_logits, self.device, self.drafter.spec)
        layers = choose_hidden_layers(batch, self.drafter.spec, self.length_policy)
        logits, features = self.target.forward(forward_batch, layers)
        return collect_output(batch, tree, logits, features, with_prompt_logits)

    def _verify(self, batch: Batch, tree: TokenTree, output: TargetOutput) -> Commit:
        specs = [r.spec for r in batch.requests]
        noise = SeededNoise(tree, [(s.seed, s.sample_index) for s in specs], [r.num_computed for r in batch.requests])
        rules = [s.rule for s in specs]  # a batch may hold several
        return verify_step(tree, output.probs, noise, rules, self.target.pool.kernels)

    def _append_tokens(self, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput) -> Commit:
        """Push the new tokens to the transcripts. Returns the commit without the tokens after the end of an output."""
        # For the statistics: an equal share of this step's `propose` and of the last step's `observe`.
        draft_seconds = (self.clock.propose_seconds + self.clock.observe_seconds) / len(batch)
        return append_tokens(self.transcripts, batch, tree, commit, output, draft_seconds)

    def _observe(self, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput) -> bool:
        """Show the commit to the drafter. Returns whether it was given all outputs of the target that it reads."""
        self.clock.start_part()
        is_observed = show_commit(self.drafter, batch, tree, commit, output, self.length_policy)
        self.clock.end_observe()
        return is_observed

    def _emit_deltas(self, batch: Batch, tree: TokenTree, commit: Commit) -> tuple[Request, ...]:
        """Queue the new text as deltas, and remove the requests that ended. Returns the requests with a delta."""
        progressed = emit_deltas(self.transcripts, batch, tree, commit)
        ended = [request for request in progressed if self.transcripts[request].is_finished]
        if ended:
            self.memory.remove(ended, frozenset([batch.requests[b] for b in commit.failed]))
            for request in ended:
                del self.transcripts[request]
        return progressed

    def _finish_step(self, batch: Batch, progressed: tuple[Request, ...], report: StepReport) -> StepResult:
        """Report the step to the policies, and check the invariants."""
        self.clock.start_part()
        self.length_policy.record_step(report)
        self.clock.end_record()
        self.planner.mask_budget.record_step(batch.requests, report.step_time)
        if self.is_debug:
            self.scheduler.check_integrity()
            self.memory.states.check_integrity(self.scheduler.running)
        elif not self.has_work:
            self.scheduler.check_idle()
        self.current_requests = ()
        return StepResult(batch.requests, progressed, report)
