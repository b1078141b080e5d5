"""Chimera: drafts equal the formulas, over memory that is read piece by piece; native equals plain."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.chimera import method as chimera
from foredraft.drafters.chimera import network as chimera_network
from foredraft.drafters.chimera.checkpoint import ChimeraShape
from foredraft.drafters.chimera.drafter import Chimera
from foredraft.drafters.chimera.network import ChimeraNetwork, build_trigrams
from foredraft.drafters.chimera.training import TrainConfig, create_trainee, unroll_heads
from foredraft.drafters.common import feature_drafter
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kv.allocator import PageAllocator
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit
from tests.support import tiny_models
from tests.support.checkpoints import reference_networks
from tests.support.checkpoints.reference_networks import LayerNumbers
from tests.support.requests import make_request

BLOCK = DraftLayerShape(hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8)
NUMBERS = LayerNumbers(eps=BLOCK.eps, theta=10000.0)
GREEDY = Sampling(max_tokens=64, temperature=0, ignore_eos=True)
SHAPES = {
    "two taps": ChimeraShape(BLOCK, tiny_models.VOCAB, (1, AFTER_FINAL_NORM), num_heads=3),
    "one tap, one head": ChimeraShape(replace(BLOCK, has_qkv_bias=True), tiny_models.VOCAB, (2,), num_heads=1),
}


@cache
def network(name: str) -> ChimeraNetwork:
    """Weights so large that no two tokens are alike to it."""
    made = ChimeraNetwork(SHAPES[name], tiny_models.plain().target)
    torch.manual_seed(5)
    for key, parameter in made.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
        elif "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.3)
    made.double().eval().requires_grad_(False)
    return made


def drafter(name: str, plan: TreeSpec) -> Chimera:
    target = tiny_models.plain().target
    context = DrafterContext(vocab_size=target.vocab_size, target=target, dtype=torch.float64)
    return Chimera(network(name), plan, context)


def formula(name: str, text: Sequence[int], states: Tensor, path: Sequence[int]) -> list[Tensor]:
    """Logits [V] after the root and after every token of a path below it, straight from the weights: states [n, F] of
    all tokens of the text but the last."""
    w = network(name).state_dict()
    rows, lm_head = tiny_models.target().model.embed_tokens.weight, tiny_models.target().lm_head.weight
    tokens, n = [*text, *path], len(text) - 1
    true = states[:n] @ w["fc.weight"].T if "fc.weight" in w else states[:n]
    x = []
    for i, token in enumerate(tokens):
        read = [tokens[max(i - 2, 0)], tokens[max(i - 1, 0)], token]
        state = true[i] if i < n else reference_networks.silu(w["trigram.weight"] @ rows[read].flatten())
        x.append(w["join.weight"] @ torch.cat([rows[token], state]))
    h = torch.stack(x)
    h = h + reference_networks.attention(
        w, "layers.0.self_attn", _rms(h, w["layers.0.input_layernorm.weight"]), NUMBERS
    )
    h = h + reference_networks.mlp(w, "layers.0.mlp", _rms(h, w["layers.0.post_attention_layernorm.weight"]))
    found = []
    for depth in range(len(path) + 1):
        head = min(depth, SHAPES[name].num_heads - 1)
        pair = torch.cat([h[n + depth], true[n - 1]])
        z = h[n + depth] + reference_networks.silu(w[f"heads.{head}.weight"] @ pair + w[f"heads.{head}.bias"])
        found.append(lm_head @ _rms(z, w["norm.weight"]))
    return found


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return reference_networks.rms(x, weight, BLOCK.eps)


class Played:
    """Sequences that a target commits piece by piece, with random states: tests check which state is read."""

    def __init__(self, made: Chimera, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.drafter = made
        self.texts = [torch.randint(0, tiny_models.VOCAB, (70,), generator=generator).tolist() for _ in range(count)]
        self.features = torch.randn(
            count, 70, 32 * len(made.spec.hidden_layers), generator=generator, dtype=torch.float64
        )
        allocator = PageAllocator(64, 16)
        self.requests = []
        for slot, text in enumerate(self.texts):
            pages: list[int] = []
            allocator.grow(pages, 100)
            self.requests.append(make_request(slot, text[:1], GREEDY, pages=pages))

    def batch(self, budget: int) -> Batch:
        return Batch(tuple(self.requests), tuple(1 for _ in self.requests), tuple(budget for _ in self.requests))

    def commit(self, *counts: int) -> None:
        """Commit the given number of further positions of every sequence."""
        starts = [r.num_computed for r in self.requests]
        tokens = [text[s + 1 : s + 1 + n] for text, s, n in zip(self.texts, starts, counts, strict=True)]
        rows = torch.zeros(len(counts), max(counts), self.features.shape[-1], dtype=torch.float64)
        for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
            rows[b, :n] = self.features[b, start : start + n]
        self.drafter.observe(self.batch(0), Commit.from_lists([list(range(n)) for n in counts], tokens, features=rows))
        for r, new, n in zip(self.requests, tokens, counts, strict=True):
            r.output += new
            r.num_computed += n

    def drafts(self, budget: int) -> list[list[int]]:
        return [row[1:] for row in self.drafter.propose(self.batch(budget)).tokens]


@pytest.mark.parametrize("name", SHAPES)
def test_a_chain_is_what_the_formulas_say(name: str) -> None:
    """A state at the wrong position, a stale draft left in memory, or the head of another depth changes some token."""
    played = Played(drafter(name, TreeSpec.from_options(5)), 3)
    for counts in ((1, 5, 20), (1, 1, 3), (4, 1, 1), (2, 9, 2)):
        played.commit(*counts)
        for r, states, drafted in zip(played.requests, played.features, played.drafts(5), strict=True):
            assert len(drafted) == 5
            rows = formula(name, r.tokens, states, drafted[:-1])
            assert drafted == [int(row.argmax()) for row in rows], f"after {r.num_tokens} tokens"


@pytest.mark.parametrize(
    "plan",
    [TreeSpec.from_options(4, 14, 3), TreeSpec.from_options(4, branching=(3, 2, 1, 2))],
    ids=["dynamic", "fixed"],
)
def test_every_path_of_a_tree_is_what_a_chain_would_be(plan: TreeSpec) -> None:
    """A branch that saw its sibling, or the trigram of another path, would not."""
    played = Played(drafter("two taps", plan), 2)
    played.commit(12, 1)
    played.drafts(40)
    played.commit(2, 1)
    tree = played.drafter.propose(played.batch(40))
    for b, r in enumerate(played.requests):
        assert max(tree.depths[b]) > 2
        for node in range(1, len(tree.tokens[b])):
            path = tree.get_draft_path(b, node)
            order = formula("two taps", r.tokens, played.features[b], path[:-1])[-1].topk(3).indices.tolist()
            parent = tree.parents[b][node]
            place = [child for child in tree.children[b][parent] if child <= node]
            assert path[-1] == order[len(place) - 1], f"node {node}"


@pytest.mark.parametrize("name", SHAPES)
def test_training_sees_what_drafting_does(name: str) -> None:
    made, played = network(name), Played(drafter(name, TreeSpec.from_options(4)), 1)
    played.commit(18)
    [drafted], [request] = played.drafts(4), played.requests
    tokens = torch.tensor([[*request.tokens, *drafted]])
    states = torch.cat([played.features[:, :18], torch.zeros(1, 4, played.features.shape[-1]).double()], 1)
    trace = Trace(
        tokens, states, TargetLogProbs.from_logits(torch.zeros(1, 22, 2)), torch.ones_like(tokens, dtype=torch.bool)
    )
    rows = formula(name, request.tokens, played.features[0], drafted[:-1])
    for step, row in zip(unroll_heads(made, trace, 4), rows, strict=True):
        assert torch.allclose(step.logits[0, 17], row, atol=1e-4)  # its softmax is in float32
        assert int(step.tokens[0, 17]) == drafted[step.index]


def test_the_first_token_stands_for_those_before_it() -> None:
    assert build_trigrams(torch.tensor([[7, 8, 9, 10]])).tolist() == [[[7, 7, 7], [7, 7, 8], [7, 8, 9], [8, 9, 10]]]
    assert build_trigrams(torch.tensor([[7]])).tolist() == [[[7, 7, 7]]]


def test_a_stretch_without_drafts_costs_no_pass_and_the_next_draft_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are deferred; read together with the root, they give the same result as read one by one."""
    made, always = drafter("two taps", TreeSpec.from_options(4)), drafter("two taps", TreeSpec.from_options(4))
    played, drafted = Played(made, 2), Played(always, 2)
    passes = []
    forward = made.lm.forward
    monkeypatch.setattr(made.lm, "forward", lambda *args: passes.append(1) or forward(*args))
    for counts in ((5, 9), *[(1, 1)] * 20, (3, 2)):
        played.commit(*counts)
        drafted.commit(*counts)
        drafted.drafts(4)
    assert not passes
    assert played.drafts(4) == drafted.drafts(4)
    assert len(passes) == 4, "one for what was put off and the root, and one for each level but the first"
    assert played.drafts(4) == drafted.drafts(4), "again with nothing put off"


