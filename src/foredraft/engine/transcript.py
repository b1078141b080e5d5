"""Transcript of a request: output text, end conditions, log-probabilities and statistics."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.outputs import Completion, Delta, FinishReason, Origin, Stats, StepTree, TokenLogprob
from foredraft.request import Request
from foredraft.tokenization.detokenizer import make_detokenizer
from foredraft.tree import TokenTree

_StepCounts = tuple[int, int, int, list[int], int, float, tuple[int, int]]


@dataclass
class Transcript:
    """Output side of one request. Tokens are pushed one at a time, in order, until the transcript is finished.

    `emit` puts what was pushed into a delta. Emitted tokens are final; `rewind` undoes what was pushed after them.
    """

    request: Request
    index: int  # prompt index * n + sample
    tokenizer: Any | None = None
    prompt: str | None = None
    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    deltas: deque[Delta] = field(default_factory=deque)  # emitted and not yet read by the caller
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_predicted: int = 0
    num_predicted_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_time: float = 0.0
    start_time: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._reset_text()
        self._emitted = (0, "")  # number of tokens and text that are in deltas and therefore final
        self._pending_delta: tuple[Delta, tuple[int, str]] | None = None  # delta being queued, and its `_emitted`
        self._counts_before_step: _StepCounts | None = None  # statistics before the current step, for `rewind`
        self._stop_strings = self.request.sampling.stop
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._end_ids = self.request.end_ids
        self._max_tokens = min(self.request.sampling.max_tokens, self.request.max_length - len(self.request.prompt))
        self._pieces: list[str] = []  # text by token since the last delta
        self._tokens: list[int] = []  # tokens since the last delta

    def _reset_text(self) -> None:
        self._detokenizer = make_detokenizer(self.tokenizer, self.request.prompt)
        self._pending_text = ""  # end of the text, held back because it may begin a stop string

    @property
    def num_emitted(self) -> int:
        """Number of tokens that are in deltas and therefore final."""
        return self._emitted[0]

    @property
    def has_final_delta(self) -> bool:
        """True if the last delta, which holds the completion, is queued and not yet read."""
        return self.is_finished and bool(self.deltas) and self.deltas[-1].completion is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """True if the next chunk has to yield prompt log-probabilities.

        A prompt that is recomputed after a preemption skips the positions that have them already.
        """
        request, num_done = self.request, len(self.prompt_logprobs) - 1
        is_requested = request.sampling.prompt_logprobs is not None
        return is_requested and request.num_computed <= num_done < len(request.prompt) - 1

    def push(self, token: int) -> bool:
        """Append the next token. Returns True if the output ends with it.

        The checks are in this order: end id, stop string, end of the grammar, length.
        """
        sampling, request = self.request.sampling, self.request
        self.num_tokens += 1
        self._tokens.append(token)
        if token in self._end_ids:
            self._finish("stop", token if token in sampling.stop_token_ids else None)
            self._pieces.append(self._flush_text())
            return True
        piece = self._detokenizer.push(token)
        # Fast path: no end condition can hold at this token.
        if not self._stop_strings and request.matcher is None and self.num_tokens < self._max_tokens:
            self.text += piece
            self._pieces.append(piece)
            return False
        old = len(self._pending_text)
        self._pending_text += piece
        stop = self._find_stop(old) if self._stop_strings and self.num_tokens >= sampling.min_tokens else None
        if stop is not None:
            offset, stop_string = stop
            self._pending_text = self._pending_text[:offset]
            self._finish("stop", stop_string)
        elif request.matcher is not None and self._is_grammar_complete():
            self._finish("stop")
        elif self.num_tokens >= self._max_tokens:
            self._finish("length")
        self._pieces.append(self._flush_text())
        return self.is_finished

    def _is_grammar_complete(self) -> bool:
        """Return True if the grammar allows no further token and the request has no end id that would follow."""
        matcher, output = self.request.matcher, self.request.output
        num_new = self.num_tokens - len(output)  # tokens not committed yet; less than one during `rewind`
        if matcher is None or self._end_ids or num_new < 1:
            return False
        return matcher.find_allowed(output, self._tokens[-num_new:]).is_finished

    def record_step(self, num_drafted: int, num_accepted: int, draft_time: float, is_predicted: bool = False) -> None:
        """Add one target pass to the statistics.

        Args:
            num_drafted: draft nodes of the request.
            num_accepted: accepted draft nodes.
            draft_time: seconds of drafting for this request.
            is_predicted: the draft was copied from the request's prediction.
        """
        drafts, drafted, accepted = self.num_drafts, self.num_drafted, self.num_accepted
        accepted_at, predicted = self.accepted_at.copy(), (self.num_predicted, self.num_predicted_accepted)
        counts = drafts, drafted, accepted, accepted_at, self.target_passes, self.draft_time, predicted
        self._counts_before_step = counts
        self.target_passes += 1
        self.draft_time += draft_time
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if is_predicted:
            self.num_predicted += num_drafted
            self.num_predicted_accepted += num_accepted
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for depth in range(num_accepted):
            self.accepted_at[depth] += 1

    def emit(self, origins: Sequence[Origin], steps: Sequence[StepTree] = ()) -> None:
        """Queue a delta with the tokens since the last one.

        Args:
            origins: one per token.
            steps: token trees of the step, for requests that trace them.
        """
        completion = self.build_completion() if self.is_finished else None
        pieces, tokens = tuple(self._pieces), tuple(self._tokens)
        text = "".join(pieces)
        delta = Delta(self.index, text, tokens, tuple(origins), pieces, self.finish_reason, completion, tuple(steps))
        self._pending_delta = delta, (self.num_tokens, self.text)
        self.deltas.append(delta)
        self.mark_emitted()

    def mark_emitted(self) -> None:
        """Mark the tokens of the last delta as final.

        `recover` calls this again, because an interrupt may come between queuing a delta and this call. The delta must
        not have been taken yet.
        """
        if self._pending_delta is not None and self.deltas and self.deltas[-1] is self._pending_delta[0]:
            self._emitted = self._pending_delta[1]
            self._pieces, self._tokens, self._counts_before_step = [], [], None
            self._pending_delta = None

    def rewind(self) -> None:
        """Undo what was pushed and counted after the last delta.

        The request's output must be cut to `num_emitted` tokens before. If the tokenizer raises, the transcript is at
        the last delta too, but only `fail` may be called after that.
        """
        text = self._emitted[1]
        if self._counts_before_step is not None:
            drafts, drafted, accepted, self.accepted_at, self.target_passes, self.draft_time, predicted = (
                self._counts_before_step
            )
            self.num_predicted, self.num_predicted_accepted = predicted
            self.num_drafts, self.num_drafted, self.num_accepted = drafts, drafted, accepted
            self._counts_before_step = None
        del self.logprobs[self.num_emitted :]
        self.finish_reason = self.stop_reason = self.error = None
        try:
            self._reset_text()
            self.text, self.num_tokens = "", 0
            for token in self.request.output:
                self.push(token)
        finally:
            is_same = self.text == text
            self.text, self.num_tokens = text, self.num_emitted
            self._pieces, self._tokens = [], []
            if not is_same:
                self._pending_text = ""
        assert is_same, "the tokenizer decoded the same tokens to a different text"

    def build_step_tree(self, tree: TokenTree, b: int, path: Sequence[int], tokens: Sequence[int]) -> StepTree:
        """Build the record of one step's draft for display; node indices are relative to the root.

        Args:
            tree: token tree of the step.
            b: batch index of the request in `tree`.
            path: committed nodes.
            tokens: tokens that follow them.
        """
        root = tree.roots[b]
        node_tokens = tree.tokens[b][root:]
        parents = [max(parent - root, -1) for parent in tree.parents[b][root:]]
        pieces = tuple(self._detokenizer.decode_token(token) for token in node_tokens)
        accepted = tuple(node - root for node in path[root:])
        return StepTree(tuple(node_tokens), tuple(parents), pieces, accepted, tuple(tokens[root:]))

    def fail(self, reason: FinishReason, error: str | None = None) -> None:
        """End without another token, after an error or an abort, and queue the last delta."""
        self.error = error
        self._finish(reason)
        self._pieces.append(self._flush_text())
        self.emit(())

    def build_completion(self) -> Completion:
        assert self.finish_reason is not None, "the request has not ended"
        request, sampling = self.request, self.request.sampling
        return Completion(
            text=self.text,
            token_ids=list(request.output),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if sampling.logprobs is None else self.logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else self.prompt_logprobs,
            stats=self.build_stats(),
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt),
            index=request.sample_index,
            verification=request.rule.name,
            error=self.error,
        )

    def build_stats(self) -> Stats:
        return Stats(
            num_tokens=self.num_tokens,
            num_drafts=self.num_drafts,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_predicted=self.num_predicted,
            num_predicted_accepted=self.num_predicted_accepted,
            accepted_at=tuple(self.accepted_at),
            target_passes=self.target_passes,
            draft_time=self.draft_time,
            wall_time=time.perf_counter() - self.start_time,
        )

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _find_stop(self, old: int) -> tuple[int, str] | None:
        """Find the stop string that begins first in the pending text; the longest if several begin there.

        Args:
            old: pending characters that were searched before. Stop strings that end within them do not count, because
                min_tokens was not reached then.

        Returns:
            (offset in the pending text, stop string), or None.
        """
        candidates = (
            (self._pending_text.find(stop, max(0, old - len(stop) + 1)), -len(stop), stop)
            for stop in self._stop_strings
        )
        matches = [match for match in candidates if match[0] >= 0]
        return (min(matches)[0], min(matches)[2]) if matches else None

    def _flush_text(self) -> str:
        """Release the pending text that cannot begin a stop string; all of it after the end. Returns that text."""
        if not self._stop_strings:
            piece, self._pending_text = self._pending_text, ""
            self.text += piece
            return piece
        num_held = 0
        if not self.is_finished:
            longest = min(len(self._pending_text), self._longest_stop - 1)
            for size in range(longest, 0, -1):
                if any(stop.startswith(self._pending_text[-size:]) for stop in self._stop_strings):
                    num_held = size
                    break
        piece = self._pending_text[: len(self._pending_text) - num_held]
        self._pending_text = self._pending_text[len(self._pending_text) - num_held :]
        self.text += piece
        return piece
