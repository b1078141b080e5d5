"""Examination of a model that computes attention in code of its own: its logits over paged KV against its own pass."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models.cache_pass import CachePass
from foredraft.models.forward_batch import ForwardBatch, Span

# Token ids of the examined sequence: the committed ones, then the trunk of a tree whose branch has the others.
TOKENS = (3, 1, 4, 1, 5, 9, 2)
BRANCH = (7, 8)
NUM_COMMITTED = 4
NUM_SHORT = 2  # tokens of a second, shorter sequence
LAST_TOKEN = 6  # another last token: no earlier row may depend on it
PAGE_SIZE = 4
# Allowed root mean square error of a row's logits, in units of their standard deviation times the root of epsilon.
MAX_ROW_ERROR = 2.0
MAX_PADDING_ERROR = 2.0  # median error of the rows with padding, in units of that without padding
# Share of rows that may differ by more in dtypes with fewer bits than float32: a router may break a near tie otherwise.
MAX_DIFFERENT_SHARE = 1 / 3


@dataclass(frozen=True)
class CacheExamination:
    """Result of an examination: a pass and its KV, or the reason why there is none."""

    cache_pass: CachePass | None
    kv_elements: int = 0  # numbers in the keys and values of one token, over all layers
    reason: str = ""


@torch.no_grad()
def examine_cache_pass(model: Any) -> CacheExamination:
    """Compare a model's logits over paged KV with those of its own pass.

    The rows over paged KV are two sequences of different lengths, then a token tree after the first and a chain after
    the second.
    """
    cache_pass = CachePass.from_model(model)
    if cache_pass is None:
        return CacheExamination(None, reason="takes no KV cache of transformers")
    whole = _compute_own_logits(model, cache_pass, TOKENS)
    if find_different_rows(whole[:-1], _compute_own_logits(model, cache_pass, (*TOKENS[:-1], LAST_TOKEN))[:-1]):
        return CacheExamination(None, reason="lets tokens attend to later tokens; only causal LMs are supported")
    branch = _compute_own_logits(model, cache_pass, (*TOKENS[: NUM_COMMITTED + 1], *BRANCH))
    n = NUM_COMMITTED
    nodes = [whole[n], branch[n + 1], whole[n + 1], branch[n + 2], whole[n + 2]]
    expected = torch.cat([whole[:n], whole[:NUM_SHORT], torch.stack(nodes), whole[NUM_SHORT:n]])
    equal_lengths = replace(cache_pass, is_padded=False)
    logits, kv_elements = _compute_paged_logits(model, equal_lengths)
    different = find_different_rows(logits, expected)
    is_exact = torch.finfo(model.dtype).eps <= torch.finfo(torch.float32).eps
    if len(different) > (0 if is_exact else MAX_DIFFERENT_SHARE * len(logits)):
        reason = "gives other logits if a text is divided into passes, so drafts would change its output"
        return CacheExamination(None, reason=reason)
    rounding = _measure_errors(logits, expected)[n:].median() + torch.finfo(model.dtype).eps
    is_padded = _measure_padding(model, cache_pass, expected) <= MAX_PADDING_ERROR * float(rounding)
    return CacheExamination(cache_pass if is_padded else equal_lengths, kv_elements)


def _measure_padding(model: Any, cache_pass: CachePass, expected: Tensor) -> float:
    """Return the median error of the rows that padding may change; infinity if the model fails with padding."""
    try:
        logits, _ = _compute_paged_logits(model, cache_pass)
    except Exception:  # the model's own code may raise any exception; it has run without padding
        return float("inf")
    return float(_measure_errors(logits, expected)[NUM_COMMITTED:].median())


def _compute_paged_logits(model: Any, cache_pass: CachePass) -> tuple[Tensor, int]:
    """Return the logits of all rows, and the numbers in the KV of one token."""
    pool = KVPool.for_device(model.device)
    pages, short_pages = [2, 1, 3], [4]
    committed = Span(pages, 0, TOKENS[:NUM_COMMITTED], range(NUM_COMMITTED))
    short = Span(short_pages, 0, TOKENS[:NUM_SHORT], range(NUM_SHORT))
    trunk = TOKENS[NUM_COMMITTED:]
    nodes = [trunk[0], BRANCH[0], trunk[1], BRANCH[1], trunk[2]]
    tree = Span(pages, NUM_COMMITTED, nodes, [0, 1, 1, 2, 2], [-1, 0, 0, 1, 2])
    rest = TOKENS[NUM_SHORT:NUM_COMMITTED]
    chain = Span(short_pages, NUM_SHORT, rest, range(len(rest)))
    passes = (ForwardBatch.from_spans(spans, PAGE_SIZE, model.device) for spans in ([committed, short], [tree, chain]))
    logits = torch.cat([cache_pass.run(model, pool, batch)[0] for batch in passes])
    return logits, sum(x[0].numel() for pair in pool.layers.values() for x in pair)


@torch.no_grad()
def run_own_pass(model: Any) -> None:
    """Run a few tokens through a model's own modules, without our cache."""
    model(input_ids=torch.tensor([TOKENS], device=model.device), use_cache=False)


def _compute_own_logits(model: Any, cache_pass: CachePass, tokens: tuple[int, ...]) -> Tensor:
    """Compute the logits [T, V] of the model's own pass over one sequence, with the inputs of `generate`."""
    ids = torch.tensor([tokens], device=model.device)
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(len(tokens), device=model.device)[None],
    }
    inputs = {name: value for name, value in inputs.items() if name in cache_pass.arguments}
    logits: Tensor = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    return logits


def find_different_rows(ours: Tensor, expected: Tensor) -> list[int]:
    """Return the rows whose logits differ by more than rounding."""
    precision = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    is_close = _measure_errors(ours, expected) <= MAX_ROW_ERROR * precision**0.5
    return [i for i, close in enumerate(is_close.tolist()) if not close]


def _measure_errors(ours: Tensor, expected: Tensor) -> Tensor:
    """Return the root mean square error of every row, in units of the standard deviation of its logits."""
    spread = expected.double().std(-1).clamp_min(torch.finfo(torch.float32).tiny)  # equal logits have none
    return (ours.double() - expected.double()).square().mean(-1).sqrt() / spread
