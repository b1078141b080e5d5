"""One engine step: schedule, propose draft tokens, verify them in one forward pass of the target, commit.

The engine holds no model-specific code: target, drafter, verification rule and draft-length policy are interfaces.

A step has one token tree per request. The picture at the top of `tree.py` defines its parts. First come the committed
tokens that the step computes (a prompt chunk). If the chunk ends with the request's last committed token, that token is
the root, and the draft nodes follow. Otherwise the tree has no root and no draft, and roots[b] is sizes[b]. The root
and the draft nodes are scored: each has one row of logits. b is always a batch index, the index of a request in the
step's `Batch`.

Letters of shapes: B requests, T nodes of all trees together (the tokens of the forward pass), R scored nodes, V
vocabulary, P longest committed path, F width of the hidden states that the drafter reads.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foredraft.draft_length.policy import DraftLengthPolicy, DraftOutcome, FixedLengthPolicy, StepReport
from foredraft.drafters.interface import Drafter
from foredraft.engine.mask_budget import MaskBudget
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler, SchedulerLimits
from foredraft.engine.target_output import TargetOutput, collect_output
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.kernels.process import check_process
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import compact_accepted
from foredraft.kv.prefix_cache import PrefixCache
from foredraft.kv.weak import bind_weakly
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import LM
from foredraft.outputs import FinishReason, Origin
from foredraft.request import Batch, Request
from foredraft.sampling.distribution import process_logits
from foredraft.sampling.filters import argmax_tokens
from foredraft.tree import Commit, TargetArgmax, TokenTree
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
            drafter: proposes the drafts. Unless it is a SandboxedDrafter, it is wrapped in one, which turns a fault of
                the drafter into a step without a draft. None = plain decoding.
            allocator: pages of the KV pools.
            limits: limits of one step, in requests and tokens.
            device: device of the target.
            clock: returns the time in seconds.
            is_debug: check page and queue invariants in every step.
            length_policy: decides draft lengths. None = FixedLengthPolicy, which always grants the longest draft.
            prefix_cache: keep KV pages for later requests. False = share them only among the samples of one prompt.
        """
        self.target = target
        self.drafter = (
            drafter
            if isinstance(drafter, SandboxedDrafter)
            else SandboxedDrafter(drafter, target.vocab_size, clock=clock)
        )
        self.length_policy = length_policy or FixedLengthPolicy()
        prefix = PrefixCache(allocator, self.drafter, is_shared=prefix_cache)
        # A weak reference, so that the scheduler does not keep the engine and its memory alive.
        self.scheduler = Scheduler(allocator, limits, bind_weakly(self._forget_slots), prefix)
        self.transcripts: dict[Request, Transcript] = {}  # requests that have not ended: text and statistics
        self.mask_budget = MaskBudget()  # defers requests whose grammar masks take too much time
        self.page_size = allocator.page_size
        self.device = device
        self.is_debug = is_debug
        self._clock = clock
        self._observe_seconds = 0.0  # seconds of `Drafter.observe` in the last step, preparing its input included
        self.step_report: StepReport | None = None  # sizes and times of the last step that ran a request
        self.step_requests: tuple[Request, ...] = ()  # requests of the last step, also if that step raised
        self.is_reserved = False  # True while the thread of a Worker owns this engine

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise ForedraftError if the request needs more KV memory than the pool has, or in a forked process."""
        check_process()
        allocator = self.scheduler.allocator
        max_length = min(len(request.prompt) + request.sampling.max_tokens, request.max_length)
        # One page of the pool is the null page, which only padding uses.
        if allocator.count_pages(max_length) > allocator.num_pages - 1:
            raise ForedraftError(
                f"prompt and max_tokens need {max_length} tokens of KV memory and the pool holds "
                f"{(allocator.num_pages - 1) * self.page_size}; raise kv_tokens or lower max_tokens"
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
            self.scheduler.finish(request)
            transcript.fail(reason, error)

    def recover(self) -> None:
        """Restore a consistent state after `step` or `abort` raised, or `add` with another error than that of `check`.

        Tokens in deltas are final. Each request is cut back to its last delta and requeued, and all KV is dropped. A
        request whose text cannot be rebuilt ends with an error. Call `recover` before any delta is read from a
        transcript. If it raises (KeyboardInterrupt), call it again.
        """
        self._observe_seconds = 0.0
        for request, transcript in list(self.transcripts.items()):
            # `Transcript.emit` queues a delta and then calls `mark_emitted`. It may have been interrupted in between.
            transcript.mark_emitted()
            if transcript.has_final_delta:  # the request ended, and the step raised before removing it
                del self.transcripts[request]
        self.scheduler.reset(self.transcripts)  # clears the KV pool of the drafter too
        self.target.pool.clear()
        for request, transcript in list(self.transcripts.items()):
            del request.output[transcript.num_emitted :]
            if request.matcher is not None:  # matcher of the request's grammar
                request.matcher.restart()
            try:
                transcript.rewind()
            except Exception:
                log.exception("the text of a request could not be rebuilt; the request ends")
                self.abort(request, "error", "the text of this request cannot be decoded")

    @torch.inference_mode()
    def step(self, allowed: frozenset[Request] | None = None) -> None:
        """Run one step and queue the new text as deltas on the transcripts. If it raises, call `recover`.

        Args:
            allowed: requests that may run in this step. None = all.
        """
        start = self._clock()
        self.step_requests = ()
        batch = self._schedule_batch(allowed)
        self.step_requests = batch.requests
        if not batch.requests:
            return
        if self.is_debug:
            for request in batch.requests:
                self.scheduler.check_writes(request)
        propose_start = self._clock()
        draft = self.drafter.propose(batch)
        propose_seconds = self._clock() - propose_start
        # For the statistics: an equal share of this step's `propose` and of the last step's `observe`. This step's
        # `observe` runs after they are recorded.
        seconds_per_request = (propose_seconds + self._observe_seconds) / len(batch)
        tree = _prepend_chunks(batch, draft)
        forward_batch, with_prompt_logits = self._build_forward_batch(batch, tree)
        logits, features = self.target.forward(forward_batch, self.drafter.hidden_layers)
        output = collect_output(batch, tree, logits, with_prompt_logits)
        verify = combine_rules([r.rule for r in batch.requests])  # a batch may hold requests with different rules
        commit = verify(tree, output.probs, _build_noise(batch, tree))
        commit = self._push_to_transcripts(batch, tree, commit, output, seconds_per_request)
        starts, pages = [r.num_computed for r in batch.requests], [r.pages for r in batch.requests]
        compact_accepted(self.target.pool, commit.paths, starts, pages, self.page_size, self.device)
        observe_start = self._clock()
        commit = _attach_target_argmax(commit, tree, output.logits) if self.drafter.needs_target_argmax else commit
        self.drafter.observe(batch, _attach_features(commit, tree, features))
        self._observe_seconds = self._clock() - observe_start
        outcomes = _collect_outcomes(batch, tree, commit)
        # Each of a request's n nodes counts as attending to all computed tokens and to all n nodes. `scheduler.commit`
        # advances `num_computed`. All code above it, the drafter included, reads the old value.
        attended_tokens = sum(n * (r.num_computed + n) for n, r in zip(tree.sizes, batch.requests, strict=True))
        self.scheduler.commit(batch, commit)  # appends the new tokens to the requests
        self._emit_deltas(batch, tree, commit)
        self.step_report = StepReport(
            num_requests=len(batch),
            num_pass_tokens=sum(tree.sizes),
            num_logit_rows=tree.row_offsets[-1],
            attended_tokens=attended_tokens,
            draft_time=propose_seconds + self._observe_seconds,
            step_time=self._clock() - start,
            outcomes=outcomes,
        )
        self.length_policy.record_step(self.step_report)
        self.mask_budget.record_step(batch.requests, self.step_report.step_time)
        if self.is_debug:
            self.scheduler.check_integrity()
        elif not self.has_work:
            self.scheduler.check_idle()

    def _schedule_batch(self, allowed: frozenset[Request] | None) -> Batch:
        """Schedule a batch without the requests that `mask_budget` defers.

        If no other request can run, the mask budget releases some of the deferred ones, and the batch is scheduled
        again.
        """
        deferred = self.mask_budget.find_deferred()
        batch = self.scheduler.schedule(self.drafter.max_nodes, self.length_policy, allowed, deferred)
        if deferred and not batch.requests and self.mask_budget.release_deferred(allowed):
            batch = self.scheduler.schedule(
                self.drafter.max_nodes, self.length_policy, allowed, self.mask_budget.find_deferred()
            )
        return batch

    def _forget_slots(self, slots: Sequence[int]) -> None:
        """Drop the state of drafter and draft-length policy for slots that the scheduler freed."""
        self.drafter.forget(slots)
        self.length_policy.forget(slots)

    def _build_forward_batch(self, batch: Batch, tree: TokenTree) -> tuple[ForwardBatch, list[int]]:
        """Build the forward batch. Returns it with the batch indices of requests that need prompt logits too."""
        with_prompt_logits = [b for b, r in enumerate(batch.requests) if self.transcripts[r].needs_prompt_logits]
        starts, pages = [r.num_computed for r in batch.requests], [r.pages for r in batch.requests]
        sources = [r.source for r in batch.requests]  # encoder inputs; None for decoder-only models
        forward_batch = ForwardBatch.from_token_tree(
            tree, starts, pages, self.page_size, self.device, full_logit_requests=with_prompt_logits, sources=sources
        )
        return forward_batch, with_prompt_logits

    def _push_to_transcripts(
        self, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput, draft_seconds: float
    ) -> Commit:
        """Push the new tokens to the transcripts, with log-probabilities and statistics.

        The transcripts detect the end of an output. The requests themselves get their tokens later, from
        `Scheduler.commit`.

        Returns the commit without the tokens after an end id, a stop string or the maximum length.
        """
        counts = []  # nodes of each path that stay, those before the root included
        for b, request in enumerate(batch.requests):
            transcript, root = self.transcripts[request], tree.roots[b]
            path, tokens = commit.paths[b], commit.tokens[b]
            if b in output.prompt_logits:
                output.append_prompt_logprobs(transcript, tree, b)
            # tokens[i] follows node path[i]. Tokens 0 to root - 1 follow nodes before the root and were committed
            # earlier, so the new tokens start at tokens[root]. A failed request has no tokens at all.
            count = min(root, len(tokens))
            for node, token in zip(path[count:], tokens[count:], strict=True):
                count += 1
                if request.sampling.logprobs is not None:
                    logprob = output.compute_logprob(tree, b, node, token, request.sampling.logprobs)
                    transcript.logprobs.append(logprob)
                if transcript.push(token):  # the output ends with this token
                    break
            if count > root:
                num_drafted, num_new = tree.sizes[b] - root - 1, count - root
                # All new tokens but the last are accepted draft tokens. The last one comes from the target, with two
                # exceptions: the output ends with a draft token, or the logits after a draft token are invalid, so that
                # no token follows it (top of `rules.py`).
                is_last_drafted = _is_draft_token(tree, b, path[count - 1], tokens[count - 1])
                num_accepted = num_new if is_last_drafted else num_new - 1
                is_predicted = b in tree.predicted  # the draft was copied from the request's predicted output
                transcript.record_step(num_drafted, num_accepted, draft_seconds, is_predicted)
            counts.append(count)
        return commit if counts == commit.counts else commit.truncate(counts)

    def _emit_deltas(self, batch: Batch, tree: TokenTree, commit: Commit) -> None:
        """Queue the new text as deltas, and remove the requests that ended."""
        for b, request in enumerate(batch.requests):
            transcript = self.transcripts[request]
            if b in commit.failed:
                transcript.fail("error", _describe_invalid_logits(request))
            elif len(commit.tokens[b]) > tree.roots[b]:  # there is a token after the root
                path, tokens = commit.paths[b], commit.tokens[b]
                # `RequestOptions.is_traced`: the deltas of the request hold the tree of each step, for display.
                step_trees = [transcript.build_step_tree(tree, b, path, tokens)] if request.is_traced else ()
                transcript.emit(_classify_origins(tree, b, path, tokens), step_trees)
            if transcript.is_finished:
                self.scheduler.finish(request, has_invalid_kv=b in commit.failed)
                del self.transcripts[request]


def _describe_invalid_logits(request: Request) -> str:
    """Return the error message of a request in `Commit.failed`."""
    if request.matcher is not None and request.matcher.error is not None:
        return f"the grammar cannot be followed any further: {request.matcher.error}"
    return "the model returned invalid logits (NaN or infinite, or no token is allowed)"


def _collect_outcomes(batch: Batch, tree: TokenTree, commit: Commit) -> tuple[DraftOutcome, ...]:
    """List the draft outcome of every request with a scored root.

    Accepted nodes are the draft nodes on the committed path: each saved a forward pass. An accepted token without a
    token after it saved none, so it counts in the statistics alone (`num_accepted`). Nodes are counted from 1 after the
    root.
    """
    outcomes = []
    for b, (request, granted) in enumerate(zip(batch.requests, batch.granted_nodes, strict=True)):
        root, size = tree.roots[b], tree.sizes[b]
        if root < size and b not in commit.failed:
            accepted = tuple([node - root for node in commit.paths[b][root + 1 :]]) if root + 1 < size else ()
            outcomes.append(DraftOutcome(request.slot, granted, size - root - 1, accepted))
    return tuple(outcomes)


def _prepend_chunks(batch: Batch, draft: TokenTree) -> TokenTree:
    """Put each request's chunk of uncomputed tokens before its draft.

    The drafter's tree begins with the last token of the chunk. If that is the last committed token, it is the root.
    Otherwise every token of the chunk has a committed successor, and the tree has no root and no draft.
    """
    if all(chunk == 1 for chunk in batch.num_new_tokens) and all(batch.needs_logits):
        return draft  # every chunk is the root alone
    prefixes, committed_next = [], []
    for request, chunk in zip(batch.requests, batch.num_new_tokens, strict=True):
        start, end = request.num_computed, request.num_computed + chunk
        prefixes.append(request.get_tokens(start, end - 1))  # the chunk without its last token, which `draft` has
        # The successor of each token of the chunk. The last committed token has none; `get_tokens` stops there.
        committed_next.append(request.get_tokens(start + 1, end + 1))
    return draft.prepend_committed(prefixes, committed_next)


def _build_noise(batch: Batch, tree: TokenTree) -> SeededNoise:
    return SeededNoise(
        tree, [(r.seed, r.sample_index) for r in batch.requests], [r.num_computed for r in batch.requests]
    )


def _attach_target_argmax(commit: Commit, tree: TokenTree, logits: Tensor) -> Commit:
    """Attach the argmax of the model's own logits [R, V] after every scored node; sampling parameters do not count."""
    raw_logits = process_logits(logits, ())  # [R, V] float32; without sampling parameters only the dtype changes
    return commit.with_target_outputs(commit.features, TargetArgmax(tree, argmax_tokens(raw_logits)))


