"""A language model of one table and faulty drafters: enough of an engine's surroundings for fast tests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec, MissedStates, TokenSteps
from foredraft.engine.engine import Engine
from foredraft.engine.scheduler import SchedulerLimits
from foredraft.engine.transcript import Transcript
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.outputs import Completion, Delta
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, TokenTree
from foredraft.verification.registry import RULES
from tests.support.requests import make_request

PERIOD = 5


@dataclass
class TableLM:
    """Logits after a token are a row of a table, chosen by the token and by its position modulo PERIOD.

    Without attention there is nothing to recompute, and yet a wrong position, parent or token shows at once.
    """

    table: Tensor  # [V * PERIOD, V]
    context_length: int = 1 << 20
    pool: KVPool = field(default_factory=KVPool)
    poison: frozenset[int] = frozenset()  # tokens after which every logit is NaN
    num_passes: int = 0

    @classmethod
    def from_seed(cls, vocab_size: int, seed: int = 0, sharpness: float = 3.0) -> "TableLM":
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(vocab_size * PERIOD, vocab_size, generator=generator, dtype=torch.float64)
        return cls(rows * sharpness)

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def perturb(self, noise: float, seed: int = 1) -> "TableLM":
        """Make a model that mostly agrees."""
        generator = torch.Generator().manual_seed(seed)
        return TableLM(self.table + noise * torch.randn(self.table.shape, generator=generator, dtype=torch.float64))

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        self.num_passes += 1
        tokens, positions = (
            forward_batch.tokens[0][forward_batch.logit_rows],
            forward_batch.positions[0][forward_batch.logit_rows],
        )
        logits = self.table[tokens * PERIOD + positions % PERIOD]
        if self.poison:
            logits[torch.isin(tokens, torch.tensor(sorted(self.poison)))] = torch.nan
        return logits, torch.zeros(forward_batch.num_rows, len(hidden_layers)) if hidden_layers else None

    def compute_logits(self, tokens: Sequence[int]) -> Tensor:
        """[V] logits after a whole text, for the oracle: no window, no batch."""
        return self.table[tokens[-1] * PERIOD + (len(tokens) - 1) % PERIOD]


def make_drafter(lm: TableLM, num_tokens: int, branching: tuple[int, ...] | None = None) -> DraftModel:
    return DraftModel(
        lm,
        DrafterContext(vocab_size=lm.vocab_size, num_speculative_tokens=num_tokens),
        TreeOptions(branching=branching),
    )


def make_engine(
    target: TableLM,
    drafter: Drafter | None,
    num_pages: int = 4000,
    clock: Callable[[], float] = time.perf_counter,
    **limits: int,
) -> Engine:
    """Pages of four tokens, so that every text crosses some."""
    allocator, device = PageAllocator(num_pages, 4), torch.device("cpu")
    return Engine(target, drafter, allocator, SchedulerLimits(**limits), device, clock, is_debug=True)


def make_transcript(
    prompt: list[int],
    sampling: Sampling,
    index: int = 0,
    tokenizer: object = None,
    verify: str = "match",
    eos_ids: Sequence[int] = (),
    max_length: int = 1 << 20,
) -> Transcript:
    seed = index if sampling.seed is None else sampling.seed
    request = make_request(
        -1, prompt, sampling, seed, eos_ids=frozenset(eos_ids), max_length=max_length, rule=RULES[verify]
    )
    return Transcript(request, index, tokenizer)


def run(engine: Engine, transcripts: Sequence[Transcript]) -> list[tuple[Completion, list[Delta]]]:
    """Run all transcripts to their end; the engine is idle and empty afterwards."""
    for transcript in transcripts:
        engine.add(transcript)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.allocator.num_used == 0
    assert not engine.transcripts
    results = []
    for transcript in transcripts:
        deltas = list(transcript.deltas)
        completion = deltas[-1].completion
        assert completion is not None
        assert all(delta.completion is None for delta in deltas[:-1])
        results.append((completion, deltas))
    return results


@dataclass
class ScriptedDrafter:
    """Drafter whose methods are given by the test."""

    proposal: Callable[[Batch], TokenTree]
    max_nodes: int = 4
    hidden_layers: tuple[int, ...] = ()
    observed: list[Commit] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    on_forget: Callable[[Sequence[int]], None] = lambda slots: None
    on_observe: Callable[[Batch, Commit], None] = lambda batch, commit: None
    num_proposed: int = 0
    needs_target_argmax: bool = False
    reads_commits: bool = True
    reads_plain_commits: bool = True
    missed_states: MissedStates = "forbidden"
    token_steps: TokenSteps = "all"

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            self.max_nodes, self.hidden_layers, self.needs_target_argmax,
            reads_commits=self.reads_commits, reads_plain_commits=self.reads_plain_commits,
            missed_states=self.missed_states, token_steps=self.token_steps,
        )  # fmt: skip

    def propose(self, batch: Batch) -> TokenTree:
        self.num_proposed += 1
        return self.proposal(batch)

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.observed.append(commit)
        self.on_observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self.forgotten += slots
        self.on_forget(slots)


def draft_greedily(lm: TableLM, batch: Batch, length: int = 3) -> TokenTree:
    """Draft the target's own greedy continuation, as far as every budget allows."""
    drafts = []
    for request, budget in zip(batch.requests, batch.granted_nodes, strict=True):
        tokens = list(request.tokens)
        for _ in range(min(length, budget)):
            tokens.append(int(lm.compute_logits(tokens).argmax()))
        drafts.append(Draft.from_chain(tokens[request.num_tokens :]))
    return to_token_tree(batch, dict(enumerate(drafts)))
