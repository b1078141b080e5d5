"""Input-guided aggressive decoding: copies long drafts from an input that the output resembles.

The references resume copying after an edit when a suffix of the output occurs in the input. Here the drafter also
drafts directly after an edit, from likely positions (copy_cursor.py).

Reference: "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding" (2205.10350); LLMA (2304.04487).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.drafters.aggressive.copy_cursor import CopyCursor
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch, Request
from foredraft.request_spec import RequestSpec
from foredraft.tree import Commit, TokenTree

SOURCES = ("auto", "encoder", "prediction", "prompt", "fenced")
FENCED_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
TokenTuple = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """Source of the copies and length of the drafts.

    Attributes:
        source: "encoder" = the encoder's input; "prediction" = the request's prediction; "prompt" = the whole prompt,
            in which the last tokens are searched; "fenced" = the last closed code block of the prompt; "auto" = the
            first of encoder, prediction and prompt that the request has.
        start: text that begins the part of the prompt to copy; the last occurrence counts. None = no such part.
        end: text that ends the part after `start`; None = the end of the prompt.
        tokens_per_match: draft tokens per matched token, for matches of fewer than 4 tokens (and for no match).
        branches: number of alternative continuations after an edit, in one tree.
    """

    source: str = "auto"
    start: str | None = None
    end: str | None = None
    tokens_per_match: int = 4
    branches: int = 1


class CopySourceFinder:
    """Finder of the source that a request copies from."""

    def __init__(self, config: Config, tokenizer: Any | None) -> None:
        self.config, self.tokenizer = config, tokenizer

    def make_cursor(self, request: Request) -> CopyCursor:
        """Make a cursor at the beginning of the request's source, or at an unknown position in the prompt."""
        source, prompt = self._find_given_source(request.spec), request.spec.prompt
        if source is None and (self.config.start is not None or self.config.source == "fenced"):
            source = self._extract_prompt_span(prompt)
        if source is not None:
            return CopyCursor(source, tokens_per_match=self.config.tokens_per_match)
        copied = prompt if self.config.source in ("auto", "prompt", "fenced") else ()
        return CopyCursor.from_unknown_position(copied, prompt, self.config.tokens_per_match)

    def _find_given_source(self, spec: RequestSpec) -> TokenTuple | None:
        """Return the encoder input or the prediction, if `source` allows it."""
        sources = {
            "encoder": () if spec.source is None else spec.source.tokens,
            "prediction": spec.prediction,
        }
        names = sources if self.config.source == "auto" else (self.config.source,)
        return next((sources[name] for name in names if sources.get(name)), None)

    def _extract_prompt_span(self, prompt: Sequence[int]) -> TokenTuple | None:
        """Return the configured part of the prompt, tokenized again; None if the prompt has no such part."""
        assert self.tokenizer is not None  # `create` checks it
        text = self.tokenizer.decode(prompt)
        if self.config.start is not None:
            _, found, span = text.rpartition(self.config.start)
            span = span.partition(self.config.end)[0] if self.config.end else span
        else:
            blocks = FENCED_BLOCK.findall(text)
            found, span = bool(blocks), blocks[-1] if blocks else ""
        return tuple(self.tokenizer(span, add_special_tokens=False).input_ids) if found else None


class AggressiveDrafter:
    """Drafter of deterministic tokens from a source. The draft length depends on committed tokens alone."""

    def __init__(
        self, config: Config, num_speculative_tokens: int, make_cursor: Callable[[Request], CopyCursor]
    ) -> None:
        self.config = config
        self.num_speculative_tokens = num_speculative_tokens
        self.spec = DrafterSpec(num_speculative_tokens * config.branches, reads_commits=False)
        self._make_cursor = make_cursor
        self._cursors: dict[int, CopyCursor] = {}  # by slot

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        for b in batch.find_drafting():
            request, budget = batch.requests[b], batch.granted_nodes[b]
            depth = min(self.num_speculative_tokens, budget, request.max_draft_depth)
            if depth > 0:
                branches = self.config.branches if request.spec.rule.takes_trees else 1
                drafts[b] = Draft.from_paths(self._update_cursor(request).draft_branches(depth, branches), budget)
        return to_token_tree(batch, drafts)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Do nothing: `propose` reads the committed tokens."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._cursors.pop(slot, None)

    def _update_cursor(self, request: Request) -> CopyCursor:
        cursor = self._cursors.get(request.slot)
        if cursor is None:
            cursor = self._cursors[request.slot] = self._make_cursor(request)
        cursor.read(request.output[cursor.num_read :])
        return cursor
