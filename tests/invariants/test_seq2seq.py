"""The invariants over encoder-decoder targets: every method leaves the text, seeded and greedy, batched and ragged; and
unseeded requests have the distribution of the target, counted against transformers' own passes."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats

from foredraft import LLM, MemoryLimits, Sampling
from foredraft.drafters.registry import load_methods
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.tree import Commit, TokenTree
from foredraft.verification import rules
from foredraft.verification.noise import Noise
from foredraft.verification.probs import TargetProbs
from foredraft.verification.rule import Rule
from tests.support import tiny_seq2seq
from tests.support.seq2seq_cases import ENSEMBLES, MADE, OTHER_PAIR, Make, make_pair_factory

# Compositions are made of these. An exit from a decoder with cross-attention is refused, and so is one more layer of
# its class: tests/train/test_seq2seq_runs.py. Assistants are of decoder-only targets:
# tests/drafters/gemma4_assistant/test_assistant.py.
ELSEWHERE = {"compose", "early_exit", "gemma4_assistant", "mtp"}
TEXTS = MADE | ENSEMBLES


def test_every_method_is_here() -> None:
    assert {name.split(",")[0] for name in MADE} == set(load_methods()) - ELSEWHERE


@pytest.mark.parametrize("name", TEXTS)
def test_text_does_not_depend_on_the_draft(name: str) -> None:
    prompts = tiny_seq2seq.sources("t5", (5, 11, 7, 20, 9, 13))
    plain, sampling = tiny_seq2seq.plain(), Sampling(temperature=0.0, max_tokens=24)
    batch = [replace(sampling, max_tokens=most) for most in (24, 3, 20, 1, 24, 11)]
    limits = MemoryLimits(kv_tokens=16 * 5, max_batch=4)
    for params in (batch, [replace(s, temperature=1.0, seed=i, ignore_eos=True) for i, s in enumerate(batch)]):
        wanted = [c.token_ids for c in plain.generate(prompts, params)]
        for num_tokens, bounds in ((4, MemoryLimits()), (2, limits)):
            llm = LLM(tiny_seq2seq.t5(), None, limits=bounds, is_debug=True)
            llm = llm.with_drafter(TEXTS[name](llm, num_tokens))
            done = llm.generate(prompts, params)
            assert [c.token_ids for c in done] == wanted
            assert llm.engine.drafter.num_failures == 0
            assert name == "aggressive" or sum(c.stats.num_drafted for c in done) > 0


V, LENGTH = 6, 3  # tokens counted jointly; one more is sampled, so that a draft can reach beyond them
SOURCES = ([1, 2, 3, 1, 2], [5, 4, 4])
SAMPLING = Sampling(
    max_tokens=LENGTH + 1, temperature=0.9, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1, ignore_eos=True
)


@cache
def tiny() -> Any:
    model = tiny_seq2seq.make_model(
        "t5", seed=3, width=16, vocab=V, tie_word_embeddings=False, ids={"eos_token_id": None}
    )
    model.lm_head.weight.data *= 0.3  # flat enough that most texts have a chance
    return model


@cache
def compute_expected(which: int) -> dict[tuple[int, ...], float]:
    """Compute the probability of every sequence of LENGTH tokens, by transformers' forward pass over each prefix."""
    texts = list(itertools.product(range(V), repeat=LENGTH))
    result = dict.fromkeys(texts, 1.0)
    start = [tiny_seq2seq.START]
    for size in range(LENGTH):
        prefixes = list(itertools.product(range(V), repeat=size))
        decoded = torch.tensor([start + list(prefix) for prefix in prefixes])
        with torch.inference_mode():
            read = torch.tensor([SOURCES[which]] * len(prefixes))
            logits = tiny()(input_ids=read, decoder_input_ids=decoded).logits[:, -1]
        probs = distribution(logits, SAMPLING, [TokenHistory(start, prefix) for prefix in prefixes])
        rows = dict(zip(prefixes, probs.tolist(), strict=True))
        for text in texts:
            result[text] *= rows[text[:size]][text[size]]
    assert sum(result.values()) == pytest.approx(1)
    return result


