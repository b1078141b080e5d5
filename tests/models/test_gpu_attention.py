"""Models on the Triton kernels: the logits and the tokens of torch's operators, plain and with drafts.

Without a GPU the kernels run in triton's interpreter, chosen by the pool of a model and not by its device.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.small_families import make_model as make_small_model
from foredraft import LLM, Sampling
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.kernels.gpu.loading import GPUKernels, load_kernels
from foredraft.kv.pool import KVPool
from foredraft.models.feature_lm import FeatureLM
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from tests.support.families import make_family
from tests.support.gpu_cases import DEVICE, TRITON, make_chain, make_tree, scatter_pages

pytestmark = TRITON
PROMPTS = [[5, 6, 7, 5, 6], [40]]
SAMPLINGS = [Sampling(max_tokens=5, temperature=0, ignore_eos=True), Sampling(max_tokens=4, seed=3, ignore_eos=True)]
TREE = TreeOptions(branching=(2, 1))


@dataclass
class CallCounter:
    """Counts of calls of each kernel."""

    counts: dict[str, int] = field(default_factory=lambda: {"attend": 0, "store": 0, "move": 0, "walk_trees": 0})

    def wrap(self, kernels: GPUKernels) -> GPUKernels:
        return replace(kernels, **{name: self._count(name, getattr(kernels, name)) for name in self.counts})

    def _count(self, name: str, run: Any) -> Any:
        def count(*args: Any) -> Any:
            self.counts[name] += 1
            return run(*args)

        return count


def make_model(noise: float = 0.0) -> LlamaForCausalLM:
    """Make a model of one layer in float32; with noise, a copy that mostly agrees."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape)
    return model.to(DEVICE)


def wrap_model(model: LlamaForCausalLM, kernels: GPUKernels | None) -> HFModel:
    lm = HFModel.wrap_model(model, "tiny")
    return replace(lm, pool=KVPool(kernels=kernels))


def make_drafter(kernels: GPUKernels | None, options: TreeOptions) -> DraftModel:
    context = DrafterContext(vocab_size=61, num_speculative_tokens=3, dtype=torch.float32, device=torch.device(DEVICE))
    return DraftModel(wrap_model(make_model(0.05), kernels), context, options)


@pytest.fixture(autouse=True, scope="module")
def fast_interpreter() -> Iterator[None]:
    from tests.support.fast_interpreter import patch_language_once

    with patch_language_once():
        yield


@pytest.fixture(scope="module")
def counter() -> CallCounter:
    return CallCounter()


@pytest.fixture(scope="module")
def llms(counter: CallCounter) -> tuple[LLM, LLM]:
    """Make the target on torch's operators, and on the kernels."""
    kernels = counter.wrap(load_kernels())
    return tuple(LLM(wrap_model(make_model(), pool), None, is_debug=True) for pool in (None, kernels))  # type: ignore[return-value]


def generate(llm: LLM) -> list[list[list[int]]]:
    return [[done.token_ids for done in llm.generate(PROMPTS, sampling)] for sampling in SAMPLINGS]


def test_plain_tokens_are_those_of_torch(llms: tuple[LLM, LLM], counter: CallCounter) -> None:
    before = dict(counter.counts)
    assert generate(llms[0]) == generate(llms[1])
    passes = counter.counts["attend"] - before["attend"]
    assert passes > 0
    assert counter.counts["store"] - before["store"] == passes
    assert counter.counts["walk_trees"] - before["walk_trees"] == passes, "a step was verified on the host"


@pytest.mark.parametrize("options", [TreeOptions(), TREE], ids=["chain", "tree"])
def test_drafts_give_the_tokens_of_torch_without_drafts(
    options: TreeOptions, llms: tuple[LLM, LLM], counter: CallCounter
) -> None:
    kernels = llms[1].target.pool.kernels
    before = dict(counter.counts)
    drafter = make_drafter(None if options is TREE else kernels, options)  # once is enough, and the interpreter is slow
    drafting = llms[1].with_drafter(drafter, verify="match")
    assert drafting.target.pool.kernels is kernels, "a copy with new KV must keep the kernels"
    done = [drafting.generate(PROMPTS, sampling) for sampling in SAMPLINGS]
    assert [[one.token_ids for one in group] for group in done] == generate(llms[0])
    stats = [one.stats for group in done for one in group]
    assert 0 < sum(one.num_accepted for one in stats) < sum(one.num_drafted for one in stats)
    if options is TREE:
        assert counter.counts["move"] > before["move"], "no accepted path had to be moved"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_windows_softcaps_and_sinks_reach_the_kernels(family: str) -> None:
    model = copy.deepcopy(make_family(family)[1].model).to(DEVICE)
    pages = scatter_pages([14, 9])
    past = [make_chain(own, 0, n) for own, n in zip(pages, (8, 3), strict=True)]
    step = [make_tree(pages[0], 8), make_chain(pages[1], 3, 4)]
    results = []
    for kernels in (None, load_kernels()):
        lm = replace(make_family(family)[1], model=model, pool=KVPool(kernels=kernels))
        results.append(torch.cat([run(lm, spans) for spans in (past, step)]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


@torch.inference_mode()
def run(lm: HFModel, spans: list[Span]) -> Tensor:
    given = [span._replace(tokens=[(7 * n + 3) % 97 for n in span.node_indices]) for span in spans]
    return lm.forward(ForwardBatch.from_spans(given, 4, DEVICE))[0]


@dataclass(frozen=True)
class PlainNetwork:
    """A network of one attention layer, as FeatureLM calls it."""

    def project_features(self, features: Tensor) -> Tensor:
        return features

    def __call__(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Any) -> tuple[Tensor, Tensor]:
        heads = features.view(*features.shape[:2], 4, 8)
        mixed = attend(0, heads, heads[:, :, :2], heads[:, :, 2:])
        return mixed.flatten(2), features

    def compute_logits(self, states: Tensor) -> Tensor:
        return states


def test_heads_on_hidden_states_run_on_the_kernels(counter: CallCounter) -> None:
    features = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batch = ForwardBatch.from_spans([make_chain([2, 5], 0, 5)], 4, DEVICE)
    before, kernels = counter.counts["attend"], counter.wrap(load_kernels())
    outputs = [
        FeatureLM(PlainNetwork(), torch.float32, KVPool(kernels=pool), sliding_windows=(3,)).forward(batch, features)[0]
        for pool in (None, kernels)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
    assert counter.counts["attend"] == before + 1


def test_a_model_on_its_own_attention_stores_its_keys_by_the_kernels() -> None:
    model = make_small_model("deepseek_v32").to(DEVICE)  # keys, values and indexer keys have three widths
    counter, drafter = CallCounter(), {"method": "ngram", "branches": 2}
    plain, on_kernels = (HFModel.wrap_model(model, "deepseek_v32") for _ in range(2))
    on_kernels.pool = KVPool(kernels=counter.wrap(load_kernels()))
    plain.pool = KVPool()
    sampling = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = [
        [c.token_ids for c in LLM(lm, drafter, tokenizer=None, num_speculative_tokens=3).generate(PROMPTS, sampling)]
        for lm in (plain, on_kernels)
    ]
    assert outputs[0] == outputs[1]
    assert counter.counts["store"] > 0
    assert counter.counts["attend"] == 0
