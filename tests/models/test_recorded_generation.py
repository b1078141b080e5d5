"""Generation with recorded passes: the tokens of passes without recordings, for target and draft model."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import LLM, Completion, RequestOptions, Sampling
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.kernels.gpu.graphs import CallingRecorder
from foredraft.kv.pool import KVPool
from foredraft.kv.sizing import MemoryLimits
from foredraft.models.hf import HFModel
from tests.support.torch_kernels import make_torch_kernels

VOCAB = 61
PROMPTS = [[5, 6, 7, 5, 6], [40], [9, 8, 9, 8, 9, 8, 9]]
SAMPLINGS = [
    Sampling(max_tokens=12, temperature=0, ignore_eos=True),
    Sampling(max_tokens=8, seed=3, ignore_eos=True),
    Sampling(max_tokens=6, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def make_lm(model: Any, is_recorded: bool) -> HFModel:
    pool = KVPool(kernels=make_torch_kernels(), is_whole=True, recorder=CallingRecorder() if is_recorded else None)
    return replace(HFModel.wrap_model(copy.deepcopy(model), "tiny"), pool=pool)


def make_draft_model(model: Any, is_recorded: bool, options: TreeOptions) -> DraftModel:
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape)
    context = DrafterContext(vocab_size=VOCAB, num_speculative_tokens=4, dtype=torch.float64)
    return DraftModel(make_lm(draft, is_recorded), context, options)


def generate(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and all log-probabilities of every request."""
    done = [one for sampling in SAMPLINGS for one in llm.generate(PROMPTS, sampling)]
    return [(one.token_ids, list_logprobs(one)) for one in done]


def list_logprobs(one: Completion) -> list[float]:
    given = [x for x in [*(one.logprobs or ()), *(one.prompt_logprobs or ())] if x is not None]
    return [number for x in given for number in (x.logprob, *(value for _, value in x.top))]


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM) -> list[Any]:
    return generate(LLM(make_lm(model, False), None))


def compare(found: list[Any], expected: list[Any]) -> None:
    """Compare tokens exactly, log-probabilities up to rounding."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [numbers for _, numbers in found] == [pytest.approx(numbers, abs=1e-9) for _, numbers in expected]
    assert sum(len(numbers) for _, numbers in found) > 0


def test_plain_decoding(model: LlamaForCausalLM, plain: list[Any]) -> None:
    llm = LLM(make_lm(model, True), None, is_debug=True)
    compare(generate(llm), plain)
    target: Any = llm.target
    assert len(target.recorded._cache) > 0


def test_small_memory_preempts_requests(model: LlamaForCausalLM, plain: list[Any]) -> None:
    llm = LLM(make_lm(model, True), None, is_debug=True, limits=MemoryLimits(kv_tokens=32, page_size=4))
    compare(generate(llm), plain)


@pytest.mark.parametrize(
    "options", [TreeOptions(), TreeOptions(branching=(2, 2)), TreeOptions(tree_nodes=5, top_k=2)],
    ids=["chain", "static", "dynamic"],
)  # fmt: skip
def test_draft_model(options: TreeOptions, model: LlamaForCausalLM, plain: list[Any]) -> None:
    llm = LLM(make_lm(model, True), make_draft_model(model, True, options), is_debug=True)
    compare(generate(llm), plain)
    drafter: Any = llm.drafter
    assert len(drafter.lm.recorded._cache) > 0
    assert drafter.lm.pool.graph_memory is llm.target.pool.graph_memory


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_rules_that_use_q(rule: str, model: LlamaForCausalLM) -> None:
    sampling, options = Sampling(max_tokens=10, seed=5, ignore_eos=True), RequestOptions(verify=rule)
    texts = []
    for is_recorded in (False, True):
        drafter = make_draft_model(model, is_recorded, TreeOptions())
        llm = LLM(make_lm(model, is_recorded), drafter)
        texts.append([one.token_ids for one in llm.generate(PROMPTS, sampling, options=options)])
    assert texts[0] == texts[1]
