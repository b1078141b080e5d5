"""One engine step: schedule, propose draft tokens, verify them in one forward pass of the target, commit.

The engine holds no model-specific code: target, drafter, verification rule and draft-length policy are interfaces.
Commit and TokenTree are defined in `tree.py`; every step treats prompt chunks as leading nodes of the tree.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.draft_length.policy import DraftLengthPolicy, DraftOutcome, FixedLengthPolicy, StepReport
from foredraft.drafters.interface import Drafter
from foredraft.engine.logprobs import compute_token_logprob
from foredraft.engine.mask_budget import MaskBudget
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler, SchedulerLimits
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.kernels.process import check_process
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import compact_accepted
from foredraft.kv.prefix_cache import PrefixCache
from foredraft.kv.weak import bind_weakly
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import LM
from foredraft.outputs import FinishReason, Origin, TokenLogprob
from foredraft.request import Batch, Request
from foredraft.sampling.distribution import TokenHistory, process_logits
from foredraft.sampling.filters import argmax_tokens
from foredraft.tree import Commit, TargetArgmax, TokenTree
from foredraft.verification.probs import LazyTargetProbs
from foredraft.verification.rules import SeededNoise, combine_rules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetOutput:
    """Logits and probabilities of one forward pass.

    Row r of `logits` and `probs` belongs to a scored node (`TokenTree.get_row`). Rows of prompt nodes, which only
    requests with prompt_logprobs ask for, are in `prompt_logits`.
    """

    logits: Tensor  # [R, V]
    probs: LazyTargetProbs  # R rows, computed on access
    prompt_logits: dict[int, Tensor]  # batch index -> [C, V], C nodes before the root (successors are committed)


class Engine:
    """Continuous-batching engine: runs all requests to their end, one step at a time.

    Not thread-safe. `SharedEngine` and `Worker` wrap it for several threads.
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
            drafter: proposes the drafts. Wrapped in a SandboxedDrafter unless it is one. None = plain decoding.
            allocator: allocator of KV pages.
            limits: limits of the scheduler.
            device: device of the target.
            clock: returns seconds.
            is_debug: check page and queue invariants in every step.
            length_policy: decides draft lengths. None = always the longest draft (FixedLengthPolicy).
            prefix_cache: reuse KV pages between requests. False = only among the samples of one prompt.
        """
        self.target = target
        self.drafter = (
            drafter
            if isinstance(drafter, SandboxedDrafter)
            else SandboxedDrafter(drafter, target.vocab_size, clock=clock)
        )
        self.length_policy = length_policy or FixedLengthPolicy()
        prefix = PrefixCache(allocator, self.drafter, is_shared=prefix_cache)
        self.scheduler = Scheduler(allocator, limits, bind_weakly(self._forget_slots), prefix)
        self.transcripts: dict[Request, Transcript] = {}
        self.mask_budget = MaskBudget()
        self.page_size = allocator.page_size
        self.device = device
        self.is_debug = is_debug
        self._clock = clock
        self._observe_seconds = 0.0  # seconds of the last `observe`: charged to the next draft of each request
        self.step_report: StepReport | None = None  # figures of the last step that ran a request
        self.step_requests: tuple[Request, ...] = ()  # requests of the last step, also if that step raised
        self.is_reserved = False  # True while the thread of a Worker owns this engine

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise ForedraftError if the request needs more KV memory than the pool has, or this process is a fork."""
        check_process()
        allocator = self.scheduler.allocator
        max_length = min(len(request.prompt) + request.sampling.max_tokens, request.max_length)
        if allocator.count_pages(max_length) > allocator.num_pages - 1:
            raise ForedraftError(
                f"prompt and max_tokens need {max_length} tokens of KV memory and the pool holds "
                f"{(allocator.num_pages - 1) * self.page_size}; raise kv_tokens or lower max_tokens"
            )

    def add(self, transcript: Transcript) -> None:
        """Queue a request. Raises ForedraftError if it can never run (`check`)."""
        request = transcript.request
        self.check(request)
        self.scheduler.add(request)
        self.transcripts[request] = transcript
        self.mask_budget.add_request(request)

    def abort(self, request: Request, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a waiting or running request now and free its slot and pages. Ignores a request that has ended."""
        transcript = self.transcripts.pop(request, None)
        if transcript is not None:
            self.scheduler.finish(request)
            transcript.fail(reason, error)

    def recover(self) -> None:
        """Restore a consistent state after `step`, `add` or `abort` raised.

        Drops all KV, cuts every request back to its last delta, and requeues it. Call it before a delta is taken, and
        again if it was interrupted itself. A request whose text cannot be rebuilt ends with an error.
        """
        self._observe_seconds = 0.0
        for request, transcript in list(self.transcripts.items()):
            transcript.mark_emitted()
            if transcript.is_delivered:  # the step raised after the last delta, before the request was removed
                del self.transcripts[request]
        self.scheduler.reset(self.transcripts)
        self.target.pool.clear()
        for request, transcript in list(self.transcripts.items()):
            del request.output[transcript.num_emitted :]
            if request.matcher is not None:
                request.matcher.restart()
            try:
                transcript.rewind()
            except Exception:
                log.exception("the text of a request could not be rebuilt; the request ends")
                self.abort(request, "error", "the text of this request cannot be decoded")

    @torch.inference_mode()
    def step(self, allowed: frozenset[Request] | None = None) -> None:
        """Run one step of the `allowed` requests (None = all) and queue new text. If it raises, call `recover`."""
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
        draft_time = (propose_seconds + self._observe_seconds) / len(batch)  # per request, for its statistics
        tree = _prepend_chunks(batch, draft)
        forward_batch, with_prompt_logits = self._build_forward_batch(batch, tree)
        logits, features = self.target.forward(forward_batch, self.drafter.hidden_layers)
        output = _collect_output(batch, tree, logits, with_prompt_logits)
        commit = combine_rules([r.verify for r in batch.requests])(tree, output.probs, _build_noise(batch, tree))
        commit = self._append_tokens(batch, tree, commit, output, draft_time)
        starts, pages = [r.num_computed for r in batch.requests], [r.pages for r in batch.requests]
        compact_accepted(self.target.pool, commit.path_lists, starts, pages, self.page_size, self.device)
        observe_start = self._clock()
        commit = _attach_target_argmax(commit, tree, output.logits) if self.drafter.needs_target_argmax else commit
        self.drafter.observe(batch, _attach_features(commit, tree, features))
        self._observe_seconds = self._clock() - observe_start
        outcomes = _collect_outcomes(batch, tree, commit)
        # Everything above reads `num_computed` as it was before this step; `scheduler.commit` advances it.
        attended_tokens = sum(n * (r.num_computed + n) for n, r in zip(tree.sizes, batch.requests, strict=True))
        self.scheduler.commit(batch, commit)
        self._emit_deltas(batch, tree, commit)
        self.step_report = StepReport(
            num_requests=len(batch),
            num_rows=sum(tree.sizes),
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
        """Schedule a batch, without the requests that MaskBudget defers unless no other request can run."""
        deferred = self.mask_budget.find_deferred()
        batch = self.scheduler.schedule(self.drafter.max_nodes, self.length_policy, allowed, deferred)
        if deferred and not batch.requests and self.mask_budget.release_deferred(allowed):
            batch = self.scheduler.schedule(
                self.drafter.max_nodes, self.length_policy, allowed, self.mask_budget.find_deferred()
            )
        return batch

    def _forget_slots(self, slots: Sequence[int]) -> None:
        self.drafter.forget(slots)
        self.length_policy.forget(slots)

    def _build_forward_batch(self, batch: Batch, tree: TokenTree) -> tuple[ForwardBatch, list[int]]:
        """Build the forward batch, and list the batch indices whose prompt logits are computed as well."""
        prompt_ids = [b for b, r in enumerate(batch.requests) if self.transcripts[r].needs_prompt_logits]
        starts, pages = [r.num_computed for r in batch.requests], [r.pages for r in batch.requests]
        sources = [r.source for r in batch.requests]
        args = tree, starts, pages, self.page_size, self.device, prompt_ids, sources
        return ForwardBatch.from_token_tree(*args), prompt_ids

    def _append_tokens(
        self, batch: Batch, tree: TokenTree, commit: Commit, output: TargetOutput, draft_time: float
    ) -> Commit:
        """Push the verified tokens to the transcripts, with log-probabilities and statistics.

        Returns the commit without the tokens after an end id, a stop string or the maximum length.
        """
        counts = []
        for b, request in enumerate(batch.requests):
            transcript, root = self.transcripts[request], tree.roots[b]
            path, tokens = commit.path_lists[b], commit.token_lists[b]
            if b in output.prompt_logits:
                _append_prompt_logprobs(transcript, tree, b, output)
            used = min(root, len(tokens))  # the successors of the nodes before the root are in the transcript already
            for node, token in zip(path[used:], tokens[used:], strict=True):
                used += 1
                if request.sampling.logprobs is not None:
                    transcript.logprobs.append(
                        _compute_logprob(tree, b, node, token, output, request.sampling.logprobs)
                    )
                if transcript.push(token):
                    break
            if used > root:
                # `path` holds the root and the accepted nodes; a path that was cut has no node for its last token.
                num_accepted = min(used - root, len(path) - root - 1)
                transcript.record_step(tree.sizes[b] - root - 1, num_accepted, draft_time, b in tree.predicted)
            counts.append(used)
        return commit if counts == commit.counts else commit.truncate(counts)

    def _emit_deltas(self, batch: Batch, tree: TokenTree, commit: Commit) -> None:
        """Queue the new text as deltas, and remove the requests that ended."""
        for b, request in enumerate(batch.requests):
            transcript = self.transcripts[request]
            if b in commit.failed:
                transcript.fail("error", _describe_invalid_logits(request))
            elif len(commit.token_lists[b]) > tree.roots[b]:
                path, tokens = commit.path_lists[b], commit.token_lists[b]
                step_trees = [transcript.build_step_tree(tree, b, path, tokens)] if request.is_traced else ()
                transcript.emit(_classify_origins(tree, b, path, tokens), step_trees)
            if transcript.is_finished:
                self.scheduler.finish(request, has_invalid_kv=b in commit.failed)
                del self.transcripts[request]


def _describe_invalid_logits(request: Request) -> str:
    if request.matcher is not None and request.matcher.error is not None:
        return f"the grammar cannot be followed any further: {request.matcher.error}"
    return "the model returned invalid logits (NaN or infinite, or no token is allowed)"


def _collect_outcomes(batch: Batch, tree: TokenTree, commit: Commit) -> tuple[DraftOutcome, ...]:
    """List the draft outcome of every request whose last committed token was scored."""
    outcomes = []
    for b, (request, budget) in enumerate(zip(batch.requests, batch.max_draft_nodes, strict=True)):
        root, size = tree.roots[b], tree.sizes[b]
        if root < size and b not in commit.failed:
            accepted = tuple([node - root for node in commit.path_lists[b][root + 1 :]]) if root + 1 < size else ()
            outcomes.append(DraftOutcome(request.slot, budget, size - root - 1, accepted))
    return tuple(outcomes)


def _prepend_chunks(batch: Batch, draft: TokenTree) -> TokenTree:
    """Put each request's chunk of uncomputed tokens before its draft.

    Every chunk token with a committed successor becomes a node before the root; the root is the last committed token.
    """
    if all(chunk == 1 for chunk in batch.num_new_tokens) and all(batch.needs_logits):
        return draft
    prefixes = [
        r.get_tokens(r.num_computed, r.num_computed + n - 1)
        for r, n in zip(batch.requests, batch.num_new_tokens, strict=True)
    ]
    committed_next = [
        r.get_tokens(r.num_computed + 1, min(r.num_computed + n + 1, r.num_tokens))
        for r, n in zip(batch.requests, batch.num_new_tokens, strict=True)
    ]
    return draft.prepend_committed(prefixes, committed_next)


def _collect_output(batch: Batch, tree: TokenTree, logits: Tensor, with_prompt_logits: Sequence[int]) -> TargetOutput:
    """Split the logits of the pass into rows of scored nodes and rows of prompt nodes."""
    prompt_logits: dict[int, Tensor] = {}
    if with_prompt_logits:  # the prompt rows of these requests precede their scored rows
        scored_rows, offset = [], 0
        for b, (size, root) in enumerate(zip(tree.sizes, tree.roots, strict=True)):
            num_prompt_rows = root if b in with_prompt_logits else 0
            if num_prompt_rows:
                prompt_logits[b] = logits[offset : offset + num_prompt_rows]
            scored_rows.append(logits[offset + num_prompt_rows : offset + num_prompt_rows + size - root])
            offset += num_prompt_rows + size - root
        logits = torch.cat(scored_rows)
    return TargetOutput(logits, _build_target_probs(batch, tree, logits), prompt_logits)


def _build_target_probs(batch: Batch, tree: TokenTree, logits: Tensor) -> LazyTargetProbs:
    spans = zip(batch.requests, tree.roots, tree.sizes, strict=True)
    samplings = [request.sampling for request, root, size in spans for _ in range(root, size)]
    if not any(request.sampling.shapes_logits for request in batch.requests):
        return LazyTargetProbs(logits, samplings)

    def build_history(row: int) -> TokenHistory:
        b, node = tree.locate_row(row)
        return batch.requests[b].build_history(tree.get_draft_path(b, node))

    return LazyTargetProbs(logits, samplings, build_history)


def _build_noise(batch: Batch, tree: TokenTree) -> SeededNoise:
    return SeededNoise(
        tree, [(r.seed, r.sample_index) for r in batch.requests], [r.num_computed for r in batch.requests]
    )


def _attach_target_argmax(commit: Commit, tree: TokenTree, logits: Tensor) -> Commit:
    return commit.with_target_outputs(commit.features, TargetArgmax(tree, argmax_tokens(process_logits(logits, ()))))


def _attach_features(commit: Commit, tree: TokenTree, features: Tensor | None) -> Commit:
    """Attach the hidden states of the committed path: rows of `features`, [T, F] -> [B, P, F]."""
    if features is None:
        return commit
    paths = commit.path_lists
    if len(paths) == 1:
        (path,) = paths
        is_prefix = path == list(range(len(path)))  # always true for a chain: a slice needs no copy
        return commit.with_target_outputs(
            (features[: len(path)] if is_prefix else features[path])[None], commit.target_argmax
        )
    path_features = features.new_zeros(len(paths), max(map(len, paths)), features.shape[-1])
    offset = 0
    for b, (path, size) in enumerate(zip(paths, tree.sizes, strict=True)):
        path_features[b, : len(path)] = features[[offset + node for node in path]]
        offset += size
    return commit.with_target_outputs(path_features, commit.target_argmax)


def _classify_origins(tree: TokenTree, b: int, path: Sequence[int], tokens: Sequence[int]) -> list[Origin]:
    """Classify each emitted token as plain, accepted, corrected or bonus.

    The last token is usually corrected or bonus. After truncation at the end of the output it may be accepted.
    """
    root = tree.roots[b]
    num_emitted = len(tokens) - root
    if tree.sizes[b] - root == 1:
        return ["plain"] * num_emitted
    node_tokens = tree.token_lists[b]
    origins: list[Origin] = []
    for node, token in zip(path[root:], tokens[root:], strict=True):
        children = tree.children[b][node]
        if token in [node_tokens[child] for child in children]:
            origins.append("accepted")
        else:
            origins.append("corrected" if children else "bonus")
    return origins


def _append_prompt_logprobs(transcript: Transcript, tree: TokenTree, b: int, output: TargetOutput) -> None:
    count = transcript.request.sampling.prompt_logprobs
    if count is None or tree.committed_next is None:
        return
    # After a preemption the first rows are computed a second time, and their entries exist already.
    num_existing = len(transcript.prompt_logprobs) - 1 - transcript.request.num_computed
    rows = list(zip(output.prompt_logits[b], tree.committed_next[b], strict=True))
    for row, token in rows[num_existing:]:
        transcript.prompt_logprobs.append(compute_token_logprob(row, None, token, count))


def _compute_logprob(tree: TokenTree, b: int, node: int, token: int, output: TargetOutput, count: int) -> TokenLogprob:
    row = tree.get_row(b, node)
    return compute_token_logprob(output.logits[row], output.probs.get_dense_row(row), token, count)
