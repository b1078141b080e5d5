"""The step: propose, verify in one target pass, commit."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.completion import FinishReason, Origin, TokenLogprob
from foredraft.controller import Fixed, Lengths, Outcome, StepReport
from foredraft.drafters.base import Drafter
from foredraft.engine.guard import Guard
from foredraft.engine.logprobs import token_logprob
from foredraft.engine.masks import MaskBudget
from foredraft.engine.output import Transcript
from foredraft.engine.scheduler import Limits, Scheduler
from foredraft.errors import ForedraftError
from foredraft.filters import likeliest
from foredraft.kernels.process import check_process
from foredraft.kv.blocks import PageAllocator
from foredraft.kv.pool import keep
from foredraft.kv.prefix import PrefixCache
from foredraft.kv.weak import weakly
from foredraft.laws import Laws
from foredraft.models.lm import LM
from foredraft.models.window import Window
from foredraft.request import Batch, Request
from foredraft.sampling import History, shaped
from foredraft.tree import Answers, Commit, TokenTree
from foredraft.verify import Keyed, per_request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """Logits and laws of one pass, by row of the tree; `prompt_rows` are the other rows asked for."""

    logits: Tensor  # [R, V]
    laws: Laws  # R
    prompt_rows: dict[int, Tensor]  # b -> [known, V] logits after the request's known nodes


class Engine:
    """Runs requests to their end, all of them together, one step at a time. Not thread-safe, as
    `SharedEngine` and `Worker` are."""

    def __init__(
        self,
        target: LM,
        drafter: Drafter | None,
        allocator: PageAllocator,
        limits: Limits,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        is_debug: bool = False,
        lengths: Lengths | None = None,
        prefix_cache: bool = True,
    ) -> None:
        """drafter: put behind a Guard, unless it is one. prefix_cache: requests find again what others computed;
        False = only samples of one prompt do."""
        self.target = target
        self.drafter = drafter if isinstance(drafter, Guard) else Guard(drafter, target.vocab_size, clock=clock)
        self.lengths = lengths or Fixed()
        prefix = PrefixCache(allocator, self.drafter, is_shared=prefix_cache)
        self.scheduler = Scheduler(allocator, limits, weakly(self._forget), prefix)
        self.transcripts: dict[Request, Transcript] = {}
        self.masks = MaskBudget()
        self.page_size = allocator.page_size
        self.device = device
        self.is_debug = is_debug
        self._clock = clock
        self._observing = 0.0  # seconds the drafter took to read the last step: part of the next draft's time
        self.last: StepReport | None = None
        self.tried: tuple[Request, ...] = ()  # who the last step ran, or was about to run when it raised
        self.is_reserved = False  # a Worker's thread steps it, and no other may

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise ForedraftError for a request that could never run, or not in this process."""
        check_process()
        allocator = self.scheduler.allocator
        most = min(len(request.prompt) + request.sampling.max_tokens, request.max_length)
        if allocator.pages_for(most) > allocator.num_pages - 1:
            raise ForedraftError(
                f"prompt and max_tokens need {most} tokens of KV memory and the pool holds "
                f"{(allocator.num_pages - 1) * self.page_size}; raise kv_tokens or lower max_tokens"
            )

    def add(self, transcript: Transcript) -> None:
        """Queue a request. Raises ForedraftError if it could never run."""
        request = transcript.request
        self.check(request)
        self.scheduler.add(request)
        self.transcripts[request] = transcript
        self.masks.enter(request)

    def abort(self, request: Request, reason: FinishReason = "abort", why: str | None = None) -> None:
        """End a request now, wherever it is; what it holds is free at once."""
        transcript = self.transcripts.pop(request, None)
        if transcript is not None:
            self.scheduler.finish(request)
            transcript.fail(reason, why)

    def recover(self) -> None:
        """After a step, an `add` or an `abort` that raised, wherever it did: nothing that was computed is trusted, and
        every request goes on from the last token that was handed out. Call it before anybody takes a delta, and again
        if it was interrupted itself. Raises nothing for the fault of one request: that one ends."""
        self._observing = 0.0
        for request, transcript in list(self.transcripts.items()):
            transcript.settle()
            if transcript.is_told:  # the step raised between its last delta and taking it out
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
                log.exception("a text could not be rebuilt; its request ends")
                self.abort(request, "error", "the text of this request cannot be decoded")

    @torch.inference_mode()
    def step(self, only: frozenset[Request] | None = None) -> None:
        """One pass of the target over every request that runs, or over `only` some of them; new text is queued on the
        transcripts. Where it raises, `recover` makes the engine whole again."""
        start = self._clock()
        self.tried = ()
        batch = self._next(only)
        self.tried = batch.requests
        if not batch.requests:
            return
        if self.is_debug:
            for request in batch.requests:
                self.scheduler.check_writes(request)
        began = self._clock()
        draft = self.drafter.propose(batch)
        drafting = self._clock() - began
        draft_time = (drafting + self._observing) / len(batch)
        tree = _on_chunks(batch, draft)
        window, wanted = self._window(batch, tree)
        logits, features = self.target.forward(window, self.drafter.taps)
        scored = _score(batch, tree, logits, wanted)
        commit = per_request([r.verify for r in batch.requests])(tree, scored.laws, _randomness(batch, tree))
        commit = self._cut(batch, tree, commit, scored, draft_time)
        starts, pages = [r.computed for r in batch.requests], [r.pages for r in batch.requests]
        keep(self.target.pool, commit.path_lists, starts, pages, self.page_size, self.device)
        began = self._clock()
        commit = _with_answers(commit, tree, scored.logits) if self.drafter.wants_answers else commit
        self.drafter.observe(batch, _with_features(commit, tree, features))
        self._observing = self._clock() - began
        outcomes = _outcomes(batch, tree, commit)
        context = sum(n * (r.computed + n) for n, r in zip(tree.sizes, batch.requests, strict=True))
        self.scheduler.commit(batch, commit)
        self._publish(batch, tree, commit)
        self.last = StepReport(
            num_requests=len(batch),
            num_rows=sum(tree.sizes),
            num_scored=tree.first_rows[-1],
            context=context,
            draft_time=drafting + self._observing,
            step_time=self._clock() - start,
            outcomes=outcomes,
        )
        self.lengths.learn(self.last)
        self.masks.settle(batch.requests, self.last.step_time)
        if self.is_debug:
            self.scheduler.check_integrity()
        elif not self.has_work:
            self.scheduler.check_idle()

    def _next(self, only: frozenset[Request] | None) -> Batch:
        """The next batch, without those whose masks take too long, unless nothing else can run."""
        resting = self.masks.resting()
        batch = self.scheduler.next(self.drafter.num_nodes, self.lengths, only, resting)
        if resting and not batch.requests and self.masks.let_off(only):
            batch = self.scheduler.next(self.drafter.num_nodes, self.lengths, only, self.masks.resting())
        return batch

    def _forget(self, slots: Sequence[int]) -> None:
        self.drafter.forget(slots)
        self.lengths.forget(slots)

    def _window(self, batch: Batch, tree: TokenTree) -> tuple[Window, list[int]]:
        """The window, and the requests whose prompt rows are wanted too."""
        wanted = [b for b, r in enumerate(batch.requests) if self.transcripts[r].wants_prompt_rows]
        starts, pages = [r.computed for r in batch.requests], [r.pages for r in batch.requests]
        sources = [r.source for r in batch.requests]
        return Window.of_trees(tree, starts, pages, self.page_size, self.device, wanted, sources), wanted

    def _cut(self, batch: Batch, tree: TokenTree, commit: Commit, scored: Scored, draft_time: float) -> Commit:
        """End every run at the first end id, stop string or length, before anything is counted or kept."""
        counts = []
        for b, request in enumerate(batch.requests):
            transcript, known = self.transcripts[request], tree.roots[b]
            path, tokens = commit.path_lists[b], commit.token_lists[b]
            if b in scored.prompt_rows:
                _note_prompt(transcript, tree, b, scored)
            used = min(known, len(tokens))
            for node, token in zip(path[used:], tokens[used:], strict=True):
                used += 1
                if request.sampling.logprobs is not None:
                    transcript.logprobs.append(_logprob(tree, b, node, token, scored, request.sampling.logprobs))
                if transcript.push(token):
                    break
            if used > known:
                num_accepted = min(used - known, len(path) - known - 1)
                transcript.count_step(tree.sizes[b] - known - 1, num_accepted, draft_time, b in tree.predicted)
            counts.append(used)
        return commit if counts == commit.counts else commit.cut(counts)

    def _publish(self, batch: Batch, tree: TokenTree, commit: Commit) -> None:
        """Queue the new text, and take out the requests that ended."""
        for b, request in enumerate(batch.requests):
            transcript = self.transcripts[request]
            if b in commit.failed:
                transcript.fail("error", _no_law(request))
            elif len(commit.token_lists[b]) > tree.roots[b]:
                path, tokens = commit.path_lists[b], commit.token_lists[b]
                seen = [transcript.step_tree(tree, b, path, tokens)] if request.is_traced else ()
                transcript.emit(_origins(tree, b, path, tokens), seen)
            if transcript.is_finished:
                self.scheduler.finish(request, is_poisoned=b in commit.failed)
                del self.transcripts[request]