def p_value(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> float:
    """Chi-square over the cells that expect five or more, the rest as one. A text of no probability fails outright."""
    total = sum(counts.values())
    assert all(probs[text] > 0 for text in counts), "a text of probability zero"
    large = [text for text in probs if probs[text] * total >= 5]
    observed, wanted = [counts[text] for text in large], [probs[text] * total for text in large]
    if total - sum(wanted) >= 5:
        observed, wanted = [*observed, total - sum(observed)], [*wanted, total - sum(wanted)]
    else:
        wanted = [w * sum(observed) / sum(wanted) for w in wanted]
    return float(stats.chisquare(observed, wanted).pvalue)


CASES = {
    "plain": (None, "reject"),
    "draft_model, reject": (OTHER_PAIR, "reject"),
    "draft_model, block": (OTHER_PAIR, "block"),
    "draft_model free tree, reject": (make_pair_factory(noise=1.0, tree_nodes=7, top_k=3), "reject"),
    "eagle, reject": (MADE["eagle"], "reject"),
    "aggressive, reject": (MADE["aggressive"], "reject"),
    "blockwise, block": (MADE["blockwise"], "block"),
    "blockwise, reject": (MADE["blockwise"], "reject"),
    "medusa tree, reject": (MADE["medusa, tree"], "reject"),
    **{f"{name}, reject": (make, "reject") for name, make in ENSEMBLES.items()},
}


def measure(make: Make | None, rule: str | Rule, rounds: int) -> float:
    """Count texts of both sources at once, and return the smaller p-value."""
    llm = LLM(tiny(), None, verify=rule)
    if make is not None:
        llm = llm.with_drafter(make(llm, 3), num_speculative_tokens=3)  # a fixed length, whatever is accepted
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    for _ in range(rounds):
        done = llm.generate([list(SOURCES[i % 2]) for i in range(512)], SAMPLING)
        for i, completion in enumerate(done):
            counts[i % 2][tuple(completion.token_ids[:LENGTH])] += 1
    assert llm.engine.drafter.num_failures == 0
    return min(p_value(counts[i], compute_expected(i)) for i in range(2))


@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_distribution_of_the_target(case: str) -> None:
    """Two sources at once: a row that read another's would have another distribution."""
    assert measure(*CASES[case], rounds=2) > 1e-6  # a false alarm once in half a million runs


@dataclass(frozen=True)
class OtherUniforms:
    """Noise whose uniforms of acceptance are changed."""

    noise: Noise
    change: Callable[[float], float]

    def get_key(self, row: int) -> int | None:
        return self.noise.get_key(row)

    def accept_uniform(self, b: int, node: int) -> float:
        return self.change(self.noise.accept_uniform(b, node))

    def sample_uniform(self, b: int, node: int) -> float:
        return self.noise.sample_uniform(b, node)

    def select(self, requests: Sequence[int], rows: torch.Tensor) -> "OtherUniforms":
        return OtherUniforms(self.noise.select(requests, rows), self.change)


def make_mutant(change: Callable[[float], float], sharpens_q: bool = False) -> Rule:
    def verify(tree: TokenTree, p: torch.Tensor | TargetProbs, noise: Noise) -> Commit:
        if sharpens_q and tree.q is not None:
            tree = replace(tree, q=tree.q**16 / (tree.q**16).sum(-1, keepdim=True).clamp_min(1e-30))
        return rules.reject(tree, p, OtherUniforms(noise, change))

    return replace(rules.REJECT, name="mutant", verify=verify)


OTHER_Q = "reads another q than that of the draft"
MUTANTS = {
    OTHER_Q: make_mutant(lambda u: u, sharpens_q=True),
    "accepts too much": make_mutant(lambda u: 0.1 * u),
    "rejects what it may": make_mutant(lambda u: 1 - 1e-12),
}
KILLERS = {"draft_model": OTHER_PAIR, **{name: TEXTS[name] for name in ("blockwise", "medusa, tree", *ENSEMBLES)}}
SELECTING = ("aggressive+blockwise", "aggressive+draft_model, sequence")  # stop to draft if nothing is accepted
NOT_KILLED = {
    *((name, "rejects what it may") for name in SELECTING),
    *((name, OTHER_Q) for name in KILLERS if name != "draft_model"),  # chains of heads are certain drafts, without q
}
KILLS = [(name, mutant) for name in KILLERS for mutant in MUTANTS if (name, mutant) not in NOT_KILLED]


@pytest.mark.parametrize(("name", "mutant"), KILLS)
def test_the_count_kills_faults_of_verification(name: str, mutant: str) -> None:
    assert measure(KILLERS[name], MUTANTS[mutant], rounds=2) < 1e-6


def test_the_count_tells_the_sources_apart() -> None:
    others = [replace(SAMPLING, seed=seed) for seed in range(700)]
    done = LLM(tiny(), None, verify="match").generate([list(SOURCES[0])] * len(others), others)
    texts = [tuple(completion.token_ids[:LENGTH]) for completion in done]
    assert p_value(Counter(text for text in texts if compute_expected(1)[text] > 0), compute_expected(1)) < 1e-6
