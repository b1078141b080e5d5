"""Keys and values in int8: the output of a model whose attention rounds them, equal bits with drafts and without."""

import copy
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import INSTRUCTION_SETS, TILE_SET
from foredraft.llm import MemoryLimits
from foredraft.models.hf import HFModel
from foredraft.models.kv_dtype import INT8, apply_kv_dtype
from foredraft.tree import TokenTree
from tests.models.test_families import random_tree
from tests.models.test_native_families import IDS, make_exact, make_native
from tests.support.families import PagedModel, attend_exactly, compute_reference, list_path
from tests.support.library_setups import NATIVE, THREAD_SETUPS, use_library

pytestmark = NATIVE

ROUNDED = "int8_keys_and_values"
FAMILIES = ["phi3", "gemma2", "gpt_oss"]  # plain, with a soft-cap, with sinks; all with windows
PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push", "import os\nfor name in os.listdir("]


def round_heads(x: Tensor) -> Tensor:
    """Round [.., D] to 255 steps of the largest magnitude of each head."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def _attend_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
    return attend_exactly(module, query, round_heads(key), round_heads(value), *rest, **more)


AttentionInterface.register(ROUNDED, _attend_rounded)
AttentionMaskInterface.register(ROUNDED, eager_mask)


def make_int8(name: str, dtype: torch.dtype = torch.float32) -> HFModel:
    return apply_kv_dtype(make_native(name, dtype).with_new_kv(), INT8)


def norm(x: Tensor) -> float:
    return float(x.double().norm())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_attention_over_rounded_heads(name: str, instruction_set: str) -> None:
    """The rest is float32, so that what int8 changes is far above other rounding."""
    stored = make_exact(name, torch.float32)
    rounded = copy.deepcopy(stored)
    rounded.set_attn_implementation(ROUNDED)
    plain, expected = compute_reference(stored, IDS), compute_reference(rounded, IDS)
    with use_library(instruction_set):
        logits = PagedModel(make_int8(name)).read({0: IDS})
    assert 0 < norm(expected - plain) < 0.1 * norm(plain)
    # Products of bf16 take queries in bf16; a code next to a tie may differ.
    rounding = 0.6 if instruction_set in (TILE_SET, "avx512bf16") else 0.1
    assert norm(logits - expected) < rounding * norm(expected - plain)


@pytest.mark.parametrize("setup", THREAD_SETUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_depend_neither_on_cuts_nor_on_drafts(dtype: torch.dtype, setup: Any) -> None:
    lm = make_int8("gpt_oss", dtype)
    whole = PagedModel(lm).read({0: IDS})
    with use_library("", setup):
        paged = PagedModel(lm)
        cuts = (0, 1, 8, 33, 40)
        assert torch.equal(torch.cat([paged.read({0: IDS[a:b]}) for a, b in pairwise(cuts)]), whole)
        prefix, (ids, parents) = IDS[:9], random_tree(Random(1), 10)
        paged = PagedModel(lm.with_new_kv())
        paged.read({0: prefix}, rows=[])
        nodes = paged.verify(TokenTree.from_lists([ids], [parents]))
        for node in range(len(ids)):
            path = list_path(parents, node)
            assert torch.equal(nodes[node], PagedModel(lm).read({0: prefix + [ids[n] for n in path]})[-1])


def test_a_token_takes_a_byte_for_a_number_and_four_for_a_head() -> None:
    lm, stored = make_int8("phi3", torch.bfloat16), make_native("phi3", torch.bfloat16)
    heads = 2 * 3 * 2  # keys and values of three layers with two heads
    assert stored.bytes_per_token() == heads * 16 * 2
    assert lm.bytes_per_token() == heads * (16 + 4)
    PagedModel(lm).read({0: IDS})
    assert {tensor.dtype for pair in lm.pool.layers.values() for tensor in pair} == {torch.int8}
    PagedModel(stored).read({0: IDS})
    assert {tensor.dtype for pair in stored.pool.layers.values() for tensor in pair} == {torch.bfloat16}


@torch.inference_mode()
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_shows_in_the_rows_that_read_it(number: float) -> None:
    lm = make_int8("phi3")
    table = lm.model.get_input_embeddings().weight
    kept = table[IDS[5]].clone()
    before = PagedModel(lm).read({0: IDS})
    table[IDS[5], 0] = number
    logits = PagedModel(lm).read({0: IDS})
    table[IDS[5]] = kept
    first = IDS.index(IDS[5])
    assert torch.equal(logits[:first], before[:first])
    assert logits[first:][:2].isnan().all()


@torch.inference_mode()
def test_a_head_of_zeros_stays_zero() -> None:
    lm = make_int8("phi3")
    table = lm.model.get_input_embeddings().weight
    kept = table[IDS[5]].clone()
    table[IDS[5]] = 0
    logits = PagedModel(lm).read({0: IDS})
    table[IDS[5]] = kept
    assert logits.isfinite().all()


LIMITS = MemoryLimits(kv_tokens=132, page_size=4, max_batch=8, max_step_tokens=48)


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle3", "early_exit", "ngram+medusa"])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0, max_tokens=24), Sampling(seed=5, max_tokens=24)])
def test_drafts_change_no_token(drafter: str, sampling: Sampling) -> None:
    """Memory for half of the requests, so that some are preempted; pages are shared with the prefix cache."""
    plain = LLM("builtin", None, kv_dtype=INT8)
    expected = [plain.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS]
    llm = LLM("builtin", drafter, kv_dtype=INT8, limits=LIMITS, is_debug=True)
    for _ in range(2):
        assert [c.token_ids for c in llm.generate(PROMPTS * 2, sampling)] == expected * 2


def test_what_has_no_int8_keys_is_refused() -> None:
    with pytest.raises(ForedraftError, match="unknown kv_dtype 'fp8'; use auto or int8"):
        LLM("builtin", None, kv_dtype="fp8")
    with pytest.raises(ForedraftError, match=r"fused=False, --no-fused\); leave kv_dtype \(--kv-dtype\) out"):
        LLM("builtin", None, kv_dtype=INT8, fused=False)
    with pytest.raises(ForedraftError, match="it is an encoder-decoder"):
        LLM("builtin-seq2seq", None, kv_dtype=INT8)
    with pytest.raises(ForedraftError, match="leave it or tensor_parallel_size out"):
        LLM("builtin", None, kv_dtype=INT8, tensor_parallel_size=2)
    with pytest.raises(ForedraftError, match="keeps its keys and values"):
        LLM(make_native("phi3", torch.float32), None, kv_dtype=INT8)
