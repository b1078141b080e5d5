"""Input-guided aggressive decoding: an output close to its input is copied from it, a long stretch at a time.

After "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding" (2205.10350) and LLMA (2304.04487), which
copy again after an edit once a suffix of the output occurs in the input. Here edits are guessed at too (follower.py).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.drafters.base import Context, Draft, plant
from foredraft.drafters.follower import Follower
from foredraft.errors import ForedraftError
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

METHOD = "aggressive"
READS_MODEL = False
AUTO_TOKENS = 31  # longer drafts than other methods make: 32 rows of a pass
SOURCES = ("auto", "encoder", "prediction", "prompt", "fenced")
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """What is copied from, and how much.

    source: "encoder" = what the encoder reads, "prediction" = that of the request, "prompt" = the whole prompt, whose
    place is found by the last tokens of the text, "fenced" = the last fenced code block of the prompt that is closed.
    "auto" = the first of encoder, prediction and prompt that the request has.
    start, end: of the prompt only what stands between the last `start` and the `end` after it, or all after `start`.
    A match of fewer than four tokens drafts `tokens_per_match` for each of its own, and as many where nothing matches
    yet. `branches`: so many guesses at how the text goes on after an edit share one tree.
    """

    source: str = "auto"
    start: str | None = None
    end: str | None = None
    tokens_per_match: int = 4
    branches: int = 1


class Sources:
    """Finds what a request is copied from."""

    def __init__(self, config: Config, tokenizer: Any | None) -> None:
        self.config, self.tokenizer = config, tokenizer

    def follower(self, request: Request) -> Follower:
        """At the beginning of a source of its own, or anywhere in the prompt."""
        source = self._given(request)
        if source is None and (self.config.start is not None or self.config.source == "fenced"):
            source = self._span(request.prompt)
        if source is not None:
            return Follower(source, per_match=self.config.tokens_per_match)
        prompt = tuple(request.prompt) if self.config.source in ("auto", "prompt", "fenced") else ()
        return Follower.lost(prompt, request.prompt, self.config.tokens_per_match)

    def _given(self, request: Request) -> Tokens | None:
        """What came beside the prompt, if it is wanted."""
        given = {
            "encoder": () if request.source is None else request.source.tokens,
            "prediction": request.prediction,
        }
        wanted = given if self.config.source == "auto" else (self.config.source,)
        return next((given[name] for name in wanted if given.get(name)), None)

    def _span(self, prompt: Sequence[int]) -> Tokens | None:
        """The part of the prompt that is meant, as the output would spell it; None if the prompt has no such part."""
        assert self.tokenizer is not None  # `create` saw to that
        text = self.tokenizer.decode(prompt)
        if self.config.start is not None:
            _, found, span = text.rpartition(self.config.start)
            span = span.partition(self.config.end)[0] if self.config.end else span
        else:
            blocks = FENCED.findall(text)
            found, span = bool(blocks), blocks[-1] if blocks else ""
        return tuple(self.tokenizer(span, add_special_tokens=False).input_ids) if found else None


class Aggressive:
    """The verbs. Guesses, whose q is one-hot; how many depends on the text so far alone."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, num_tokens: int, follow: Callable[[Request], Follower]) -> None:
        self.config = config
        self.num_tokens = num_tokens
        self._follow = follow
        self._followers: dict[int, Follower] = {}  # by slot

    @property
    def num_nodes(self) -> int:
        return self.num_tokens * self.config.branches

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        for b in batch.drafting():
            request, budget = batch.requests[b], batch.budgets[b]
            depth = min(self.num_tokens, budget, request.room)
            if depth > 0:
                branches = 1 if request.verify == "block" else self.config.branches
                drafts[b] = Draft.merged(self._read(request).drafts(depth, branches), budget)
        return plant(batch, drafts)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Nothing: the text says it all."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._followers.pop(slot, None)

    def _read(self, request: Request) -> Follower:
        follower = self._followers.get(request.slot)
        if follower is None:
            follower = self._followers[request.slot] = self._follow(request)
        follower.read(request.output[follower.num_read :])
        return follower


def create(config: Config, context: Context) -> Aggressive:
    """Raises ForedraftError for a source that cannot be found, and for numbers that draft nothing."""
    if config.source not in SOURCES:
        raise ForedraftError(f"unknown source {config.source!r}; use one of {', '.join(SOURCES)}")
    for name in ("branches", "tokens_per_match"):
        if getattr(config, name) < 1:
            raise ForedraftError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.start == "" or config.end == "" or (config.end is not None and config.start is None):
        raise ForedraftError("`end` says where the part after `start` ends; give both as text, or `start` alone")
    if config.start is not None and config.source not in ("auto", "prompt"):
        raise ForedraftError(f"`start` marks a part of the prompt, and the source is {config.source!r}; leave one out")
    if (config.start is not None or config.source == "fenced") and context.tokenizer is None:
        raise ForedraftError(
            "a part of the prompt is found in its text, and there is no tokenizer; use source='prompt'"
        )
    return Aggressive(config, context.num_tokens, Sources(config, context.tokenizer).follower)


def auto_rank(context: Context) -> float | None:
    """Among the methods that read nothing but the text: the best where an encoder reads what is to be edited."""
    return 30.0 if context.target is not None and context.target.has_encoder else None
