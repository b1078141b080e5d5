"""Transcript of a request: its output, how it ended, and its log-probabilities."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.engine.delta_queue import DeltaQueue
from foredraft.engine.output_text import OutputText
from foredraft.engine.stats_recorder import StatsRecorder
from foredraft.outputs import Completion, Delta, FinishReason, Origin, Stats, StepTree, TokenLogprob
from foredraft.request import Request
from foredraft.tree import TokenTree


@dataclass(frozen=True)
class OutputEnd:
    """How an output ended."""

    reason: FinishReason
    stop_reason: str | int | None = None  # stop string or stop token id that ended it
    error: str | None = None


class Transcript:
    """Output side of one request. Tokens are pushed one at a time, in order, until the transcript is finished.

    `emit` puts what was pushed into a delta. Emitted tokens are final; `rewind` undoes what was pushed after them.
    """

    def __init__(self, request: Request, index: int, tokenizer: Any | None = None, prompt: str | None = None) -> None:
        """Begin an empty output.

        Args:
            request: request whose output this is.
            index: prompt index * n + sample.
            tokenizer: transformers tokenizer. Default None = all text is empty.
            prompt: text of the prompt, for the completion. Default None = the prompt had no text.
        """
        self.request = request
        self.prompt = prompt
        self.num_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.stats_recorder = StatsRecorder()
        self._end: OutputEnd | None = None
        spec = request.spec
        self._output_text = OutputText.for_request(tokenizer, spec)
        self._delta_queue = DeltaQueue(index)
        self._end_ids = spec.end_ids
        self._max_tokens = spec.max_output_tokens

    @property
    def index(self) -> int:
        """Prompt index * n + sample."""
        return self._delta_queue.index

    @property
    def text(self) -> str:
        """Text without what is held back."""
        return self._output_text.released

    @property
    def deltas(self) -> deque[Delta]:
        """Deltas that are emitted and not yet read by the caller."""
        return self._delta_queue.deltas

    @property
    def num_emitted(self) -> int:
        """Number of tokens that are in deltas and therefore final."""
        return self._delta_queue.emitted[0]

    @property
    def has_final_delta(self) -> bool:
        """True if the last delta, which holds the completion, is queued and not yet read."""
        return self.is_finished and bool(self.deltas) and self.deltas[-1].completion is not None

    @property
    def is_finished(self) -> bool:
        return self._end is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._end is None else self._end.reason

    @property
    def stop_reason(self) -> str | int | None:
        return None if self._end is None else self._end.stop_reason

    @property
    def error(self) -> str | None:
        return None if self._end is None else self._end.error

    @property
    def needs_prompt_logits(self) -> bool:
        """True if the next chunk has to yield prompt log-probabilities.

        A prompt that is recomputed after a preemption skips the positions that have them already.
        """
        spec, num_done = self.request.spec, len(self.prompt_logprobs) - 1
        is_requested = spec.sampling.prompt_logprobs is not None
        return is_requested and self.request.num_computed <= num_done < len(spec.prompt) - 1

    def push(self, token: int) -> bool:
        """Append the next token. Returns True if the output ends with it.

        The checks are in this order: end id, stop string, end of the grammar, length.
        """
        self.num_tokens += 1
        queue, text = self._delta_queue, self._output_text
        queue.tokens.append(token)
        if token in self._end_ids:
            self._end = OutputEnd("stop", token if token in self.request.spec.sampling.stop_token_ids else None)
            queue.pieces.append(text.release(is_end=True))
            return True
        # Fast path: no end condition can hold at this token.
        if self.num_tokens < self._max_tokens and not text.stop_strings and self.request.matcher is None:
            queue.pieces.append(text.append(token))
            return False
        stop_string = text.append_pending(token, self.num_tokens >= self.request.spec.sampling.min_tokens)
        if stop_string is not None:
            self._end = OutputEnd("stop", stop_string)
        elif self._is_grammar_complete():
            self._end = OutputEnd("stop")
        elif self.num_tokens >= self._max_tokens:
            self._end = OutputEnd("length")
        queue.pieces.append(text.release(self.is_finished))
        return self.is_finished

    def _is_grammar_complete(self) -> bool:
        """Return True if the grammar allows no further token and the request has no end id that would follow."""
        matcher, output = self.request.matcher, self.request.output
        num_new = self.num_tokens - len(output)  # tokens not committed yet; less than one during `rewind`
        if matcher is None or self._end_ids or num_new < 1:
            return False
        return matcher.find_allowed(output, self._delta_queue.tokens[-num_new:]).is_finished

    def emit(self, origins: Sequence[Origin], steps: Sequence[StepTree] = ()) -> None:
        """Queue a delta with the tokens since the last one.

        Args:
            origins: one per token.
            steps: token trees of the step, for requests that trace them.
        """
        completion = self.build_completion() if self.is_finished else None
        self._delta_queue.put(origins, steps, self.finish_reason, completion, (self.num_tokens, self.text))
        self.mark_emitted()

    def mark_emitted(self) -> None:
        """Mark the tokens of the last delta as final.

        `recover` calls this again, because an interrupt may come between queuing a delta and this call. The delta must
        not have been taken yet.
        """
        if self._delta_queue.has_unmarked:
            self.stats_recorder.keep_step()  # before the mark, after which a second call does nothing
            self._delta_queue.mark_emitted()

    def rewind(self) -> None:
        """Undo what was pushed and counted after the last delta.

        The request's output must be cut to `num_emitted` tokens before. If the tokenizer raises, the transcript is at
        the last delta too, but only `fail` may be called after that.
        """
        num_tokens, text = self._delta_queue.emitted
        self.stats_recorder.undo_step()
        del self.logprobs[num_tokens:]
        self._end = None
        try:
            self._output_text.restart()
            self.num_tokens = 0
            for token in self.request.output:
                self.push(token)
        finally:
            is_same = self._output_text.restore(text)
            self.num_tokens = num_tokens
            self._delta_queue.drop_tokens()
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
        pieces = tuple(self._output_text.decode_token(token) for token in node_tokens)
        accepted = tuple(node - root for node in path[root:])
        return StepTree(tuple(node_tokens), tuple(parents), pieces, accepted, tuple(tokens[root:]))

    def fail(self, reason: FinishReason, error: str | None = None) -> None:
        """End without another token, after an error or an abort, and queue the last delta."""
        self._end = OutputEnd(reason, error=error)
        self._delta_queue.pieces.append(self._output_text.release(is_end=True))
        self.emit(())

    def build_completion(self) -> Completion:
        assert self._end is not None, "the request has not ended"
        spec, sampling = self.request.spec, self.request.spec.sampling
        return Completion(
            text=self.text,
            token_ids=list(self.request.output),
            finish_reason=self._end.reason,
            stop_reason=self._end.stop_reason,
            logprobs=None if sampling.logprobs is None else self.logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else self.prompt_logprobs,
            stats=self.build_stats(),
            prompt=self.prompt,
            prompt_token_ids=list(spec.prompt),
            index=spec.sample_index,
            verification=spec.rule.name,
            error=self._end.error,
        )

    def build_stats(self) -> Stats:
        """Return the statistics up to now."""
        return self.stats_recorder.build_stats(self.num_tokens)
