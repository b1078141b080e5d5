"""EAGLE's layers as one native call: what the modules compute, and the same bits for a row in any company.

Truth is the same weights in float64, whole sequences at a time, with ordinary causal attention.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.quantize import INT8, pack
from foredraft.kv.pool import KVPool
from foredraft.models.draft_layer import (
    MLP,
    DraftAttention,
    DraftLayerShape,
    RMSNorm,
    RotaryEmbedding,
    attend_causal,
)
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.native.draft_layers import (
    JoinedInput,
    NativeDraftLayers,
    PairedInput,
    explain_unsupported,
)
from foredraft.tree import TokenTree
from tests.models.test_families import random_tree
from tests.models.test_native_decoder import as_right, size
from tests.support.families import PAGE_SIZE, VOCAB, tokens
from tests.support.library_setups import (
    EACH_SET,
    NATIVE,
    THREAD_SETUPS,
    ThreadSetup,
    make_normal,
    run_concurrently,
    use_library,
)

pytestmark = NATIVE

TINY = DraftLayerShape(hidden=48, intermediate=80, heads=4, kv_heads=2, head_dim=16, eps=1e-5)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class Layer(nn.Module):
    def __init__(self, shape: DraftLayerShape, width: int, has_input_norm: bool) -> None:
        super().__init__()
        if has_input_norm:
            self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = DraftAttention(shape, width)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)


@dataclass(frozen=True)
class Case:
    shape: DraftLayerShape = TINY
    is_paired: bool = False
    layers: int = 1
    has_fc_bias: bool = False
    has_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    width: int = VOCAB  # of the logits

    def make(self) -> "Head":
        return Head(self)


class Head(nn.Module):
    """A drafter's network the slow way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden, eps = case.shape.hidden, case.shape.eps
        self.case = case
        self.embedding = nn.Embedding(VOCAB, hidden)
        widths = [hidden * (1 + (case.is_paired and i == 0)) for i in range(case.layers)]
        self.layers = nn.ModuleList(Layer(case.shape, w, case.is_paired or i > 0) for i, w in enumerate(widths))
        self.fc = nn.Linear(2 * hidden, hidden, bias=case.has_fc_bias)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps) if case.has_norm else nn.Identity()
        self.rotary = RotaryEmbedding(case.shape)
        self.lm_head = nn.Linear(hidden, case.width, bias=False)
        for name, weight in self.named_parameters():
            if "norm" in name or name.endswith("bias"):
                nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits [T, width] and the next features [T, H] of a whole sequence."""
        e, f = self.embedding(torch.tensor(ids)), features.to(self.embedding.weight.dtype)
        turn, read = self.rotary(torch.arange(len(ids))[None], f.dtype), None
        if self.case.is_paired:
            normed = self.hidden_norm(f)
            read = torch.cat([self.layers[0].input_layernorm(e), normed], -1)
            x = normed if self.case.norm_before_residual else f
        else:
            x = read = self.fc(torch.cat([e, f], -1))
        for i, layer in enumerate(self.layers):
            read = read if i == 0 else layer.input_layernorm(x)
            x = x + layer.self_attn(read[None], turn, i, self._attend)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return self.lm_head(normed), normed if self.case.norm_output else x

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size, n = self.case.shape.get_sliding_window(layer), query.shape[1]
        if size is None:
            return attend_causal(layer, query, key, value)
        mask = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - size)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def make_fused(self, is_ours: bool = False, head: PackedWeight | None = None, **more: Any) -> NativeDraftLayers:
        layers, case = list(self.layers), self.case
        assert explain_unsupported(layers, self.embedding.weight) is None
        front = PairedInput(self.hidden_norm, case.norm_before_residual) if case.is_paired else JoinedInput(self.fc)
        norm = self.norm if case.has_norm else None
        return NativeDraftLayers.from_layers(
            layers, front, norm, case.norm_output, self.embedding.weight, head or self.lm_head.weight, case.shape,
            self.rotary, is_ours, **more,
        )  # fmt: skip


BIASES = {"has_qkv_bias": True, "has_out_bias": True}
CASES = {
    "joined": Case(),
    "joined, biases": Case(replace(TINY, **BIASES), has_fc_bias=True),
    "joined, as many key heads, a norm": Case(replace(TINY, kv_heads=4), has_norm=True),
    "joined, 3 layers, q and k normed": Case(replace(TINY, has_qk_norm=True), layers=3),
    "joined, 2 layers, a norm, output normed": Case(layers=2, has_norm=True, norm_output=True),
    "paired": Case(is_paired=True, has_norm=True, width=40),
    "paired, 2 layers, a window of 5 in the second": Case(
        replace(TINY, sliding_windows=(None, 5)), is_paired=True, has_norm=True, layers=2
    ),
    "paired, norm before residual": Case(is_paired=True, has_norm=True, norm_before_residual=True),
    "paired, output normed, llama3": Case(replace(TINY, rope=LLAMA3), is_paired=True, has_norm=True, norm_output=True),
    "paired, 2 layers, odd sizes, one key head": Case(
        DraftLayerShape(54, 41, heads=6, kv_heads=1, head_dim=32, has_qk_norm=True, **BIASES), True, layers=2,
        has_norm=True, norm_before_residual=True, norm_output=True, width=33,
    ),
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EACH = pytest.mark.parametrize("name", CASES)
EACH_TYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SOME = pytest.mark.parametrize("name", ["joined, biases", "paired", "paired, 2 layers, odd sizes, one key head"])


@cache
def modules(name: str, dtype: torch.dtype) -> Head:
    return CASES[name].make().to(dtype).eval()


@cache
def exact(name: str, dtype: torch.dtype) -> Head:
    return copy.deepcopy(modules(name, dtype)).double()


@cache
def native(name: str, dtype: torch.dtype) -> NativeDraftLayers:
    return modules(name, dtype).make_fused()


def states(name: str, count: int, seed: int) -> Tensor:
    """Make states of a target, as large as they come."""
    return 2 * make_normal(count, CASES[name].shape.hidden, seed=seed)


Chunks = dict[int, tuple[Sequence[int], Tensor]]


@dataclass
class Paged:
    """Requests by number on scattered pages of a memory of their own."""

    fused: NativeDraftLayers
    pool: KVPool = field(default_factory=lambda: KVPool(is_native=True))
    held: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shuffled = (torch.randperm(150, generator=torch.Generator().manual_seed(7)) + 1).tolist()

    def table(self, request: int) -> list[int]:
        if request not in self.tables:
            self.tables[request] = [self._shuffled.pop() for _ in range(30)]
        return self.tables[request]

    def read(self, chunks: Chunks, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        spans = []
        for request, (ids, _) in chunks.items():
            start = self.held.get(request, 0)
            spans.append(Span(self.table(request), start, list(ids), range(len(ids))))
            self.held[request] = start + len(ids)
        return self.run(spans, torch.cat([features for _, features in chunks.values()]), rows)

    def run(self, spans: Sequence[Span], features: Tensor, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        wanted = range(len(features)) if rows is None else rows
        made = self.fused.forward(ForwardBatch.build(spans, list(wanted), PAGE_SIZE, "cpu"), self.pool, features)
        self.pool.check_null_page(PAGE_SIZE)
        return made


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def concatenate(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])


def text(name: str, count: int = 50, seed: int = 0) -> tuple[list[int], Tensor]:
    return tokens(count, seed), states(name, count, seed)


def is_right(name: str, dtype: torch.dtype, ours: tuple[Tensor, Tensor], ids: Sequence[int], features: Tensor) -> None:
    """Check to 1e-5 in float32. In bfloat16, rounding may be at most twice that of the modules."""
    truth, theirs = exact(name, dtype)(ids, features), modules(name, dtype)(ids, features)
    for mine, true, other in zip(ours, truth, theirs, strict=True):
        assert mine.dtype == torch.float32
        if dtype == torch.float32:
            assert mine.shape == true.shape
            assert size(mine - true) <= 1e-5 * size(true)
        else:
            as_right(mine, other, true)


@EACH
@EACH_TYPE
def test_logits_and_features_are_those_of_the_modules(name: str, dtype: torch.dtype) -> None:
    """Prompts longer than a page are read side by side, and then their continuations."""
    texts = {b: text(name, n, seed=b) for b, n in enumerate((50, 7, 23))}
    cut = {0: 41, 1: 1, 2: 22}
    paged = Paged(native(name, dtype))
    first = paged.read({b: (ids[: cut[b]], features[: cut[b]]) for b, (ids, features) in texts.items()})
    second = paged.read({b: (ids[cut[b] :], features[cut[b] :]) for b, (ids, features) in texts.items()})
    firsts = [part.split(list(cut.values())) for part in first]
    seconds = [part.split([len(texts[b][0]) - cut[b] for b in texts]) for part in second]
    for b, (ids, features) in texts.items():
        ours = concatenate([(firsts[0][b], firsts[1][b]), (seconds[0][b], seconds[1][b])])
        is_right(name, dtype, ours, ids, features)


@EACH
@EACH_TYPE
def test_a_text_has_the_same_bits_however_it_is_cut(name: str, dtype: torch.dtype) -> None:
    ids, features = text(name)
    whole = Paged(native(name, dtype)).read({0: (ids, features)})
    for cuts in (range(51), (0, 1, 8, 45, 48, 50), (0, 33, 50)):
        paged = Paged(native(name, dtype))
        parts = [paged.read({0: (ids[a:b], features[a:b])}) for a, b in pairwise(cuts)]
        assert equal(concatenate(parts), whole)


@EACH
@EACH_TYPE
def test_a_text_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    texts = {b: text(name, n, seed=b) for b, n in enumerate((4, 41, 1, 17, 32))}
    together = Paged(native(name, dtype)).read(texts)
    assert equal(together, concatenate([Paged(native(name, dtype)).read({0: one}) for one in texts.values()]))


@EACH
@EACH_TYPE
def test_every_node_of_a_tree_has_the_bits_of_its_own_text(name: str, dtype: torch.dtype) -> None:
    """All at once, and grown level by level on top of nodes written before, as trees are drafted."""
    random, fused = Random(name), native(name, dtype)
    prefixes = {0: text(name, 13, seed=3), 1: text(name, 5, seed=4)}
    drawn = [random_tree(random, 14), random_tree(random, 9)]
    tree = TokenTree.from_lists([t for t, _ in drawn], [p for _, p in drawn])
    given = [states(name, n, seed=20 + b) for b, n in enumerate(tree.sizes)]
    paged = Paged(fused)
    paged.read(prefixes, rows=[])

    def span(b: int, first: int, last: int) -> Span:
        ids, depths, parents = tree.tokens[b][first:last], tree.depths[b][:last], tree.parents[b][:last]
        return Span(paged.table(b), len(prefixes[b][0]), ids, depths, parents, first)

    run_concurrently = paged.run([span(b, 0, n) for b, n in enumerate(tree.sizes)], torch.cat(given))
    at = 0
    for b, (ids, features) in prefixes.items():
        own = range(at, at + tree.sizes[b])
        at += tree.sizes[b]
        grown = [paged.run([span(b, i, i + 3)], given[b][i : i + 3]) for i in range(0, tree.sizes[b], 3)]
        assert equal(
            concatenate(grown), (run_concurrently[0][own.start : own.stop], run_concurrently[1][own.start : own.stop])
        )
        for node in range(tree.sizes[b]):
            path = [node]
            while tree.parents[b][path[0]] >= 0:
                path.insert(0, tree.parents[b][path[0]])
            whole = [*ids, *(tree.tokens[b][n] for n in path)], torch.cat([features, given[b][path]])
            alone = Paged(fused).read({0: whole})
            assert equal((alone[0][-1], alone[1][-1]), (run_concurrently[0][own[node]], run_concurrently[1][own[node]]))


@EACH_SET
@EACH_TYPE
@SOME
def test_on_every_instruction_set_and_every_team(instruction_set: str, dtype: torch.dtype, name: str) -> None:
    ids, features = text(name)
    fused = native(name, dtype)
    with use_library(instruction_set):
        one = Paged(fused).read({0: (ids, features)})
        is_right(name, dtype, one, ids, features)
        single = Paged(fused)
        assert equal(concatenate([single.read({0: ([t], f[None])}) for t, f in zip(ids, features, strict=True)]), one)
    for way in THREAD_SETUPS[1:]:
        with use_library(instruction_set, way):
            assert equal(Paged(fused).read({0: (ids, features)}), one)


@SOME
def test_logits_only_of_the_rows_asked_for_and_features_of_all(name: str) -> None:
    given = {0: text(name, 7), 1: text(name, 5, seed=1)}
    whole = Paged(native(name, torch.bfloat16)).read(given)
    some = Paged(native(name, torch.bfloat16)).read(given, rows=[3, 6, 11])
    assert equal(some, (whole[0][[3, 6, 11]], whole[1]))
    logits, features = Paged(native(name, torch.bfloat16)).read(given, rows=[])
    assert logits.shape == (0, CASES[name].width)
    assert torch.equal(features, whole[1])


@SOME
def test_its_own_output_is_the_next_input(name: str) -> None:
    """Drafting: a feature after another, against the modules doing the same; none of it touches what was returned."""
    ids, features = text(name, 12)
    paged, truth = Paged(native(name, torch.float32)), exact(name, torch.float32)
    logits, following = paged.read({0: (ids, features)}, rows=[11])
    kept = following.clone()
    given, features = features.double(), following[-1:]
    for token in tokens(6, seed=9):
        given = torch.cat([given, truth(ids, given)[1][-1:]])
        ids = [*ids, token]
        logits, features = paged.read({0: ([token], features)})
        assert size(logits[0] - truth(ids, given)[0][-1]) <= 2e-5 * size(logits)
    assert torch.equal(following, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_features_come_in_any_float_type_and_any_layout(dtype: torch.dtype) -> None:
    name = "paired"
    ids, features = text(name, 9)
    features = features.to(dtype)
    plain = Paged(native(name, torch.float32)).read({0: (ids, features.float())})
    strided = features.T.contiguous().T
    assert not strided.is_contiguous()
    for given in (features, strided, features.clone().requires_grad_()):
        ours = Paged(native(name, torch.float32)).read({0: (ids, given)})
        assert equal(ours, plain)
        assert not ours[1].requires_grad


def test_siblings_in_several_threads_share_weights_and_nothing_else() -> None:
    """The rotary tables, which the drafter lacks at first, grow between these lengths."""
    name = "joined"
    texts = [text(name, n, seed=i) for i, n in enumerate((40, 1100, 300, 1500))]

    def read(fused: NativeDraftLayers, one: tuple[list[int], Tensor]) -> tuple[Tensor, Tensor]:
        return Paged(fused, tables={0: list(range(1, 500))}).read({0: one}, rows=[0, len(one[0]) - 1])

    expected = [read(native(name, torch.float32), one) for one in texts]
    fresh = modules(name, torch.float32).make_fused()
    with use_library(way=ThreadSetup(2, True)):
        assert all(run_concurrently(lambda i: equal(read(fresh, texts[i]), expected[i])))


# what it is made of


@SOME
def test_a_packed_head_is_shared(name: str) -> None:
    head = modules(name, torch.bfloat16)
    packed = PackedWeight.pack(head.lm_head.weight, None, Arena())
    fused = head.make_fused(head=packed)
    assert any(weight is packed for weight in fused.decoder.weights)
    expected = Paged(native(name, torch.bfloat16)).read({0: text(name)})
    assert equal(Paged(fused).read({0: text(name)}), expected)
    scaled = Paged(head.make_fused(head=packed, logit_scale=0.25)).read({0: text(name)})
    assert equal(scaled, (expected[0] / 4, expected[1]))


def test_a_head_of_eight_bits() -> None:
    """That of a quantised target."""
    name = "joined"
    head = modules(name, torch.float32)
    ours = Paged(head.make_fused(head=pack(head.lm_head.weight, None, Arena(), INT8))).read({0: text(name)})
    plain = Paged(native(name, torch.float32)).read({0: text(name)})
    assert torch.equal(ours[1], plain[1])
    assert 0 < size(ours[0] - plain[0]) < 0.02 * size(plain[0])


@EACH
def test_layers_that_are_ours_give_up_the_weights_that_were_packed(name: str) -> None:
    head = copy.deepcopy(modules(name, torch.bfloat16))
    expected = Paged(native(name, torch.bfloat16)).read({0: text(name)})
    kept = head.make_fused(is_ours=False)
    fused = head.make_fused(is_ours=True)
    packed = [m for m in head.modules() if isinstance(m, nn.Linear) and m not in (head.lm_head, head.fc)]
    packed += [] if CASES[name].is_paired else [head.fc]
    assert all(linear.weight.numel() == 0 for linear in packed)
    assert head.lm_head.weight.numel() > 0
    for one in (kept, fused):
        assert equal(Paged(one).read({0: text(name)}), expected)


def test_an_embedding_in_another_type_than_the_layers() -> None:
    """The target's rows may be wider than a drafter's weights, or narrower."""
    name = "joined"
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        head = copy.deepcopy(modules(name, torch.bfloat16)).to(dtype)
        expected = Paged(head.make_fused()).read({0: text(name)})
        head.embedding.to(other)
        assert equal(Paged(head.make_fused()).read({0: text(name)}), expected)


# what is refused


@pytest.mark.parametrize("ids", [[5, VOCAB], [-1], [1 << 30]])
@SOME
def test_a_token_outside_the_vocabulary_is_refused(name: str, ids: list[int]) -> None:
    with pytest.raises(IndexError, match=f"outside the vocabulary of {VOCAB} tokens"):
        Paged(native(name, torch.float32)).read({0: text(name, 2), 1: (ids, states(name, len(ids), 1))})


@pytest.mark.parametrize("shape", [(2, 48), (4, 48), (3, 24), (3, 96), (1, 3, 48)])
def test_features_that_are_not_one_per_token_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[3, 48\]"):
        Paged(native("joined", torch.float32)).run([Span([1], 0, [3, 4, 5], range(3))], torch.zeros(shape), [])


def test_why_not() -> None:
    def head(dtype: torch.dtype = torch.float32, **more: Any) -> Head:
        return Case(replace(TINY, **more), layers=2).make().to(dtype)

    def reason(of: Head) -> str | None:
        return explain_unsupported(list(of.layers), of.embedding.weight)

    assert reason(head()) is None
    assert reason(head(torch.float64)) == "torch.float64 on cpu"
    assert reason(head(torch.float16)) == "torch.float16 on cpu"
    assert reason(head(head_dim=8)) == "heads of width 8"
    assert reason(copy.deepcopy(head()).to("meta")) == "torch.float32 on meta"
    mixed = head()
    mixed.layers[1].bfloat16()
    assert reason(mixed) == "layers of several types"
    odd = head()
    odd.embedding.half()
    assert reason(odd) == "torch.float16 on cpu"