def _attach_features(commit: Commit, tree: TokenTree, features: Tensor | None) -> Commit:
    """Attach the hidden states of the committed path: rows of `features` [T, F], as [B, P, F]."""
    if features is None:
        return commit
    paths = commit.paths
    if len(paths) == 1:
        (path,) = paths
        is_prefix = path == list(range(len(path)))  # always true for a chain; a slice copies nothing
        return commit.with_target_outputs(
            (features[: len(path)] if is_prefix else features[path])[None], commit.target_argmax
        )
    path_features = features.new_zeros(len(paths), max(map(len, paths)), features.shape[-1])
    offset = 0
    for b, (path, size) in enumerate(zip(paths, tree.sizes, strict=True)):
        path_features[b, : len(path)] = features[[offset + node for node in path]]
        offset += size
    return commit.with_target_outputs(path_features, commit.target_argmax)


def _is_draft_token(tree: TokenTree, b: int, node: int, token: int) -> bool:
    """Return whether the token that follows a scored node is that of one of its draft children."""
    return token in [tree.tokens[b][child] for child in tree.children[b][node]]


def _classify_origins(tree: TokenTree, b: int, path: Sequence[int], tokens: Sequence[int]) -> list[Origin]:
    """Classify each new token by the draft children of the node that it follows.

    accepted: one of the children has this token. corrected: there are children, but none has it. bonus: there are no
    children. plain: the request had no draft in this step.
    """
    root = tree.roots[b]
    if tree.sizes[b] - root == 1:
        return ["plain"] * (len(tokens) - root)
    origins: list[Origin] = []
    for node, token in zip(path[root:], tokens[root:], strict=True):
        if _is_draft_token(tree, b, node, token):
            origins.append("accepted")
        else:
            origins.append("corrected" if tree.children[b][node] else "bonus")
    return origins
