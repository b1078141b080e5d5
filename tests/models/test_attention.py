"""The attention function against a plain one over each row's own keys, whatever path it takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models.attention import attend_explicit, paged_attention
from foredraft.models.forward_batch import MAX_PADDED_ROWS, ForwardBatch, Span
from foredraft.models.hf import HFModel
from tests.models.test_forward_batch import PAGE_SIZE, compute_visible_slots, spans
from tests.support.families import TINY

HEADS, SHARED, WIDTH = 4, 2, 8


def make_qkv(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, rows, WIDTH), (1, HEADS // SHARED, rows, WIDTH), (1, HEADS // SHARED, rows, WIDTH + 2)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def attend(window: ForwardBatch, pool: KVPool, qkv: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    out, weights = paged_attention(SimpleNamespace(layer_idx=0), *qkv, None, forward_batch=window, pool=pool, **options)
    assert weights is None
    return out[0]


def plain(q: Tensor, pool: KVPool, seen: dict[int, set[int]], softcap: float | None, sinks: Tensor | None) -> Tensor:
    """[T, Hq, Dv] row by row, head by head, over the slots each row may see."""
    keys, values = pool.layers[0]
    out = []
    for row, slots in sorted(seen.items()):
        at = sorted(slots)
        for head in range(HEADS):
            scores = keys[at, head // SHARED] @ q[0, head, row] * WIDTH**-0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
            out.append(scores.exp() / total @ values[at, head // SHARED])
    return torch.stack(out).view(len(seen), HEADS, -1)


@given(spans(), st.sampled_from([None, 1, 5]), st.sampled_from([None, 1.5]), st.booleans(), st.integers(0, 99))
def test_equal_to_plain_attention_over_what_each_row_may_see(
    spans: list[Span], sliding: int | None, softcap: float | None, has_sinks: bool, seed: int
) -> None:
    window, pool = ForwardBatch.build(spans, [0], PAGE_SIZE, "cpu"), KVPool()
    q, k, v = make_qkv(window.num_rows, seed)
    # the committed keys: whatever lies in the slots before this step; never in the null page
    past = torch.arange(PAGE_SIZE, window.num_slots)
    _, pk, pv = make_qkv(len(past), seed + 1)
    pool.write(0, past, pk[0].transpose(0, 1), pv[0].transpose(0, 1), window.num_slots)
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64) if has_sinks else None
    ours = attend(window, pool, (q, k, v), sliding_window=sliding, softcap=softcap, s_aux=sinks)
    torch.testing.assert_close(
        ours, plain(q, pool, compute_visible_slots(spans, sliding), softcap, sinks), rtol=0, atol=1e-12
    )
    pool.check_null_page(PAGE_SIZE)


@pytest.mark.parametrize("length", [1, 7, MAX_PADDED_ROWS, MAX_PADDED_ROWS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_written_out_attention_is_the_fused_one(length: int, dtype: torch.dtype) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_qkv(length, 3, dtype))
    bias = torch.zeros(length, length, dtype=dtype).masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
    fused = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias[None, None], scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    written = attend_explicit(q, k, v, bias[None, None], 0.3, None, None)
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(written, fused, rtol=0, atol=bound)


def test_contiguous_pages_and_scattered_ones_give_the_same_bits() -> None:
    # the slice and the gather read the same numbers in the same order
    results = []
    for pages in ([2, 3, 4], [9, 2, 5]):
        pool = KVPool()
        for start, rows in ((0, 7), (7, 3)):
            window = ForwardBatch.build([Span(pages, start, [7] * rows, range(rows))], [0], PAGE_SIZE, "cpu")
            results.append(attend(window, pool, make_qkv(rows, start)))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_padding_takes_nothing_from_the_null_page_even_if_another_request_holds_infinities() -> None:
    pool = KVPool()
    short, long = Span([1], 0, [7], [0]), Span([2, 3], 0, [7] * 6, range(6))
    q, k, v = make_qkv(7, 1)
    alone = attend(
        ForwardBatch.build([short], [0], PAGE_SIZE, "cpu"), KVPool(), (q[:, :, :1], k[:, :, :1], v[:, :, :1])
    )
    k[:, :, 1:], v[:, :, 1:] = torch.inf, torch.nan  # a broken request spoils itself alone
    both = attend(ForwardBatch.build([short, long], [0], PAGE_SIZE, "cpu"), pool, (q, k, v))
    torch.testing.assert_close(both[:1], alone, rtol=0, atol=1e-12)
    assert both[1:].isnan().any()


def test_pages_left_with_nan_by_a_broken_request_do_not_spoil_the_next() -> None:
    # a page is handed on as it is; its rows are read only once they are written
    pool = KVPool()
    q, k, v = make_qkv(8, 1)
    attend(ForwardBatch.build([Span([1, 2], 0, [7] * 8, range(8))], [0], PAGE_SIZE, "cpu"), pool, (q, k * torch.nan, v))
    spans = [Span([1], 0, [7], [0]), Span([2], 0, [7] * 3, range(3))]
    q, k, v = make_qkv(4, 2)
    out = attend(ForwardBatch.build(spans, [0], PAGE_SIZE, "cpu"), pool, (q, k, v))
    assert out.isfinite().all()


def test_a_model_called_without_a_window_says_what_to_do() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY))
    HFModel.wrap_model(model, "llama")
    with pytest.raises(RuntimeError, match=r"call model\.set_attn_impl"):
        model(input_ids=torch.tensor([[1, 2]]))
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.tensor([[1, 2]]))
