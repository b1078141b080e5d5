"""Acceptance of a drafter without forward passes of the target: verification replayed along recorded sequences.

The target's own continuations are written once. The drafter is then stepped along them exactly as the engine would:
under `match`, and greedily, the target says what it said, whatever is drafted, so a step keeps the path of its tree
that agrees with the text. With the same numerics the figures are those of a real run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.kv.allocator import PageAllocator
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.outputs import Stats
from foredraft.request import Batch, Request
from foredraft.train.trace import Tracer
from foredraft.tree import Commit, TokenTree

REGIMES = {"greedy": 0.0, "sampled": 1.0}  # by temperature


@dataclass(frozen=True)
class RecordedSequence:
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

    sequences: tuple[RecordedSequence, ...]
    _states: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)  # by taps

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int) -> "Recording":
        """The target's own continuations; sampled ones have the number of the prompt as their seed."""
        samplings = [Sampling(max_tokens=num_tokens, temperature=temperature, seed=i) for i in range(len(prompts))]
        plain = llm.with_drafter(None, verify="auto")
        done = plain.generate([list(prompt) for prompt in prompts], samplings)
        triples = zip(prompts, done, samplings, strict=True)
        return cls(tuple(RecordedSequence(tuple(p), tuple(c.token_ids), s, s.seed or 0) for p, c, s in triples))

    def compute_states(self, target: HFModel, hidden_layers: tuple[int, ...]) -> list[Tensor]:
        """[n, F] after every token of every text."""
        if hidden_layers not in self._states:
            tracer = Tracer(target, hidden_layers, top=1)
            found = []
            for text in self.sequences:
                features, _ = tracer.run_target(torch.tensor([text.tokens]))
                found.append(features[0])
            self._states[hidden_layers] = found
        return self._states[hidden_layers]


@dataclass(frozen=True)
class ReplayMetrics:
    """Acceptance over many sequences."""

    acceptance_length: float  # tokens per target pass, bonus included
    per_position: tuple[float, ...]  # drafts kept to depth i + 1 over all drafts

    @classmethod
    def from_stats(cls, stats: Iterable[Stats]) -> "ReplayMetrics":
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
        self.drafter = SandboxedDrafter(llm.drafter, llm.target.vocab_size)
        if self.drafter.needs_target_argmax:
            raise ForedraftError(f"{llm.drafter_name} learns from what the target says to its guesses; run it instead")
        self.target = llm.target if getattr(llm.drafter, "shares_target_kv", False) else None
        allocator = PageAllocator(engine.allocator.num_pages, engine.allocator.page_size)
        self.scheduler = Scheduler(allocator, engine.limits, self.drafter.forget)
        self.sequences: dict[Request, RecordedSequence] = {}
        self.transcripts: dict[Request, Transcript] = {}
        self.hidden_states: dict[Request, Tensor] = {}
        taps = self.drafter.hidden_layers
        states = recording.compute_states(llm.target, taps) if taps else [None] * len(recording.sequences)
        for index, (text, own) in enumerate(zip(recording.sequences, states, strict=True)):
            request = Request(
                slot=-1, prompt=list(text.prompt), sampling=text.sampling, seed=text.seed, eos_ids=llm.end_ids,
                max_length=llm.target.context_length, verify="match",
            )  # fmt: skip
            self.sequences[request], self.transcripts[request] = text, Transcript(request, index)
            if own is not None:
                self.hidden_states[request] = own
            self.scheduler.add(request)

    @torch.inference_mode()
    def run(self) -> list[Stats]:
        """Figures of every text, in order."""
        while self.scheduler.has_work:
            self._step()
        return [transcript.build_stats() for transcript in self.transcripts.values()]

    def _step(self) -> None:
        batch = self.scheduler.schedule(self.drafter.max_nodes, FixedLengthPolicy())
        tree = self.drafter.propose(batch)
        walks = [self._follow_sequence(batch, tree, b) for b in range(len(batch))]
        commit = Commit.from_lists([path for path, _ in walks], [tokens for _, tokens in walks])
        if self.hidden_states:
            commit = Commit(commit.path_lists, commit.token_lists, features=self._gather_features(batch, commit))
        if self.target is not None:
            self._write_kv(self.target, batch, commit)
        self.drafter.observe(batch, commit)
        self.scheduler.commit(batch, commit)
        for request in batch.requests:
            if self.transcripts[request].is_finished:
                self.scheduler.finish(request)

    def _follow_sequence(self, batch: Batch, tree: TokenTree, b: int) -> tuple[list[int], list[int]]:
        """The path through a request's chunk and draft that its text takes, and the tokens that follow its nodes."""
        request, chunk = batch.requests[b], batch.num_new_tokens[b]
        text, transcript = self.sequences[request].tokens, self.transcripts[request]
        at = request.num_computed + chunk  # the place in the text that the root's successor has
        path, tokens = list(range(chunk)), list(text[request.num_computed + 1 : at])
        if not batch.needs_logits[b]:
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
        transcript.record_step(tree.sizes[b] - 1, num_accepted, 0.0)
        return path, tokens

    def _write_kv(self, target: HFModel, batch: Batch, commit: Commit) -> None:
        """Write the target's KV that a forward pass would have left, for a drafter that reads it."""
        spans = []
        for request, count in zip(batch.requests, commit.counts, strict=True):
            tokens = self.sequences[request].tokens[request.num_computed : request.num_computed + count]
            spans.append(Span(request.pages, request.num_computed, tokens, range(count)))
        target.forward(ForwardBatch.build(spans, [0], batch.page_size, target.device))

    def _gather_features(self, batch: Batch, commit: Commit) -> Tensor:
        """[B, P, F]: along the text, so those of its own positions."""
        first = self.hidden_states[batch.requests[0]]
        found = first.new_zeros(len(batch), max(commit.counts), first.shape[-1])
        for b, (request, count) in enumerate(zip(batch.requests, commit.counts, strict=True)):
            found[b, :count] = self.hidden_states[request][request.num_computed : request.num_computed + count]
        return found
