"""The distribution of whole texts out of the whole engine: unseeded requests in batches, counted against enumeration.

The rules have exact tests of their own; this one guards what lies between them: uniforms or draft noise shared between
requests, steps or positions, a q that is not the sampled distribution, penalties of the wrong history, a bonus token of
the wrong row, a draft length that carries information about the draft, and trees that drop sampled tokens.
"""

import itertools
import os
from collections import Counter
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.blockwise import method as blockwise
from foredraft.drafters.draft_model import method as draft_model
from foredraft.drafters.eagle import method as eagle
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.hydra import method as hydra
from foredraft.drafters.interface import Drafter
from foredraft.drafters.medusa import method as medusa
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.mlp_speculator import method as mlp_speculator
from foredraft.drafters.ngram_lm import method as ngram_lm
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.models.hf import HFModel
from foredraft.sampling.distribution import TokenHistory, distribution
from tests.support import tiny_models
from tests.support.devices import TEST_DEVICE, TEST_DTYPE

V = 6
LENGTH = 3  # tokens counted jointly; one more is sampled, so that a draft can reach beyond them
PROMPT = [1, 2, 3, 1, 2]
SAMPLING = Sampling(
    max_tokens=LENGTH + 1, temperature=0.9, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1, ignore_eos=True
)


@cache
def model() -> LlamaForCausalLM:
    made = tiny_models.llama(V, seed=3, hidden=16)
    made.lm_head.weight.data *= 0.6  # flat enough that most texts have a chance
    return made


@cache
def plain() -> LLM:
    return LLM(model(), None)


def _context() -> DrafterContext:
    return DrafterContext(
        vocab_size=V, target=plain().target, num_speculative_tokens=3, dtype=TEST_DTYPE, device=TEST_DEVICE
    )


def _draft_model(seed: int = 1, **options: Any) -> Drafter:
    lm = HFModel.wrap_model(tiny_models.perturb(model(), 0.3, seed), "draft")
    return draft_model.DraftModel(lm, _context(), draft_model.Config(**options))


def _merge(*drafters: Drafter) -> Drafter:
    parts = [EnsembleMember(str(i), drafter, SandboxedDrafter(drafter, V)) for i, drafter in enumerate(drafters)]
    return EnsembleDrafter(parts, "merge", "merged")


def _ngram_lm() -> Drafter:
    return ngram_lm.create(ngram_lm.Config(min_confidence=0.05), _context())


def _head(module: ModuleType, training: dict[str, Any], **options: Any) -> Drafter:
    """Make an untrained head and add noise: it has a different distribution after every path."""
    network = module.create_trainee(module.TrainConfig(**training), plain().target).network.double()
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: weight.detach() + 0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        for name, weight in network.state_dict().items()
    }
    checkpoint = Checkpoint(module.METHOD.name, "made", "made", network.shape, tensors)
    return module.from_checkpoint(module.Config(**options), checkpoint, _context())


def _eagle(**options: Any) -> Drafter:
    return _head(eagle, {}, **options)


def _medusa(**options: Any) -> Drafter:
    return _head(medusa, {"heads": 3}, **options)


def _speculator(**options: Any) -> Drafter:
    return _head(mlp_speculator, {"n_predict": 3, "inner": 12, "tied": False}, **options)


def _blockwise(**options: Any) -> Drafter:
    return _head(blockwise, {"heads": 3, "inner": 8}, **options)


def _hydra(**options: Any) -> Drafter:
    return _head(hydra, {"heads": 3, "own_head": False, "rank": 12}, **options)