def _no_law(request: Request) -> str:
    if request.matcher is not None and request.matcher.error is not None:
        return f"the grammar cannot be followed any further: {request.matcher.error}"
    return "the model gave logits that are no law (NaN, infinite, or nothing allowed)"


def _outcomes(batch: Batch, tree: TokenTree, commit: Commit) -> tuple[Outcome, ...]:
    """What came of the draft of every request whose last token was scored."""
    found = []
    for b, (request, budget) in enumerate(zip(batch.requests, batch.budgets, strict=True)):
        root, size = tree.roots[b], tree.sizes[b]
        if root < size and b not in commit.failed:
            accepted = tuple([node - root for node in commit.path_lists[b][root + 1 :]]) if root + 1 < size else ()
            found.append(Outcome(request.slot, budget, size - root - 1, accepted))
    return tuple(found)


def _on_chunks(batch: Batch, draft: TokenTree) -> TokenTree:
    """The drafts with every request's uncomputed tokens before them; all but the last know their successors."""
    if all(chunk == 1 for chunk in batch.chunks) and all(batch.scored):
        return draft
    prefixes = [r.slice(r.computed, r.computed + n - 1) for r, n in zip(batch.requests, batch.chunks, strict=True)]
    known = [
        r.slice(r.computed + 1, min(r.computed + n + 1, r.num_tokens))
        for r, n in zip(batch.requests, batch.chunks, strict=True)
    ]
    return draft.after(prefixes, known)