@torch.inference_mode()  # as in the engine; `settle` sets its own mode
def test_what_is_put_off_is_bounded_and_settles_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter("two taps", TreeSpec.from_options(3))
    played = Played(made, 2)
    played.commit(15, 16)
    made.flush([0, 1])
    assert made.draft_kv.num_valid == {1: 16}
    assert (made.draft_kv.token_lookahead, made.draft_kv.is_rebuildable_from_tokens) == (0, False)
    monkeypatch.setattr(feature_drafter, "MAX_PENDING_PAIRS", 8)
    played.commit(1, 7)
    played.commit(1, 1)
    assert made.draft_kv.num_valid == {0: 16, 1: 24}
    assert {slot: len(pending.tokens) for slot, pending in made._pending.items()} == {0: 1}
    made.forget([0, 1])
    assert not made.draft_kv.num_valid
    assert played.drafts(3) == [[], []]


def test_a_gap_in_what_was_seen_ends_drafting_for_that_text_alone() -> None:
    made = drafter("two taps", TreeSpec.from_options(3))
    played = Played(made, 2)
    played.commit(8, 8)
    played.requests[0].num_computed += 1  # a position that the drafter never saw
    played.requests[0].output.append(3)
    played.commit(2, 2)
    first, second = played.drafts(3)
    assert first == []
    assert len(second) == 3


