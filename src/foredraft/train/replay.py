"""What a drafter is worth in use, without a pass of the target: the verifier replayed along recorded texts.

The target's own continuations are written once. The drafter is then stepped along them exactly as the engine would:
under `match`, and greedily, the target says what it said, whatever is drafted, so a step keeps the path of its tree
that agrees with the text. With the same numerics the figures are those of a real run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.completion import Stats
from foredraft.controller import Fixed
from foredraft.engine.guard import Guard
from foredraft.engine.output import Transcript
from foredraft.engine.scheduler import Scheduler
from foredraft.errors import ForedraftError
from foredraft.kv.blocks import PageAllocator
from foredraft.models.lm import HFModel
from foredraft.models.window import Span, Window
from foredraft.request import Batch, Request
from foredraft.train.trace import Tracer
from foredraft.tree import Commit, TokenTree

REGIMES = {"greedy": 0.0, "sampled": 1.0}  # by temperature


@dataclass(frozen=True)
class Text:
    """A prompt and what the target makes of it under one sampling."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    seed: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Recording:
    """Texts of one sampling, and the target's states along them for every drafter that is replayed."""

    texts: tuple[Text, ...]
    _states: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)  # by taps

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int) -> "Recording":
        """The target's own continuations; sampled ones have the number of the prompt as their seed."""
        samplings = [Sampling(max_tokens=num_tokens, temperature=temperature, seed=i) for i in range(len(prompts))]
        plain = llm.with_drafter(None, verify="auto")
        done = plain.generate([list(prompt) for prompt in prompts], samplings)
        triples = zip(prompts, done, samplings, strict=True)
        return cls(tuple(Text(tuple(p), tuple(c.token_ids), s, s.seed or 0) for p, c, s in triples))

    def states(self, target: HFModel, taps: tuple[int, ...]) -> list[Tensor]:
        """[n, F] after every token of every text."""
        if taps not in self._states:
            tracer = Tracer(target, taps, top=1)
            found = []
            for text in self.texts:
                features, _ = tracer.follow(torch.tensor([text.tokens]))
                found.append(features[0])
            self._states[taps] = found
        return self._states[taps]


@dataclass(frozen=True)
class Figures:
    """Of many texts together."""

    acceptance_length: float  # tokens per target pass, bonus included
    per_position: tuple[float, ...]  # drafts kept to depth i + 1 over all drafts

    @classmethod
    def of(cls, stats: Iterable[Stats]) -> "Figures":
        found = list(stats)
        passes, drafts = sum(s.target_passes for s in found), sum(s.num_drafts for s in found)
        depth = max((len(s.accepted_at) for s in found), default=0)
        kept = [sum(s.accepted_at[i] for s in found if i < len(s.accepted_at)) for i in range(depth)]
        length = sum(s.num_tokens for s in found) / passes if passes else 0.0
        return cls(length, tuple(count / drafts for count in kept) if drafts else ())


class Replay:
    """One drafter along one recording."""

    def __init__(self, llm: LLM, recording: Recording) -> None:
        """llm: the target with the drafter, whose engine is left alone. Raises ForedraftError for a drafter that asks
        the target about tokens that were not taken: a recording does not say."""
        engine = llm.engine.scheduler
        self.drafter = Guard(llm.drafter, llm.target.vocab_size)
        if self.drafter.wants_answers:
            raise ForedraftError(f"{llm.drafter_name} learns from what the target says to its guesses; run it instead")
        self.target = llm.target if getattr(llm.drafter, "shares_memory", False) else None
        allocator = PageAllocator(engine.allocator.num_pages, engine.allocator.page_size)
        self.scheduler = Scheduler(allocator, engine.limits, self.drafter.forget)
        self.texts: dict[Request, Text] = {}
        self.transcripts: dict[Request, Transcript] = {}
        self.states: dict[Request, Tensor] = {}
        taps = self.drafter.taps
        states = recording.states(llm.target, taps) if taps else [None] * len(recording.texts)
        for index, (text, own) in enumerate(zip(recording.texts, states, strict=True)):
            request = Request(
                slot=-1, prompt=list(text.prompt), sampling=text.sampling, seed=text.seed, eos_ids=llm.end_ids,
                max_length=llm.target.context_length, verify="match",
            )  # fmt: skip
            self.texts[request], self.transcripts[request] = text, Transcript(request, index)
            if own is not None:
                self.states[request] = own
            self.scheduler.add(request)

    @torch.inference_mode()
    def run(self) -> list[Stats]:
        """Figures of every text, in order."""
        while self.scheduler.has_work:
            self._step()
        return [transcript.stats() for transcript in self.transcripts.values()]

    def _step(self) -> None:
        batch = self.scheduler.next(self.drafter.num_nodes, Fixed())
        tree = self.drafter.propose(batch)
        walks = [self._walk(batch, tree, b) for b in range(len(batch))]
        commit = Commit.of([path for path, _ in walks], [tokens for _, tokens in walks])
        if self.states:
            commit = Commit(commit.path_lists, commit.token_lists, features=self._features(batch, commit))
        if self.target is not None:
            self._write(self.target, batch, commit)
        self.drafter.observe(batch, commit)
        self.scheduler.commit(batch, commit)
        for request in batch.requests:
            if self.transcripts[request].is_finished:
                self.scheduler.finish(request)

    def _walk(self, batch: Batch, tree: TokenTree, b: int) -> tuple[list[int], list[int]]:
        """The path through a request's chunk and draft that its text takes, and the tokens that follow its nodes."""
        request, chunk = batch.requests[b], batch.chunks[b]
        text, transcript = self.texts[request].tokens, self.transcripts[request]
        at = request.computed + chunk  # the place in the text that the root's successor has
        path, tokens = list(range(chunk)), list(text[request.computed + 1 : at])
        if not batch.scored[b]:
            return path, [*tokens, text[at]]
        drafted, children, node, num_accepted = tree.token_lists[b], tree.children[b], 0, 0
        while True:
            tokens.append(text[at])
            is_over = transcript.push(text[at])
            child = next((child for child in children[node] if drafted[child] == text[at]), None)
            num_accepted += child is not None
            if child is None or is_over:
                break
            path.append(chunk - 1 + child)
            node, at = child, at + 1
        transcript.count_step(tree.sizes[b] - 1, num_accepted, 0.0)
        return path, tokens

    def _write(self, target: HFModel, batch: Batch, commit: Commit) -> None:
        """What the pass would have left in the target's memory, for a drafter that reads it there."""
        spans = []
        for request, count in zip(batch.requests, commit.counts, strict=True):
            tokens = self.texts[request].tokens[request.computed : request.computed + count]
            spans.append(Span(request.pages, request.computed, tokens, range(count)))
        target.forward(Window.build(spans, [0], batch.page_size, target.device))

    def _features(self, batch: Batch, commit: Commit) -> Tensor:
        """[B, P, F]: along the text, so those of its own positions."""
        first = self.states[batch.requests[0]]
        found = first.new_zeros(len(batch), max(commit.counts), first.shape[-1])
        for b, (request, count) in enumerate(zip(batch.requests, commit.counts, strict=True)):
            found[b, :count] = self.states[request][request.computed : request.computed + count]
        return found
