"""Recorded passes: padding changes no number, writes nothing, and nothing is read after the next pass."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.kernels.gpu.graphs import CallingRecorder, GraphMemory, RecordedLaunches
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.models.pass_size import REQUEST_BUCKETS, ROW_BUCKETS, PassSize
from foredraft.models.recorded_pass import RunPass
from tests.support.torch_kernels import make_torch_kernels

PAGE_SIZE, NUM_PAGES, VOCAB = 4, 400, 31
MAX_ROWS = 40
BOUNDARIES = (1, AFTER_FINAL_NORM)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def make_lm(model: Any, is_recorded: bool) -> HFModel:
    """Make an LM over a pool of random keys and values, with a null page of zeros."""
    lm = HFModel.wrap_model(model, "tiny")
    pool = KVPool(kernels=make_torch_kernels(), is_whole=True, capacity=NUM_PAGES * PAGE_SIZE)
    for layer in range(2):
        keys = torch.randn(
            NUM_PAGES * PAGE_SIZE, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(layer)
        )
        keys[:PAGE_SIZE] = 0
        pool.layers[layer] = keys, keys.flip(0).clone()
        pool.layers[layer][1][:PAGE_SIZE] = 0
    if is_recorded:
        pool.recorder, pool.graph_memory = CallingRecorder(), GraphMemory(1 << 30)
    return replace(lm, pool=pool)


def make_spans(sizes: Sequence[int], random: Random, has_trees: bool = True) -> list[Span]:
    """Make spans of these numbers of rows over scattered pages, trees and chains, some of them after other nodes."""
    free = random.sample(range(1, NUM_PAGES), NUM_PAGES - 1)
    spans = []
    for size in sizes:
        start, first = random.randrange(0, 30), random.randrange(0, 3)
        total = first + size
        parents = [-1, *(random.randrange(max(0, n - 3), n) for n in range(1, total))]
        is_tree = has_trees and random.random() < 0.5
        depths = [0]
        for n in range(1, total):
            depths.append(depths[parents[n]] + 1 if is_tree else n)
        pages = [free.pop() for _ in range(-(-(start + total) // PAGE_SIZE))]
        tokens = [random.randrange(VOCAB) for _ in range(size)]
        spans.append(Span(pages, start, tokens, depths, parents if is_tree else None, first))
    return spans


def run_both(eager: HFModel, recorded: HFModel, spans: Sequence[Span], logit_rows: Sequence[int]) -> None:
    """Run a pass by both, and compare logits, hidden states and the whole pool."""
    batch = ForwardBatch.build(spans, logit_rows, PAGE_SIZE, "cpu")
    logits, states = eager.forward(batch, BOUNDARIES)
    found, found_states = recorded.forward(batch, BOUNDARIES)
    assert found.shape == logits.shape
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_states, states, rtol=0, atol=1e-12)
    for layer, pair in eager.pool.layers.items():
        for x, y in zip(pair, recorded.pool.layers[layer], strict=True):
            torch.testing.assert_close(y, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_rows", [MAX_ROWS, pytest.param(ROW_BUCKETS[-1], marks=pytest.mark.soak)])
@torch.inference_mode()
def test_passes_of_every_size_equal_those_without_a_recording(model: LlamaForCausalLM, max_rows: int) -> None:
    eager, recorded = make_lm(model, False), make_lm(model, True)
    random = Random(0)
    for num_rows in range(1, max_rows + 1):
        num_requests = random.randint(1, min(num_rows, 9))
        cuts = sorted(random.sample(range(1, num_rows), num_requests - 1))
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, num_rows], strict=True)]
        rows = range(num_rows) if num_rows % 2 else sorted(random.sample(range(num_rows), random.randint(1, num_rows)))
        run_both(eager, recorded, make_spans(sizes, random), rows)
    assert recorded.recorded._cache is not None
    assert recorded.recorded.reason is None
    assert eager.recorded._cache is None


@torch.inference_mode()
def test_a_recording_is_replayed_with_other_requests(model: LlamaForCausalLM) -> None:
    eager, recorded = make_lm(model, False), make_lm(model, True)
    random = Random(1)
    for sizes in ([8], [3, 3], [1, 1, 1, 1, 1, 1, 1], [2, 6], [8]):
        run_both(eager, recorded, make_spans(sizes, random), range(sum(sizes)))
        run_both(eager, recorded, make_spans(sizes, random), range(sum(sizes)))


@torch.inference_mode()
def test_hidden_states_outlive_the_next_pass(model: LlamaForCausalLM) -> None:
    recorded, random = make_lm(model, True), Random(2)
    batches = [ForwardBatch.build(make_spans([4], random), range(4), PAGE_SIZE, "cpu") for _ in range(2)]
    _, states = recorded.forward(batches[0], BOUNDARIES)
    assert states is not None
    before = states.clone()
    recorded.forward(batches[1], BOUNDARIES)
    assert torch.equal(states, before)


@torch.inference_mode()
def test_boundaries_have_recordings_of_their_own(model: LlamaForCausalLM) -> None:
    eager, recorded = make_lm(model, False), make_lm(model, True)
    batch = ForwardBatch.build(make_spans([4], Random(3)), range(4), PAGE_SIZE, "cpu")
    for boundaries in ((), (1,), (2, 1), ()):
        logits, states = recorded.forward(batch, boundaries)
        expected, expected_states = eager.forward(batch, boundaries)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
        assert (states is None) == (expected_states is None)
        if expected_states is not None:
            torch.testing.assert_close(states, expected_states, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_new_addresses_drop_the_recordings(model: LlamaForCausalLM) -> None:
    eager, recorded = make_lm(model, False), make_lm(model, True)
    spans = [Span([5, 6], 0, [1, 2, 3, 4], range(4))]
    run_both(eager, recorded, spans, range(4))
    old = find_recording(recorded)
    for lm in (eager, recorded):
        lm.pool.clear()
    batch = ForwardBatch.build(spans, range(4), PAGE_SIZE, "cpu")
    assert recorded.recorded._cache is not None
    assert recorded.recorded.run(batch, (), run_modules(recorded)) is None  # without tensors there is nothing to record
    run_both(eager, recorded, spans, range(4))  # allocates
    run_both(eager, recorded, spans, range(4))
    assert find_recording(recorded) is not old


def test_passes_with_gradients_are_not_recorded(model: LlamaForCausalLM) -> None:
    recorded = make_lm(model, True)
    batch = ForwardBatch.build([Span([5], 0, [1, 2], range(2))], range(2), PAGE_SIZE, "cpu")
    assert recorded.forward(batch)[0].requires_grad
    assert recorded.recorded._cache is None


class RefusingRecorder(CallingRecorder):
    """Recorder of a model that waits for the device."""

    def record(self, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


@torch.inference_mode()
def test_a_model_that_cannot_be_recorded_runs_without(
    model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    eager, refused, random = make_lm(model, False), make_lm(model, True), Random(4)
    refused.pool.recorder = RefusingRecorder()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            run_both(eager, refused, make_spans([3, 2], random), range(5))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "passes of tiny run without CUDA graphs, which is slower: operation not permitted when stream is capturing"
    ]


def test_sizes_are_the_next_buckets() -> None:
    spans = make_spans([3, 2], Random(5), has_trees=False)
    size = PassSize.fit(ForwardBatch.build(spans, [0, 4], PAGE_SIZE, "cpu"))
    assert size == PassSize(8, 2, 2, 512, PAGE_SIZE)
    long = [Span(range(1, 200), 700, [1], range(1))]
    assert PassSize.fit(ForwardBatch.build(long, [0], PAGE_SIZE, "cpu")) == PassSize(1, 1, 1, 1024, PAGE_SIZE)


def test_large_passes_have_no_size() -> None:
    prompt = [Span(range(1, 100), 0, [1] * (ROW_BUCKETS[-1] + 1), range(ROW_BUCKETS[-1] + 1))]
    assert PassSize.fit(ForwardBatch.build(prompt, [0], PAGE_SIZE, "cpu")) is None
    # a late level of a long draft: few rows whose paths are long
    level = [Span(range(1, 20), 0, [1], range(60), None, 59)]
    assert PassSize.fit(ForwardBatch.build(level, [0], PAGE_SIZE, "cpu")) is None


def test_every_size_in_the_buckets_fits() -> None:
    assert list(ROW_BUCKETS) == sorted(ROW_BUCKETS)
    assert REQUEST_BUCKETS[-1] >= ROW_BUCKETS[-1]  # every request has a row


def find_recording(lm: HFModel) -> RecordedLaunches:
    """Return the only recording of a model."""
    assert lm.recorded._cache is not None
    (replay,) = lm.recorded._cache._replays.values()
    return replay


def run_modules(lm: HFModel) -> RunPass:
    return partial(lm.module_pass.run, lm.model, lm.pool)


def fill(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value)


@torch.inference_mode()
def test_rows_of_padding_read_the_null_page_alone(model: LlamaForCausalLM) -> None:
    """NaN in all other pages reaches no row of padding: such a row would make its sums NaN."""
    recorded = make_lm(model, True)
    spans = [Span([7, 8], 2, [1, 2, 3], range(3))]
    batch = ForwardBatch.build(spans, range(3), PAGE_SIZE, "cpu")
    recorded.forward(batch)
    for keys, values in recorded.pool.layers.values():
        keys[PAGE_SIZE:] = fill(keys[PAGE_SIZE:], torch.nan)
        values[PAGE_SIZE:] = fill(values[PAGE_SIZE:], torch.nan)
    recorded.forward(batch)
    replay = find_recording(recorded)
    assert recorded.recorded._cache is not None
    assert replay.outputs[0][:3].isnan().all()
    (rows,) = recorded.recorded._inputs.values()
    logits, _ = run_modules(recorded)(rows, ())
    assert rows.device_rows.num_rows == 4
    assert len(logits) == 4
    hidden = run_modules(recorded)(rows, (2,))[1]
    assert hidden is not None
    assert hidden[:3].isnan().all()
    assert hidden[3].isfinite().all()
