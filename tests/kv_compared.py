"""A random life of requests under speculation, and the KV they leave compared with a recomputation.

The reference is transformers' own attention and cache over the committed tokens: no page, no tree, no window of ours.
Shared by `tests/laws/test_kv.py` and `benchmarks/kv_equality.py`.
"""

import copy
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import models_made
from foredraft import Sampling
from foredraft.drafters.draft_model import DraftModel
from foredraft.engine.output import Transcript
from foredraft.kv.pool import KVPool
from foredraft.llm import LLM, MemoryLimits
from foredraft.request import Request

LIMITS = MemoryLimits(kv_tokens=116, page_size=4, max_batch=5, max_step_tokens=40)


@dataclass
class Tally:
    """What happened, so that a test can insist that enough did; and the largest difference seen."""

    steps: int = 0
    accepted: int = 0
    rejected: int = 0
    aborted: int = 0
    finished: int = 0
    preempted: int = 0
    compared: int = 0  # tokens whose draft KV was held valid and compared
    difference: float = 0.0


class Life:
    """Steps an engine by hand: requests arrive, draft, are accepted, rejected, preempted, aborted, and end."""

    def __init__(self, branching: tuple[int, ...] | None, num_tokens: int, verify: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.drafter: DraftModel = models_made.draft_model(num_tokens, branching)
        self.llm: LLM = models_made.limited(models_made.plain(), self.drafter, LIMITS, verify, max_chunk=7)
        self.references = [_reference(models_made.target()), _reference(models_made.draft())]
        self.transcripts: list[Transcript] = []
        self.tally = Tally()

    @property
    def engine(self):
        return self.llm.engine

    def step(self) -> None:
        """One step of the engine after whatever else may happen between two, then the comparison."""
        while len(self.transcripts) < 4:
            self._arrive()
        if self.random.random() < 0.04:
            self._abort(self.random.choice(self.transcripts))
        for transcript in self.transcripts:  # draft lengths vary, down to none while the others draft or none does
            transcript.request.num_drafts = self.random.choice([None, None, None, 0, 1, 3])
        if self.random.random() < 0.15:
            for transcript in self.transcripts:
                transcript.request.num_drafts = 0
        self.engine.step()
        self.tally.steps += 1
        self.tally.preempted = self.engine.scheduler.num_preempted
        for transcript in [t for t in self.transcripts if t.is_finished]:
            self._leave(transcript)
            self.tally.finished += 1
        self.compare()

    def compare(self) -> None:
        """Every layer, keys and values, of target and draft, for every running request."""
        for request in self.engine.scheduler.running:
            valid = self.drafter.valid.get(request.slot, 0)
            assert valid <= request.num_tokens, "draft KV beyond the committed tokens"
            self._compare(self.references[0], self.llm.target.pool, request, request.computed)
            self._compare(self.references[1], self.drafter.lm.pool, request, valid)
            self.tally.compared += valid

    def _compare(self, reference: LlamaForCausalLM, pool: KVPool, request: Request, length: int) -> None:
        if not length:
            return
        size = LIMITS.page_size
        slots = torch.tensor([request.pages[i // size] * size + i % size for i in range(length)])
        for layer, expected in enumerate(_recomputed(reference, request.tokens[:length])):
            for held, wanted in zip(pool.layers[layer], expected, strict=True):
                self.tally.difference = max(self.tally.difference, float((held[slots] - wanted).abs().max()))

    def _arrive(self) -> None:
        r = self.random
        prompt = [r.randrange(4, models_made.VOCAB) for _ in range(r.choice([1, 2, 9, 30]))]
        sampling = Sampling(
            max_tokens=r.randint(2, 40), temperature=r.choice([0, 0.7, 1.0]), seed=r.randrange(1 << 60), top_p=0.9
        )
        request = Request(-1, prompt, sampling, sampling.seed or 0, verify=self.llm.verify, max_length=100)
        transcript = Transcript(request, 0)
        self.engine.add(transcript)
        self.transcripts.append(transcript)

    def _abort(self, transcript: Transcript) -> None:
        self.engine.abort(transcript.request)
        self._leave(transcript)
        self.tally.aborted += 1

    def _leave(self, transcript: Transcript) -> None:
        self.transcripts.remove(transcript)
        self.tally.accepted += transcript.num_accepted
        self.tally.rejected += transcript.num_drafted - transcript.num_accepted


def _reference(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights under transformers' own attention."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("sdpa")
    return own


@torch.inference_mode()
def _recomputed(model: LlamaForCausalLM, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """[layer] -> ([L, H, D] keys, values) of one plain forward pass."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def lived(steps: int, branching: tuple[int, ...] | None, num_tokens: int, verify: str, seed: int) -> Tally:
    life = Life(branching, num_tokens, verify, seed)
    for _ in range(steps):
        life.step()
    return replace(life.tally)