def _score(batch: Batch, tree: TokenTree, logits: Tensor, wanted: Sequence[int]) -> Scored:
    prompt_rows: dict[int, Tensor] = {}
    if wanted:  # the prompt rows of these requests stand before their scored rows
        kept, offset = [], 0
        for b, (size, root) in enumerate(zip(tree.sizes, tree.roots, strict=True)):
            extra = root if b in wanted else 0
            if extra:
                prompt_rows[b] = logits[offset : offset + extra]
            kept.append(logits[offset + extra : offset + extra + size - root])
            offset += extra + size - root
        logits = torch.cat(kept)
    return Scored(logits, _laws(batch, tree, logits), prompt_rows)


def _laws(batch: Batch, tree: TokenTree, logits: Tensor) -> Laws:
    spans = zip(batch.requests, tree.roots, tree.sizes, strict=True)
    samplings = [request.sampling for request, root, size in spans for _ in range(root, size)]
    if not any(request.sampling.shapes_logits for request in batch.requests):
        return Laws(logits, samplings)

    def history(row: int) -> History:
        b, node = tree.place(row)
        return batch.requests[b].history(tree.path(b, node))

    return Laws(logits, samplings, history)


def _randomness(batch: Batch, tree: TokenTree) -> Keyed:
    return Keyed(tree, [(r.seed, r.sample) for r in batch.requests], [r.computed for r in batch.requests])


def _with_answers(commit: Commit, tree: TokenTree, logits: Tensor) -> Commit:
    return commit.shown(commit.features, Answers(tree, likeliest(shaped(logits, ()))))


def _with_features(commit: Commit, tree: TokenTree, features: Tensor | None) -> Commit:
    """The tapped states of the surviving nodes, [T, F] -> [B, P, F]."""
    if features is None:
        return commit
    paths = commit.path_lists
    if len(paths) == 1:
        (path,) = paths
        is_front = path == list(range(len(path)))  # a chain's always is
        return commit.shown((features[: len(path)] if is_front else features[path])[None], commit.answers)
    at_path = features.new_zeros(len(paths), max(map(len, paths)), features.shape[-1])
    offset = 0
    for b, (path, size) in enumerate(zip(paths, tree.sizes, strict=True)):
        at_path[b, : len(path)] = features[[offset + node for node in path]]
        offset += size
    return commit.shown(at_path, commit.answers)


def _origins(tree: TokenTree, b: int, path: Sequence[int], tokens: Sequence[int]) -> list[Origin]:
    """How each emitted token came to be. A path cut at the end of the text may end with an accepted token."""
    known = tree.roots[b]
    emitted = len(tokens) - known
    if tree.sizes[b] - known == 1:
        return ["plain"] * emitted
    drafted = tree.token_lists[b]
    origins: list[Origin] = []
    for node, token in zip(path[known:], tokens[known:], strict=True):
        below = tree.children[b][node]
        if token in [drafted[child] for child in below]:
            origins.append("accepted")
        else:
            origins.append("corrected" if below else "bonus")
    return origins


def _note_prompt(transcript: Transcript, tree: TokenTree, b: int, scored: Scored) -> None:
    count = transcript.request.sampling.prompt_logprobs
    if count is None or tree.known is None:
        return
    had = len(transcript.prompt_logprobs) - 1 - transcript.request.computed  # before a preemption
    rows = list(zip(scored.prompt_rows[b], tree.known[b], strict=True))
    for row, token in rows[had:]:
        transcript.prompt_logprobs.append(token_logprob(row, None, token, count))


def _logprob(tree: TokenTree, b: int, node: int, token: int, scored: Scored, count: int) -> TokenLogprob:
    row = tree.row(b, node)
    return token_logprob(scored.logits[row], scored.laws.p(row), token, count)
