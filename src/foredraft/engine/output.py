"""What a request has said so far: text, where it ends, origins, log-probabilities, figures."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.completion import Completion, Delta, FinishReason, Origin, Stats, StepTree, TokenLogprob
from foredraft.engine.detokenize import detokenizer
from foredraft.request import Request
from foredraft.tree import TokenTree

_Counts = tuple[int, int, int, list[int], int, float, tuple[int, int]]


@dataclass
class Transcript:
    """The output side of one request. Tokens go in one at a time and in order; a finished transcript takes no more."""

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
    deltas: deque[Delta] = field(default_factory=deque)  # not yet read by the caller
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_predicted: int = 0
    num_predicted_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_time: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._begin()
        self._emitted = (0, "")  # tokens and text that are in deltas: these are never taken back
        self._emitting: tuple[Delta, tuple[int, str]] | None = None  # the delta under way, and what that will be
        self._uncounted: _Counts | None = None  # figures before the current step
        self._stops = self.request.sampling.stop
        self._longest_stop = max(map(len, self._stops), default=0)
        self._end_ids = self.request.end_ids
        self._most = min(self.request.sampling.max_tokens, self.request.max_length - len(self.request.prompt))
        self._pieces: list[str] = []
        self._tokens: list[int] = []

    def _begin(self) -> None:
        self._detokenizer = detokenizer(self.tokenizer, self.request.prompt)
        self._held = ""  # the end of the text, while it may turn out to begin a stop string

    @property
    def num_emitted(self) -> int:
        """Tokens that are in a delta: these are never taken back."""
        return self._emitted[0]

    @property
    def is_told(self) -> bool:
        """The last delta is out."""
        return self.is_finished and bool(self.deltas) and self.deltas[-1].completion is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_rows(self) -> bool:
        """Some prompt log-probabilities beyond where the computation stands are missing; a recomputed prompt may have
        the first of them already."""
        request, done = self.request, len(self.prompt_logprobs) - 1
        wanted = request.sampling.prompt_logprobs is not None
        return wanted and request.computed <= done < len(request.prompt) - 1

    def push(self, token: int) -> bool:
        """Take the next token; True if it ended the text. Order of the checks: end id, stop string, end of
        the grammar, length."""
        sampling, request = self.request.sampling, self.request
        self.num_tokens += 1
        self._tokens.append(token)
        if token in self._end_ids:
            self._end("stop", token if token in sampling.stop_token_ids else None)
            self._pieces.append(self._release())
            return True
        piece = self._detokenizer.push(token)
        if not self._stops and request.matcher is None and self.num_tokens < self._most:  # nothing can end here
            self.text += piece
            self._pieces.append(piece)
            return False
        old = len(self._held)
        self._held += piece
        stop = self._find_stop(old) if self._stops and self.num_tokens >= sampling.min_tokens else None
        if stop is not None:
            at, word = stop
            self._held = self._held[:at]
            self._end("stop", word)
        elif request.matcher is not None and self._is_complete():
            self._end("stop")
        elif self.num_tokens >= self._most:
            self._end("length")
        self._pieces.append(self._release())
        return self.is_finished

    def _is_complete(self) -> bool:
        """The grammar ends here, and the request has no end id to say so."""
        matcher, output = self.request.matcher, self.request.output
        new = self.num_tokens - len(output)  # not committed yet; less than one while a text is pushed anew
        if matcher is None or self._end_ids or new < 1:
            return False
        return matcher.after(output, self._tokens[-new:]).is_finished

    def count_step(self, num_drafted: int, num_accepted: int, draft_time: float, is_predicted: bool = False) -> None:
        """Figures of one target pass that emitted tokens. is_predicted: its draft came from the prediction."""
        drafts, drafted, accepted, at = self.num_drafts, self.num_drafted, self.num_accepted, self.accepted_at.copy()
        predicted = self.num_predicted, self.num_predicted_accepted
        self._uncounted = drafts, drafted, accepted, at, self.target_passes, self.draft_time, predicted
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
        """Queue what was pushed since the last delta."""
        completion = self.completion() if self.is_finished else None
        pieces, tokens = tuple(self._pieces), tuple(self._tokens)
        text = "".join(pieces)
        delta = Delta(self.index, text, tokens, tuple(origins), pieces, self.finish_reason, completion, tuple(steps))
        self._emitting = delta, (self.num_tokens, self.text)
        self.deltas.append(delta)
        self.settle()

    def settle(self) -> None:
        """Count the last delta as handed out. Again, after a step that raised: an interrupt may come between the two.
        The delta must not have been taken yet."""
        if self._emitting is not None and self.deltas and self.deltas[-1] is self._emitting[0]:
            self._emitted = self._emitting[1]
            self._pieces, self._tokens, self._uncounted = [], [], None
            self._emitting = None

    def rewind(self) -> None:
        """Back to the last delta: forget what a step pushed and counted and did not hand out. The request's output must
        be cut to `num_emitted` tokens before. Raises what the tokenizer raises, and then stands at the last delta too,
        except that nothing but `fail` may follow."""
        text = self._emitted[1]
        if self._uncounted is not None:
            drafts, drafted, accepted, self.accepted_at, self.target_passes, self.draft_time, predicted = (
                self._uncounted
            )
            self.num_predicted, self.num_predicted_accepted = predicted
            self.num_drafts, self.num_drafted, self.num_accepted, self._uncounted = drafts, drafted, accepted, None
        del self.logprobs[self.num_emitted :]
        self.finish_reason = self.stop_reason = self.error = None
        try:
            self._begin()
            self.text, self.num_tokens = "", 0
            for token in self.request.output:
                self.push(token)
        finally:
            is_same = self.text == text
            self.text, self.num_tokens = text, self.num_emitted
            self._pieces, self._tokens = [], []
            if not is_same:
                self._held = ""
        assert is_same, "a tokenizer that decodes the same tokens to another text"

    def step_tree(self, tree: TokenTree, b: int, path: Sequence[int], tokens: Sequence[int]) -> StepTree:
        """The drafted part of one pass, from row b of its tree."""
        root = tree.roots[b]
        drafted = tree.token_lists[b][root:]
        parents = [max(parent - root, -1) for parent in tree.parent_lists[b][root:]]
        pieces = tuple(self._detokenizer.alone(token) for token in drafted)
        accepted = tuple(node - root for node in path[root:])
        return StepTree(tuple(drafted), tuple(parents), pieces, accepted, tuple(tokens[root:]))

    def fail(self, reason: FinishReason, error: str | None = None) -> None:
        """End without another token: an error of this request, or an abort."""
        self.error = error
        self._end(reason)
        self._pieces.append(self._release())
        self.emit(())

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "the text has not ended"
        request, sampling = self.request, self.request.sampling
        return Completion(
            text=self.text,
            token_ids=list(request.output),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if sampling.logprobs is None else self.logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else self.prompt_logprobs,
            stats=self.stats(),
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt),
            index=request.sample,
            verification=request.verify,
            error=self.error,
        )

    def stats(self) -> Stats:
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
            wall_time=time.perf_counter() - self.started,
        )

    def _end(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _find_stop(self, old: int) -> tuple[int, str] | None:
        """(place, stop string) of the first to begin among those that end beyond the first `old` held characters, the
        longest of those that begin together. What ended before is no stop: min_tokens had not been reached."""
        places = ((self._held.find(stop, max(0, old - len(stop) + 1)), -len(stop), stop) for stop in self._stops)
        found = [place for place in places if place[0] >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def _release(self) -> str:
        """The held text that can no longer begin a stop string; all of it once the text has ended."""
        if not self._stops:
            piece, self._held = self._held, ""
            self.text += piece
            return piece
        back = 0
        if not self.is_finished:
            longest = min(len(self._held), self._longest_stop - 1)
            for size in range(longest, 0, -1):
                if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                    back = size
                    break
        piece = self._held[: len(self._held) - back]
        self._held = self._held[len(self._held) - back :]
        self.text += piece
        return piece
