"""Acceptance of a drafter without forward passes of the target: verification is replayed along recorded sequences.

The target's own continuations are recorded once. The drafter then runs along them as in the engine. With the rule
`match`, or greedily, the target's token does not depend on the draft. A step therefore accepts the path of its tree
that agrees with the recording. With equal numerics the acceptance is that of a real run.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.kv.allocator import PageAllocator
from foredraft.llm import LLM
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.outputs import Stats
from foredraft.request import Batch, Request
from foredraft.request_spec import RequestSpec
from foredraft.sampling.params import Sampling
from foredraft.source import EncoderSource
from foredraft.train.prompts import TrainPrompt, get_ids, get_source
from foredraft.train.remote.tracer import make_tracer
from foredraft.tree import Commit, TokenTree
from foredraft.verification.rules import MATCH

REGIMES = {"greedy": 0.0, "sampled": 1.0}  # name -> temperature


@dataclass(frozen=True)
class RecordedSequence:
    """Prompt with the target's continuation under one sampling."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    seed: int
    source: EncoderSource | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.output


@dataclass(frozen=True)
class Recording:
    """Sequences of one sampling, and the target's hidden states along them."""

    sequences: tuple[RecordedSequence, ...]
    # Hidden layers -> one tensor [n, F] per sequence.
    _states: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)

    @classmethod
    def make(cls, llm: LLM, prompts: Sequence[TrainPrompt], temperature: float, num_tokens: int) -> "Recording":
        """Record the continuations of the target.

        Args:
            llm: Target, with any drafter or none.
            prompts: Every prompt, in token ids.
            temperature: Temperature; if positive, the index of a prompt is its seed.
            num_tokens: Maximum length of a continuation.
        """
        samplings = [Sampling(max_tokens=num_tokens, temperature=temperature, seed=i) for i in range(len(prompts))]
        plain = llm.with_drafter(None, verify="auto")
        outputs = plain.generate(list(prompts), samplings)
        triples = zip(prompts, outputs, samplings, strict=True)
        return cls(
            tuple(
                RecordedSequence(
                    tuple(get_ids(prompt)), tuple(output.token_ids), sampling, sampling.seed or 0, get_source(prompt)
                )
                for prompt, output, sampling in triples
            )
        )

    def compute_states(self, target: HFModel, hidden_layers: tuple[int, ...]) -> list[Tensor]:
        """Return the hidden states [n, F] after every token of every sequence; computed once per set of layers."""
        if hidden_layers not in self._states:
            tracer = make_tracer(target, hidden_layers, top=1)
            states = []
            for sequence in self.sequences:
                sources = () if sequence.source is None else (sequence.source,)
                features, _ = tracer.run_target(torch.tensor([sequence.tokens]), sources)
                states.append(features[0])
            self._states[hidden_layers] = states
        return self._states[hidden_layers]


@dataclass(frozen=True)
class ReplayMetrics:
    """Acceptance over many sequences."""

    acceptance_length: float  # tokens per forward pass of the target, bonus token included
    per_position: tuple[float, ...]  # share of the drafts that are accepted to depth i + 1

    @classmethod
    def from_stats(cls, stats: Iterable[Stats]) -> "ReplayMetrics":
        all_stats = list(stats)
        passes, drafts = sum(s.target_passes for s in all_stats), sum(s.num_drafts for s in all_stats)
        depth = max((len(s.accepted_at) for s in all_stats), default=0)
        accepted = [sum(s.accepted_at[i] for s in all_stats if i < len(s.accepted_at)) for i in range(depth)]
        length = sum(s.num_tokens for s in all_stats) / passes if passes else 0.0
        return cls(length, tuple(count / drafts for count in accepted) if drafts else ())


