"""Gemma-4 assistants in an engine: distributions, trees, memory that they read, and targets they refuse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.gemma4_assistant.method import METHOD
from foredraft.drafters.gemma4_assistant.network import AssistantNetwork
from foredraft.drafters.gemma4_assistant.shape import AssistantShape
from foredraft.drafters.gemma4_assistant.target_kv import FrozenRows, TargetKV
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.errors import ForedraftError
from foredraft.kv.int8_rows import dequantize_rows
from foredraft.llm import MemoryLimits
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.request import Batch
from foredraft.tree import TokenTree
from tests.support import gemma4_assistants as tiny
from tests.support import tiny_models
from tests.support.gemma4_assistants import Proposal, ProposalRecorder
from tests.support.gpu_cases import PAGE_SIZE, TRITON, AttentionCase, Heads, bound_error, scatter_pages
from tests.support.library_setups import NATIVE
from tests.support.requests import make_request

GREEDY = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True)
PROMPTS = [[9], [5, 6, 7, 8], [11, 12, 13] * 8]


def record(
    folder: Path, llm: LLM, sampling: Sampling, verify: str = "match", prompts: Any = None, **options: Any
) -> list[Proposal]:
    """Generate with an assistant and return its drafts. Under `match` the output must be that of plain decoding."""
    recorder = ProposalRecorder(tiny.make_drafter(folder, llm, 4, **options))
    outputs = llm.with_drafter(recorder, verify=verify).generate(prompts or PROMPTS, sampling)
    if verify == "match":
        plain = llm.generate(prompts or PROMPTS, sampling)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert recorder.found
    return recorder.found


def replay(drafter: Any, llm: LLM, text: list[int], path: list[int]) -> Tensor:
    """Compute the logits [V] after a text and a draft path, alone, from keys that are computed anew."""
    lm = llm.target.with_new_kv()
    pages = list(range(1, 2 + len(text) // 16))
    with torch.no_grad():
        batch = ForwardBatch.from_spans([Span(pages, 0, text[:-1], range(len(text) - 1))], 16, "cpu")
        states = lm.forward(batch, (AFTER_FINAL_NORM,))[1]
        assert states is not None
        state = states[-1:]
        request = make_request(0, text, GREEDY, pages=pages, num_computed=len(text) - 1)
        rows = FrozenRows.build([request], [1], 16, torch.device("cpu"))
        kv = TargetKV(lm.pool, drafter.target_kv.layers, drafter.network.shape)
        for token in [text[-1], *path]:
            hidden = drafter.network(
                drafter.embed([token]), state, rows.positions, lambda layer, query: kv.attend(rows, layer, query)
            )
            state = drafter.network.post_projection(hidden)
        return drafter.network.compute_logits(hidden)[0]


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_sampled_chains_come_with_the_distribution_of_their_tokens(tmp_path: Path, is_ordered: bool) -> None:
    """With ordered embeddings the distribution is over the selected clusters alone."""
    llm = tiny.make_llm()
    folder = tiny.save_assistant(tmp_path, is_ordered)
    drafter = tiny.make_drafter(folder, llm, 4)
    found = record(folder, llm, SAMPLED, "reject")
    for proposal in found[::5]:
        assert proposal.q is not None
        for depth, token in enumerate(proposal.tokens):
            wanted = (replay(drafter, llm, proposal.text, proposal.tokens[:depth]) / 0.8).softmax(-1)
            torch.testing.assert_close(proposal.q[depth], wanted, rtol=1e-9, atol=1e-12, check_dtype=False)
            assert proposal.q[depth, token] > 0
            assert int((proposal.q[depth] > 0).sum()) == (36 if is_ordered else tiny.VOCAB)


def test_every_node_of_a_tree_follows_from_its_own_path(tmp_path: Path) -> None:
    """A row of another parent or another request would propose other children."""
    llm = tiny.make_llm()
    folder = tiny.save_assistant(tmp_path)
    drafter = tiny.make_drafter(folder, llm, 4)
    found = record(folder, llm, GREEDY, branching=(3, 2, 1))
    for proposal in found[::7]:
        paths: list[list[int]] = [[]]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append([*paths[parent], token])
        for node, path in enumerate(paths):
            children = {paths[i + 1][-1] for i, parent in enumerate(proposal.parents) if parent == node}
            if children:
                best = replay(drafter, llm, proposal.text, path).topk(len(children)).indices.tolist()
                assert children == set(best)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_the_text_is_that_of_plain_decoding_in_little_memory(tmp_path: Path, is_ordered: bool) -> None:
    """With preemptions, hits in the prefix cache, prompts in chunks and several samples of one prompt."""
    llm = tiny.make_llm()
    drafter = tiny.make_drafter(tiny.save_assistant(tmp_path, is_ordered), llm, 4)
    limits = MemoryLimits(kv_tokens=64, page_size=4, max_batch=4, max_step_tokens=24)
    small = tiny_models.limit_memory(llm, drafter, limits, max_chunk=5)
    prompts = [[11, 12, 13] * 8, [21, 22] * 9, PROMPTS[1], [11, 12, 13] * 8]
    for sampling in (GREEDY, replace(SAMPLED, n=2, max_tokens=9)):
        outputs = small.generate(prompts, sampling)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, sampling)]
        assert sum(o.stats.num_drafted for o in outputs) > 20
    assert small.engine.scheduler.num_preempted > 0
    assert small.engine.scheduler.prefix_hits > 0
    assert small.engine.drafter.num_failures == 0
    llm.target.pool.check_null_page(llm.limits.page_size)


def test_a_draft_changes_nothing_in_the_targets_memory(tmp_path: Path) -> None:
    llm = tiny.make_llm()
    drafter = tiny.make_drafter(tiny.save_assistant(tmp_path), llm, 4, tree_nodes=8)

    class Watcher(DrafterWrapper):
        def propose(self, batch: Batch) -> TokenTree:
            before = {i: (k.clone(), v.clone()) for i, (k, v) in drafter.target.pool.layers.items()}
            tree = super().propose(batch)
            for i, (keys, values) in drafter.target.pool.layers.items():
                assert torch.equal(keys, before[i][0])
                assert torch.equal(values, before[i][1])
            return tree

    made = llm.with_drafter(Watcher(drafter))
    assert made.generate(PROMPTS, GREEDY)[0].stats.num_drafted > 0
    assert made.engine.drafter.num_failures == 0


@pytest.mark.parametrize("mode", ["auto", "merge", "sequence"])
def test_it_drafts_beside_methods_of_tokens(tmp_path: Path, mode: str) -> None:
    folder = tiny.save_assistant(tmp_path)
    drafter = {"method": "ngram+gemma4_assistant", "model": str(folder), "mode": mode, "num_speculative_tokens": 4}
    llm = LLM(tiny.make_target(), drafter, is_debug=True)
    for sampling in (GREEDY, SAMPLED):
        outputs = llm.generate(PROMPTS, sampling)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in tiny.make_llm().generate(PROMPTS, sampling)]
        assert sum(o.stats.num_drafted for o in outputs) > 0
    assert not any(backoff.failures for backoff in llm.engine.drafter.spec.member_backoffs)


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_a_mask_of_the_request_holds_for_drafts(tmp_path: Path, verify: str) -> None:
    """Allowed tokens of which none or few are in the selected clusters leave short drafts, and no error."""
    llm = tiny.make_llm()
    folder = tiny.save_assistant(tmp_path, is_ordered=True)
    allowed = tuple(range(20, 44))
    found = record(folder, llm, replace(SAMPLED, allowed_token_ids=allowed), verify)
    assert {token for proposal in found for token in proposal.tokens} <= {*allowed}


# targets


def native_llm(kv_dtype: str = "auto", dtype: torch.dtype = torch.float32) -> LLM:
    model = tiny_models.llama(hidden=64).to(dtype)
    return LLM(model, None, fused=True, is_debug=True, kv_dtype=kv_dtype)


def make_random(llm: LLM, shape: AssistantShape, fused: bool = True) -> Any:
    """Make the drafter of an assistant with random weights."""
    torch.manual_seed(0)
    checkpoint = Checkpoint(METHOD.name, "made", "made", shape, dict(AssistantNetwork(shape).state_dict()))
    context = DrafterContext(llm.target.vocab_size, llm.target, 4, dtype=llm.target.model.dtype, fused=fused)
    assert METHOD.from_checkpoint is not None
    return METHOD.from_checkpoint(METHOD.config(), checkpoint, context)


@NATIVE
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_native_targets_give_their_keys(kv_dtype: str) -> None:
    """int8 keys are read as the numbers that they stand for, without a copy of the others."""
    llm = native_llm(kv_dtype)
    drafter = make_random(llm, tiny.make_shape(llm))
    made = llm.with_drafter(drafter)
    outputs = made.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert made.engine.drafter.num_failures == 0
    keys, values = made.target.pool.layers[1]
    assert (keys.dtype == torch.int8) == (kv_dtype == "int8")
    request = make_request(0, range(9), GREEDY, pages=[1], num_computed=8)
    rows = FrozenRows.build([request, request], [1, 3], 16, torch.device("cpu"))
    query = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1))
    found = drafter.target_kv.attend(rows, 1, query)
    k, v = (x[16:24] if kv_dtype == "auto" else dequantize_rows(x[16:24], torch.float32) for x in (keys, values))
    weights = torch.einsum("rhd,lhd->rhl", query, k.repeat_interleave(2, 1)).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("rhl,lhd->rhd", weights, v.repeat_interleave(2, 1)))


@TRITON
@pytest.mark.parametrize("heads", [Heads(2, 2, 64, window=13), Heads(4, 1, 32)], ids=str)
def test_gpu_kernels_attend_from_several_rows_at_one_position(heads: Heads) -> None:
    lengths = (30, 12)
    requests = [
        make_request(i, range(length), GREEDY, pages=pages, num_computed=length - 1)
        for i, (length, pages) in enumerate(zip(lengths, scatter_pages(lengths), strict=True))
    ]
    rows = FrozenRows.build(requests, [3, 1], PAGE_SIZE, torch.device("cpu"))
    case = AttentionCase.make(heads, rows.batch.spans)
    assert [len(case.rows.list_slots(row)) for row in range(4)] == [29, 29, 29, 11]
    assert rows.positions.tolist() == [29, 29, 29, 11]
    assert (case.run().double() - case.reference()).abs().max().item() <= bound_error(case)


@NATIVE
@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_packed_matrices_compute_the_same(is_ordered: bool) -> None:
    """An output matrix of which single rows are read is not packed."""
    llm = native_llm()
    shape = tiny.make_shape(llm, is_ordered)
    packed, plain = (make_random(llm, shape, fused) for fused in (True, False))
    assert (packed.spec.is_native, plain.spec.is_native) == (True, False)
    assert isinstance(packed.network.lm_head, torch.nn.Linear) == is_ordered
    assert not isinstance(packed.network.pre_projection, torch.nn.Linear)
    g = torch.Generator().manual_seed(2)
    embeddings, states = torch.randn(3, 64, generator=g), torch.randn(3, 64, generator=g)
    found = []
    for drafter in (packed, plain):
        with torch.no_grad():
            hidden = drafter.network(embeddings, states, torch.arange(3), lambda layer, query: query)
            found.append((drafter.network.compute_logits(hidden), drafter.network.post_projection(hidden)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_int8_rows_are_codes_and_then_scales() -> None:
    codes = torch.randint(-127, 128, (3, 2, 8), dtype=torch.int8)
    scales = torch.rand(3, 2)
    stored = torch.cat([codes.flatten(1), scales.view(torch.int8)], 1).view(3, 2, 12)
    torch.testing.assert_close(dequantize_rows(stored, torch.float32), codes.float() * scales[..., None])


class SplitTarget(HFModel):
    """Target whose other processes hold a part of the keys."""

    @property
    def has_whole_kv(self) -> bool:
        return False


class EncodedTarget(HFModel):
    """Target with an encoder."""

    @property
    def has_encoder(self) -> bool:
        return True


def test_targets_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = tiny.save_assistant(tmp_path)
    target = tiny.make_llm().target
    for kind, message in ((SplitTarget, "leave tensor_parallel_size"), (EncodedTarget, "the-target has an encoder")):
        other_kind = kind(target.model, "the-target", target.pool, 1, 1)
        context = DrafterContext(tiny.VOCAB, other_kind, 4, str(folder), target_name="the-target", dtype=torch.float64)
        with pytest.raises(ForedraftError, match=message):
            create_drafter(METHOD, METHOD.config(), context)
    other = LLM(tiny_models.llama(tiny.VOCAB), None)  # all of its layers have full attention
    with pytest.raises(ForedraftError, match=r"a layer of kind sliding_attention, and .* has none"):
        tiny.make_drafter(folder, other, 4)


def test_heads_of_another_size_are_refused() -> None:
    llm = tiny_models.plain()
    shape = replace(tiny.make_shape(llm), head_dims=(16, 16))
    with pytest.raises(ForedraftError, match=r"has 4 query heads of 16 in layer 0, and the keys of .* 2 heads of 8"):
        make_random(llm, shape)


def test_an_assistant_serves_one_engine(tmp_path: Path) -> None:
    llm = tiny.make_llm()
    drafter = tiny.make_drafter(tiny.save_assistant(tmp_path), llm, 4)
    llm.with_drafter(drafter)
    with pytest.raises(ForedraftError, match="KV pages of another engine; make one for each engine"):
        llm.with_drafter(drafter)
    with pytest.raises(ForedraftError, match="reads the keys of"):
        tiny.make_llm(0).with_drafter(drafter)


def test_without_a_folder_the_error_promises_no_training() -> None:
    target = tiny.make_llm().target
    with pytest.raises(ForedraftError, match="a published folder, as no training makes one here"):
        create_drafter(METHOD, METHOD.config(), DrafterContext(tiny.VOCAB, target, 4))