@pytest.mark.skipif(load_library() is None, reason="no native kernels here")
@pytest.mark.parametrize(
    ("taps", "table"), [((1, AFTER_FINAL_NORM), 1 << 20), ((AFTER_FINAL_NORM,), 1 << 20), ((AFTER_FINAL_NORM,), 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_passes_give_the_numbers_of_plain_ones(
    taps: tuple[int, ...], table: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trigrams looked up and multiplied alike."""
    monkeypatch.setattr(chimera_network, "MAX_TABLE_BYTES", table)
    torch.manual_seed(0)
    target = HFModel.wrap_model(tiny_models.llama(hidden=128).to(dtype), "wide", True, is_owned=False)
    assert target.fused is not None
    torch.manual_seed(1)
    block = DraftLayerShape(hidden=128, intermediate=96, heads=4, kv_heads=2, head_dim=32)
    made = ChimeraNetwork(ChimeraShape(block, target.vocab_size, taps, 2), target)
    checkpoint = Checkpoint("chimera", "Chimera", "random heads", made.shape, made.state_dict())
    found = []
    for fused in (True, False):
        context = DrafterContext(target.vocab_size, target, 4, dtype=dtype, fused=fused)
        drafting = chimera.from_checkpoint(chimera.Config(), checkpoint, context)
        assert (drafting.lm.fused is not None) == fused
        assert drafting.head_runner.uses_table == (fused and table > 0)
        allocator, pages = PageAllocator(8, 16), []
        allocator.grow(pages, 60)
        request = make_request(0, range(5, 25), GREEDY, pages=pages)
        states = torch.randn(1, 20, 128 * len(taps), generator=torch.Generator().manual_seed(2)).to(dtype)
        batch = Batch((request,), (20,), (4,))
        drafting.observe(batch, Commit.from_lists([list(range(20))], [[*range(6, 25), 33]], features=states))
        request.output.append(33)
        request.num_computed = 20
        seen: list[Tensor] = []
        drafting.head_runner.output = _record_output(drafting.head_runner.output, seen)
        tree = drafting.propose(Batch((request,), (1,), (4,)))
        assert len(tree.tokens[0]) == 5
        found.append((seen[0].float(), seen[1].float(), tree.tokens[0]))
    (root, second, tokens), (plain_root, plain_second, plain_tokens) = found
    tolerance = 1e-3 if dtype == torch.float32 else 0.06
    assert (root - plain_root).abs().max() < tolerance * plain_root.abs().max()
    if tokens[1] == plain_tokens[1]:
        assert (second - plain_second).abs().max() < tolerance * plain_second.abs().max()
    assert dtype == torch.bfloat16 or tokens == plain_tokens


def _record_output(call, seen):
    def keeping(states: Tensor) -> Tensor:
        seen.append(call(states))
        return seen[-1]

    return keeping


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"taps": ()}, "different boundaries"),
        ({"taps": (1, 1)}, "different boundaries"),
        ({"taps": (3,)}, "between 1 and 2"),
        ({"heads": 0}, "steps and heads"),
        ({"steps": 0}, "steps and heads"),
        ({"decay": 0.0}, "decay"),
        ({"intermediate": 0}, "intermediate"),
        ({"loss": "mse"}, "unknown loss"),
    ],
)
def test_options_that_make_no_heads_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ForedraftError, match=says):
        create_trainee(TrainConfig(**options), tiny_models.plain().target)  # type: ignore[arg-type]


def test_training_begins_at_the_size_of_what_the_head_reads() -> None:
    """The scale of the input is that of the target's final norm, in whatever form the target stores it."""
    target = tiny_models.plain().target
    made = create_trainee(TrainConfig(taps=(AFTER_FINAL_NORM,)), target).network
    assert torch.allclose(made.norm.weight.double(), tiny_models.target().model.norm.weight.double(), atol=1e-6)
    encoded = made.trigram(
        made.look_up_embeddings(build_trigrams(torch.randint(0, tiny_models.VOCAB, (4, 30)))).flatten(-2)
    )
    assert 0.7 < float(encoded.detach().std()) < 1.4