class Replay:
    """Replay of one drafter along one recording."""

    def __init__(self, llm: LLM, recording: Recording) -> None:
        """Prepare the replay, with its own scheduler.

        Args:
            llm: Target with the drafter; its engine is not changed.
            recording: Sequences to replay.

        Raises:
            ForedraftError: if the drafter needs the target's tokens after rejected drafts, which is not recorded.
        """
        engine = llm.engine.scheduler
        # Without a limit of time: a process that is paused meanwhile has no slow drafter.
        self.drafter = SandboxedDrafter(llm.drafter, llm.target.vocab_size, timeout=math.inf)
        spec = self.drafter.spec
        if spec.needs_target_argmax or spec.num_target_candidates:
            raise ForedraftError(f"{llm.drafter_name} needs the target's tokens after rejected drafts; run it instead")
        self.target = llm.target if spec.shares_target_kv else None
        allocator = PageAllocator(engine.allocator.num_pages, engine.allocator.page_size)
        self.scheduler = Scheduler(allocator, engine.limits)
        self.sequences: dict[Request, RecordedSequence] = {}
        self.transcripts: dict[Request, Transcript] = {}
        self.hidden_states: dict[Request, Tensor] = {}
        hidden_layers = spec.hidden_layers
        states = (
            recording.compute_states(llm.target, hidden_layers) if hidden_layers else [None] * len(recording.sequences)
        )
        for index, (sequence, sequence_states) in enumerate(zip(recording.sequences, states, strict=True)):
            request_spec = RequestSpec(
                tuple(sequence.prompt), sequence.sampling, sequence.seed,
                eos_ids=llm.end_ids, max_length=llm.target.context_length, rule=MATCH, source=sequence.source,
            )  # fmt: skip
            request = Request(slot=-1, spec=request_spec)
            self.sequences[request], self.transcripts[request] = sequence, Transcript(request, index)
            if sequence_states is not None:
                self.hidden_states[request] = sequence_states
            self.scheduler.add(request)

    @torch.inference_mode()
    def run(self) -> list[Stats]:
        """Replay all sequences and return their statistics in order."""
        while self.scheduler.has_work:
            self._step()
        return [transcript.build_stats() for transcript in self.transcripts.values()]

    def _step(self) -> None:
        self.drafter.forget(self.scheduler.preempt(self.scheduler.find_releases().preempted))
        batch = self.scheduler.schedule(self.drafter.spec.max_nodes, FixedLengthPolicy())
        tree = self.drafter.propose(batch)
        paths = [self._follow_sequence(batch, tree, b) for b in range(len(batch))]
        commit = Commit.from_lists([path for path, _ in paths], [tokens for _, tokens in paths])
        if self.hidden_states:
            commit = Commit.from_lists(commit.paths, commit.tokens, self._gather_features(batch, commit))
        if self.target is not None:
            self._write_kv(self.target, batch, commit)
        self.drafter.observe(batch, commit)
        self.scheduler.commit(batch, commit)
        for request in batch.requests:
            if self.transcripts[request].is_finished:
                self.drafter.forget(self.scheduler.finish(request))

    def _follow_sequence(self, batch: Batch, tree: TokenTree, b: int) -> tuple[list[int], list[int]]:
        """Return the accepted path through a request's chunk and draft, and the tokens that follow its nodes."""
        request, chunk = batch.requests[b], batch.num_new_tokens[b]
        recorded, transcript = self.sequences[request].tokens, self.transcripts[request]
        position = request.num_computed + chunk  # position of the successor of the root
        path, tokens = list(range(chunk)), list(recorded[request.num_computed + 1 : position])
        if not batch.needs_logits[b]:
            return path, [*tokens, recorded[position]]
        draft_tokens, children, node, num_accepted = tree.tokens[b], tree.children[b], 0, 0
        while True:
            tokens.append(recorded[position])
            is_finished = transcript.push(recorded[position])
            child = next((child for child in children[node] if draft_tokens[child] == recorded[position]), None)
            num_accepted += child is not None
            if child is None or is_finished:
                break
            path.append(chunk - 1 + child)
            node, position = child, position + 1
        transcript.stats_recorder.record_step(tree.sizes[b] - 1, num_accepted, 0.0)
        return path, tokens

    def _write_kv(self, target: HFModel, batch: Batch, commit: Commit) -> None:
        """Write the KV of the target that its forward pass would have left, for a drafter that reads it."""
        spans = []
        for request, count in zip(batch.requests, commit.counts, strict=True):
            tokens = self.sequences[request].tokens[request.num_computed : request.num_computed + count]
            source, num_settled = request.spec.source, count - 1
            spans.append(
                Span(request.pages, request.num_computed, tokens, range(count), source=source, num_settled=num_settled)
            )
        target.forward(ForwardBatch.build(spans, [0], batch.page_size, target.device))

    def _gather_features(self, batch: Batch, commit: Commit) -> Tensor:
        """Return the recorded hidden states [B, P, F] at the positions of the commit."""
        example = self.hidden_states[batch.requests[0]]
        features = example.new_zeros(len(batch), max(commit.counts), example.shape[-1])
        for b, (request, count) in enumerate(zip(batch.requests, commit.counts, strict=True)):
            features[b, :count] = self.hidden_states[request][request.num_computed : request.num_computed + count]
        return features
