"""Steps of engines with recurrent models: requests and limits of the tests, drafts that are partly right, and states
compared with those of a fresh pass."""

import random

import torch
from torch import Tensor

from foredraft import LLM, Completion, MemoryLimits, Sampling
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.engine.engine import Engine
from foredraft.kv.state_pool import StatePool
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.request import Batch, Request
from foredraft.tree import TokenTree
from tests.support import engine_fakes
from tests.support.engine_fakes import ScriptedDrafter, make_transcript
from tests.support.families import VOCAB, tokens
from tests.support.hybrids import make_hybrid, make_native_hybrid

LENGTH = 14
PROMPTS = [[5, 9, 7, 11, 5, 9, 7, 11, 5, 9], tokens(27, seed=1), tokens(3, seed=2), [5, 9] * 6, tokens(27, seed=1)[:20]]
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
LIMITS = MemoryLimits(kv_tokens=96, page_size=4, max_batch=3, max_step_tokens=24)  # with preemptions and chunks
ROOMY = MemoryLimits(kv_tokens=400, page_size=4)
CHAIN, TREE = {"method": "draft_model"}, {"method": "draft_model", "branching": [2, 2, 1]}


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def check_only_cached_states(llm: LLM) -> None:
    """An idle engine has states after the ends of cached pages alone."""
    for pool in llm.target.pool.state_pools:
        table = pool.get_table(LIMITS.page_size)
        assert table.num_used == table.num_page_ends <= pool.max_page_ends
        assert all(llm.engine.scheduler.allocator.is_cacheable(page) for page in table.list_pages())


def make_engine_with_drafts(lm: HFModel, rng: random.Random) -> tuple[Engine, HFModel]:
    predictor = Predictor(lm)
    drafter = ScriptedDrafter(lambda batch: draft_at_random(predictor, batch, rng), max_nodes=6)
    engine = engine_fakes.make_engine(lm, drafter, num_pages=26, max_batch=4, max_step_tokens=40)
    return engine, lm


class Predictor:
    """Greedy tokens of a model, from passes over all tokens."""

    def __init__(self, lm: HFModel) -> None:
        self.lm = lm
        self.next_tokens: dict[tuple[int, ...], int] = {}

    def predict(self, prefix: tuple[int, ...]) -> int:
        if prefix not in self.next_tokens:
            self.next_tokens[prefix] = int(compute_fresh_state(self.lm, prefix)[1].argmax())
        return self.next_tokens[prefix]


def draft_at_random(predictor: Predictor, batch: Batch, rng: random.Random) -> TokenTree:
    """Draft trees in which a random node of every level is the right token, until a random depth."""
    drafts = {}
    for b in batch.find_drafting():
        request = batch.requests[b]
        known = list(request.tokens)
        nodes: list[int] = []
        parents: list[int] = []
        parent = 0
        while len(nodes) < min(batch.granted_nodes[b], 5) and rng.random() < 0.75:
            right = predictor.predict(tuple(known))
            level = [right, (right + 1 + rng.randrange(VOCAB - 2)) % VOCAB][: rng.choice((1, 1, 2))]
            rng.shuffle(level)
            level = level[: batch.granted_nodes[b] - len(nodes)]
            if right not in level:
                break
            first = len(nodes) + 1
            nodes += level
            parents += [parent] * len(level)
            parent = first + level.index(right)
            known.append(right)
        if nodes:
            drafts[b] = Draft(tuple(nodes), tuple(parents))
    return to_token_tree(batch, drafts)


def compute_fresh_state(lm: HFModel, prefix: tuple[int, ...]) -> tuple[StatePool, Tensor]:
    """The states and logits after a prefix, computed at once in empty memory. The state has the last id."""
    fresh = lm.with_new_kv()
    pages = range(1, 2 + len(prefix) // 4)
    span = Span(pages, 0, list(prefix), range(len(prefix)), num_settled=len(prefix) - 1)
    logits, _ = fresh.forward(ForwardBatch.from_spans([span], 4, "cpu", last_only=True))
    assert fresh.pool.states is not None
    return fresh.pool.states, logits[0]


def check_states(lm: HFModel, request: Request) -> None:
    """The state of a request is that of a fresh pass over its computed tokens, bit by bit in native code."""
    computed = tuple(request.get_tokens(0, request.num_computed))
    if not computed:
        return
    assert lm.pool.states is not None
    state = lm.pool.states.get_table(4).find(request.pages, len(computed))
    fresh, _ = compute_fresh_state(lm, computed)
    last = fresh.get_table(4).find(range(1, 2 + len(computed) // 4), len(computed))
    for key, tensor in lm.pool.states.tensors.items():
        max_error = 0.0 if lm.runs_native else 1e-12
        assert (tensor[state] - fresh.tensors[key][last]).abs().max() <= max_error, (key, len(computed))


@torch.inference_mode()
def run_random_steps(family: str, num_steps: int, check_every: int, is_native: bool = False) -> None:
    rng = random.Random(family)
    shared = make_native_hybrid(family) if is_native else make_hybrid(family)[1]
    engine, lm = make_engine_with_drafts(shared.with_new_kv(), rng)
    made, num_aborted, num_accepted = 0, 0, 0
    for step in range(num_steps):
        while len(engine.transcripts) < 6:
            prompt = PROMPTS[made % len(PROMPTS)] + ([] if made % 3 else tokens(1 + made % 5, seed=made))
            sampling = Sampling(temperature=0, max_tokens=rng.randint(4, 30), ignore_eos=True)
            engine.add(make_transcript(prompt, sampling, made))
            made += 1
        report = engine.step().report
        num_accepted += sum(len(outcome.accepted_nodes) for outcome in report.outcomes) if report else 0
        if rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.transcripts)))
            num_aborted += 1
        if step % check_every == 0:
            for request in engine.scheduler.running:
                check_states(lm, request)
    assert engine.scheduler.num_preempted >= num_steps // 50, "the pool was too large to preempt"
    assert num_aborted >= num_steps // 100
    assert num_accepted > num_steps // 2
    for request in list(engine.transcripts):
        engine.abort(request)
    engine.memory.states.check_integrity([])
    assert engine.scheduler.prefix_hits > 0