FREE = {"tree_nodes": 7, "top_k": 3}  # a tree of no fixed shape
CASES = {
    "plain": (lambda: None, "reject"),
    "draft_model, reject": (_draft_model, "reject"),
    "draft_model, block": (_draft_model, "block"),
    "draft_model tree, reject": (lambda: _draft_model(branching=(2, 2, 1)), "reject"),
    "draft_model free tree, reject": (lambda: _draft_model(**FREE), "reject"),
    "draft_model, match": (_draft_model, "match"),
    "draft_model drafts, spectr": (lambda: _draft_model(num_drafts=4), "spectr"),
    "draft_model drafts, reject": (lambda: _draft_model(num_drafts=4), "reject"),
    "eagle tree, spectr": (lambda: _eagle(branching=(3, 2, 1)), "spectr"),
    "medusa tree, spectr": (lambda: _medusa(tree_nodes=7), "spectr"),
    "two draft models with drafts, spectr": (
        lambda: _merge(_draft_model(num_drafts=2), _draft_model(2, num_drafts=2)),
        "spectr",
    ),
    "ngram_lm, reject": (_ngram_lm, "reject"),
    "ngram_lm, block": (_ngram_lm, "block"),
    "eagle, reject": (_eagle, "reject"),
    "eagle, block": (_eagle, "block"),
    "eagle free tree, reject": (lambda: _eagle(**FREE), "reject"),
    "medusa tree, reject": (lambda: _medusa(tree_nodes=7), "reject"),
    "mlp_speculator free tree, reject": (lambda: _speculator(**FREE), "reject"),
    "blockwise, block": (_blockwise, "block"),
    "hydra free tree, reject": (lambda: _hydra(**FREE), "reject"),
    "two draft models, reject": (lambda: _merge(_draft_model(), _draft_model(2)), "reject"),
    "two equal draft models, reject": (lambda: _merge(_draft_model(), _draft_model()), "reject"),
    "two draft models, match": (lambda: _merge(_draft_model(), _draft_model(2)), "match"),
    "three members with trees, reject": (
        lambda: _merge(_draft_model(**FREE), _medusa(tree_nodes=4), _draft_model(2, branching=(2, 1))),
        "reject",
    ),
}
# that others here have the machinery of; `make soak` counts all
ALIKE = {"draft_model, block", "draft_model tree, reject", "ngram_lm, reject", "eagle, reject", "eagle, block"}
ALIKE |= {"draft_model drafts, reject", "medusa tree, spectr"}
ALIKE |= {"two draft models, reject", "two draft models, match"}


@cache
def compute_expected() -> dict[tuple[int, ...], float]:
    """Compute the probability of every sequence of LENGTH tokens, by transformers' forward pass over each prefix."""
    reference = tiny_models.llama(V, seed=3, hidden=16)
    reference.load_state_dict(model().state_dict())
    texts = list(itertools.product(range(V), repeat=LENGTH))
    result = dict.fromkeys(texts, 1.0)
    for size in range(LENGTH):
        prefixes = list(itertools.product(range(V), repeat=size))
        with torch.inference_mode():
            ids = torch.tensor([PROMPT + list(prefix) for prefix in prefixes], device=reference.device)
            logits = reference(ids).logits[:, -1]
        probs = distribution(logits, SAMPLING, [TokenHistory(PROMPT, prefix) for prefix in prefixes])
        rows = dict(zip(prefixes, probs.tolist(), strict=True))
        for text in texts:
            result[text] *= rows[text[:size]][text[size]]
    assert sum(result.values()) == pytest.approx(1)
    return result


def p_value(counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square over the cells that expect five or more, the rest as one. A text of no probability fails outright."""
    total, probs = sum(counts.values()), compute_expected()
    impossible = [text for text in counts if probs[text] == 0]
    assert not impossible, f"texts of probability zero: {impossible[:3]}"
    large = [text for text in probs if probs[text] * total >= 5]
    observed = [counts[text] for text in large]
    wanted = [probs[text] * total for text in large]
    rest = total - sum(wanted)
    if rest >= 5:
        observed, wanted = [*observed, total - sum(observed)], [*wanted, rest]
    else:
        wanted = [w * sum(observed) / sum(wanted) for w in wanted]
    return float(stats.chisquare(observed, wanted).pvalue)


def check(case: str, num_requests: int) -> None:
    make, rule = CASES[case]
    llm: LLM = plain().with_drafter(make(), verify=rule)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = rejected = 0
    for first in range(0, num_requests, 1024):
        for done in llm.generate([PROMPT] * min(1024, num_requests - first), SAMPLING):
            counts[tuple(done.token_ids[:LENGTH])] += 1
            accepted += done.stats.num_accepted
            rejected += done.stats.num_drafted - done.stats.num_accepted
    assert p_value(counts) > 1e-6  # a false alarm once in a million runs
    assert llm.engine.drafter.num_failures == 0
    if case != "plain":
        assert accepted > num_requests // 20
        assert rejected > num_requests // 20


@pytest.mark.parametrize("case", [case for case in CASES if case not in ALIKE])
def test_texts_have_the_distribution_of_the_target(case: str) -> None:
    check(case, 1000)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_many_texts_have_the_distribution_of_the_target(case: str) -> None:
    check(case, int(os.environ.get("DISTRIBUTION_SAMPLES", "20000")))


def test_the_count_has_teeth() -> None:
    """Texts without the frequency penalty are distinguished; with seeds, so that it is the same on every run."""
    others = [replace(SAMPLING, frequency_penalty=0.0, seed=seed) for seed in range(2000)]
    done = LLM(model(), None, verify="match").generate([PROMPT] * len(others), others)
    texts = [tuple(completion.token_ids[:LENGTH]) for completion in done]
    assert p_value(Counter(text for text in texts if compute_expected()[text] > 0)) < 1e-6
