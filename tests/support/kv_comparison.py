"""A random life of requests under speculation, and the KV they leave compared with a recomputation.

The reference is transformers' own attention and cache over the committed tokens, without pages, trees or batches.
For heads it is their network over whole texts, with the states that transformers gives, without memory between
steps. Shared by `tests/invariants/test_kv.py` and `benchmarks/kv_equality.py`.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from foredraft import Sampling
from foredraft.drafters.common.feature_drafter import FeatureDrafter
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.dflash.drafter import DFlash
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.interface import Drafter
from foredraft.engine.transcript import Transcript
from foredraft.kv.pool import KVPool
from foredraft.llm import LLM, MemoryLimits
from foredraft.models.draft_layer import attend_causal
from foredraft.request import Request
from tests.support import tiny_models
from tests.support.requests import change_options, make_request
from tests.support.tiny_heads import HeadCase

LIMITS = MemoryLimits(kv_tokens=116, page_size=4, max_batch=5, max_step_tokens=40)


@dataclass
class KVTally:
    """Counts of events, so that a test can require enough of each, and the largest difference."""

    steps: int = 0
    accepted: int = 0
    rejected: int = 0
    aborted: int = 0
    finished: int = 0
    preempted: int = 0
    found: int = 0  # tokens that were taken from the prefix cache
    compared: int = 0  # tokens whose draft KV counted as valid and was compared
    difference: float = 0.0


class KVSimulation:
    """Steps an engine by hand: requests arrive, draft, are accepted, rejected, preempted, aborted, and end."""

    def __init__(self, drafter: Drafter, verify: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.drafter = drafter
        self.llm: LLM = tiny_models.limit_memory(tiny_models.plain(), drafter, LIMITS, verify, max_chunk=7)
        self.references = [_make_reference(tiny_models.target()), _make_reference(tiny_models.draft())]
        self.transcripts: list[Transcript] = []
        self.tally = KVTally()

    @property
    def engine(self):
        return self.llm.engine

    def step(self) -> None:
        """Run one step of the engine after random events, then compare."""
        while len(self.transcripts) < 4:
            self._add_request()
        if self.random.random() < 0.07:
            self._abort(self.random.choice(self.transcripts))
        for transcript in self.transcripts:  # draft lengths vary, down to none while the others draft or none does
            length = self.random.choice([None, None, None, 0, 1, 3])
            change_options(transcript.request, num_speculative_tokens=length)
        if self.random.random() < 0.15:
            for transcript in self.transcripts:
                change_options(transcript.request, num_speculative_tokens=0)
        self.engine.step()
        self.tally.steps += 1
        self.tally.preempted = self.engine.scheduler.num_preempted
        self.tally.found = self.engine.scheduler.prefix_hits
        for transcript in [t for t in self.transcripts if t.is_finished]:
            self._remove_request(transcript)
            self.tally.finished += 1
        self.compare()

    def compare(self) -> None:
        """Compare every layer, keys and values, of target and draft, for every running request."""
        for request in self.engine.scheduler.running:
            if request.num_computed:
                expected = _recompute_kv(self.references[0], request.tokens[: request.num_computed])
                self._compare(expected, self.llm.target.pool, request)
            self.tally.compared += self.compare_draft(request)

    def compare_draft(self, request: Request) -> int:
        """Compare the drafter's memory of a request; returns its number of tokens."""
        assert isinstance(self.drafter, DraftModel)
        valid = self.drafter.num_valid.get(request.slot, 0)
        assert valid <= request.num_tokens, "draft KV beyond the committed tokens"
        if valid:
            expected = _recompute_kv(self.references[1], request.tokens[:valid])
            self._compare(expected, self.drafter.lm.pool, request)
        return valid

    def _compare(self, expected: list[tuple[Tensor, Tensor]], pool: KVPool, request: Request) -> None:
        """Compare [layer] -> ([L, H, D] keys, values) with the first L positions of a request in the pool."""
        size, length = LIMITS.page_size, len(expected[0][0])
        slots = torch.tensor([request.pages[i // size] * size + i % size for i in range(length)])
        for layer, one in enumerate(expected):
            for held, wanted in zip(pool.layers[layer], one, strict=True):
                self._record_difference(held[slots], wanted)

    def _record_difference(self, held: Tensor, wanted: Tensor) -> None:
        self.tally.difference = max(self.tally.difference, float((held - wanted).abs().max()))

    def _add_request(self) -> None:
        r = self.random
        prompt = [r.randrange(4, tiny_models.VOCAB) for _ in range(r.choice([1, 2, 9, 30]))]
        shared = r.choice([0, 0, 8, 17])  # of one text that many begin with, to a page's end and beyond
        prompt[:shared] = range(4, 4 + shared)
        sampling = Sampling(
            max_tokens=r.randint(2, 40), temperature=r.choice([0, 0.7, 1.0]), seed=r.randrange(1 << 60), top_p=0.9
        )
        request = make_request(-1, prompt, sampling, sampling.seed or 0, rule=self.llm.rule, max_length=100)
        transcript = Transcript(request, 0)
        self.engine.add(transcript)
        self.transcripts.append(transcript)

    def _abort(self, transcript: Transcript) -> None:
        self.engine.abort(transcript.request)
        self._remove_request(transcript)
        self.tally.aborted += 1

    def _remove_request(self, transcript: Transcript) -> None:
        self.transcripts.remove(transcript)
        stats = transcript.build_stats()
        self.tally.accepted += stats.num_accepted
        self.tally.rejected += stats.num_drafted - stats.num_accepted


class HeadKVSimulation(KVSimulation):
    """A simulation for a head on the target's states: compares its memory and the logits at its last true pair."""

    @torch.inference_mode()
    def compare_draft(self, request: Request) -> int:
        made = self.drafter
        assert isinstance(made, FeatureDrafter)
        assert made._count_observed_pairs(request.slot) == request.num_computed, (
            "pairs were missed, or seen that are not committed"
        )
        if self.random.random() < 0.3:  # what was put off may wait, or be read now
            made._compute_pending([request.slot])
        n, root = made.draft_kv.num_valid.get(request.slot, 0), made._root_outputs.get(request.slot)
        if not n:
            return 0
        expected, logits, following = _recompute_head(made, self.references[0], request.tokens[: n + 1])
        self._compare(expected, made.lm.pool, request)
        if root is not None:
            self._record_difference(root.feature, following[-1:])
            self._record_difference(root.logits, logits[-1:])
        return n


class ContextKVSimulation(KVSimulation):
    """A simulation for a head whose memory is one row per state of the target."""

    @torch.inference_mode()
    def compare_draft(self, request: Request) -> int:
        made = self.drafter
        assert isinstance(made, DFlash)
        assert made.rows.count_rows(request.slot) == request.num_computed, "states were missed, or rejected ones kept"
        if self.random.random() < 0.3:  # what was put off may wait, or be written now
            made.rows.write_pending([request.slot])
        n = made.rows.draft_kv.num_valid.get(request.slot, 0)
        if n:
            features = _compute_states(self.references[0], request.tokens[:n], made.spec.hidden_layers)
            rows = made.network.compute_context(features, torch.arange(n)[None])
            self._compare([(keys[0], values[0]) for keys, values in rows], made.rows.draft_kv.pool, request)
        return n


def _compute_states(target: LlamaForCausalLM, tokens: list[int], boundaries: Sequence[int]) -> Tensor:
    """Compute the states [1, L, F] of a text at some boundaries."""
    states = target(torch.tensor([tokens], device=target.device), output_hidden_states=True).hidden_states
    return torch.cat([states[boundary] for boundary in boundaries], -1)


@torch.inference_mode()
def _recompute_head(
    made: FeatureDrafter, target: LlamaForCausalLM, tokens: list[int]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Compute a head's memory, logits and next features over the pairs of a text: token t + 1 with the state at t."""
    features = made.lm.network.project_features(_compute_states(target, tokens[:-1], made.spec.hidden_layers))
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.append((key[0], value[0]))
        return attend_causal(layer, query, key, value)

    positions = torch.arange(len(tokens) - 1)[None]
    states, following = made.lm.network(torch.tensor([tokens[1:]]), features, positions, attend)
    return kept, made.lm.network.compute_logits(states[0]), following[0]


def _make_reference(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Load the same weights under transformers' own attention."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("sdpa")
    return own


@torch.inference_mode()
def _recompute_kv(model: LlamaForCausalLM, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """[layer] -> ([L, H, D] keys, values) of one plain forward pass."""
    cache = DynamicCache(config=model.config)
    # the fourth argument: its name is past_key_values before transformers 5.24
    model(torch.tensor([tokens], device=model.device), None, None, cache, use_cache=True)
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def simulate_draft_model(
    steps: int, branching: tuple[int, ...] | TreeOptions | None, num_tokens: int, verify: str, seed: int
) -> KVTally:
    """Under a draft model."""
    options = branching if isinstance(branching, TreeOptions) else TreeOptions(branching=branching)
    return _run_simulation(KVSimulation(tiny_models.draft_model(num_tokens, options=options), verify, seed), steps)


def simulate_head(head: HeadCase, steps: int, num_tokens: int, verify: str, seed: int, **options: object) -> KVTally:
    """Under a head. Its options are those of its drafter."""
    drafter = head.make_drafter(num_tokens, **options)
    simulation = HeadKVSimulation if isinstance(drafter, FeatureDrafter) else ContextKVSimulation
    return _run_simulation(simulation(drafter, verify, seed), steps)


def _run_simulation(life: KVSimulation, steps: int) -> KVTally:
    for _ in range(steps):
        life.step()
    assert life.engine.drafter.num_failures == 0
    return replace(life.tally)
