"""EAGLE's recurrence: what is computed while drafting is what training computed, to the last digit of float64."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from foredraft import path_features
from foredraft.drafters.common import feature_drafter
from foredraft.drafters.common.feature_drafter import FeatureDrafter
from foredraft.drafters.common.training_time_test import unroll
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.eagle import network as eagle
from foredraft.drafters.eagle.checkpoint import EagleShape
from foredraft.drafters.eagle3 import network as eagle3
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.drafters.method import DrafterContext
from foredraft.kv.allocator import PageAllocator
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.models.feature_lm import FeatureLM
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.request import Batch, Request
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit
from tests.support import tiny_models
from tests.support.requests import make_request

BLOCK = DraftLayerShape(hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8)
GREEDY = Sampling(max_tokens=64, temperature=0, ignore_eos=True)


def _scatter_weights(network: nn.Module) -> nn.Module:
    """Set weights so large that no two tokens have similar states."""
    torch.manual_seed(5)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
        elif "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return network.double().eval().requires_grad_(False)


@cache
def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    target = tiny_models.plain().target
    size = target.vocab_size
    shapes = {
        "eagle": EagleShape(BLOCK, size),
        "eagle, two layers, bias": EagleShape(BLOCK, size, num_layers=2, has_fc_bias=True),
    }
    made: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        name: (eagle.EagleNetwork(shape, target), (AFTER_FINAL_NORM,)) for name, shape in shapes.items()
    }
    taps = (1, 2)
    for name, more in {
        "eagle3": {},
        "eagle3, two layers": {"num_layers": 2},
        "eagle3, norms": {"norm_before_residual": True, "norm_before_fc": True, "feeds_normed": True},
        "eagle3, chunk norms": {"has_fc_norm": True, "has_fc_bias": True},
        "eagle3, few tokens": {"draft_vocab_size": 40},
        "eagle3, target's head": {"has_own_head": False},
    }.items():
        shape = Eagle3Shape(
            BLOCK, size, **({"draft_vocab_size": size, "target_hidden": 32, "hidden_layers": taps} | more)
        )
        made[name] = eagle3.Eagle3Network(shape, target), taps
    for network, _ in made.values():
        _scatter_weights(network)
    torch.manual_seed(6)
    few = made["eagle3, few tokens"][0]
    few.d2t.copy_(torch.randperm(size)[:40].sort().values - torch.arange(40))
    return made


def drafter(name: str, plan: TreeSpec) -> FeatureDrafter:
    network, taps = networks()[name]
    target = tiny_models.plain().target
    context = DrafterContext(vocab_size=target.vocab_size, target=target, dtype=torch.float64)
    return FeatureDrafter(FeatureLM(network, torch.float64), taps, plan, context, getattr(network, "token_ids", None))


def request(slot: int, tokens: list[int], pages: list[int]) -> Request:
    return make_request(slot, tokens, GREEDY, pages=pages)


class Played:
    """Sequences that a target commits piece by piece, with random states: tests check which state is read."""

    def __init__(self, made: FeatureDrafter, lengths: list[int], width: int) -> None:
        generator = torch.Generator().manual_seed(7)
        size = made.context.vocab_size
        self.drafter = made
        self.texts = [torch.randint(0, size, (60,), generator=generator).tolist() for _ in lengths]
        self.features = torch.randn(len(lengths), 60, width, generator=generator, dtype=torch.float64)
        allocator = PageAllocator(64, 16)
        self.requests = []
        for slot, text in enumerate(self.texts):
            pages: list[int] = []
            allocator.grow(pages, 90)
            self.requests.append(request(slot, text[:1], pages))

    def commit(self, counts: list[int]) -> None:
        """Commit the given number of further positions of every sequence."""
        batch = Batch(tuple(self.requests), tuple(1 for _ in counts), tuple(0 for _ in counts))
        starts = [r.num_computed for r in self.requests]
        paths = [list(range(n)) for n in counts]
        tokens = [text[s + 1 : s + 1 + n] for text, s, n in zip(self.texts, starts, counts, strict=True)]
        at_path = torch.zeros(len(counts), max(counts), self.features.shape[-1], dtype=torch.float64)
        for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
            at_path[b, :n] = self.features[b, start : start + n]
        self.drafter.observe(batch, Commit.from_lists(paths, tokens, features=at_path))
        for r, new, n in zip(self.requests, tokens, counts, strict=True):
            r.output += new
            r.num_computed += n

    def drafts(self, budget: int) -> list[list[int]]:
        batch = Batch(tuple(self.requests), tuple(1 for _ in self.requests), tuple(budget for _ in self.requests))
        return [row[1:] for row in self.drafter.propose(batch).tokens]


def unroll_argmax(name: str, text: list[int], features: Tensor, drafted: list[int]) -> list[int]:
    """Compute the likeliest token of every training step at the last true pair, for a sequence and its draft."""
    network, _ = networks()[name]
    n, steps = len(text), len(drafted)
    tokens = torch.tensor([[*text, *drafted]])
    padded = torch.cat([features[: n - 1], torch.zeros(steps, features.shape[-1], dtype=torch.float64)])[None]
    log_probs = TargetLogProbs.from_logits(torch.zeros(1, padded.shape[1], 2))
    trace = Trace(tokens, padded, log_probs, torch.ones_like(tokens, dtype=torch.bool))
    rows = [step.logits[0, n - 2] for step in unroll(network, trace, network.project_features(padded), steps)]
    ids = getattr(network, "token_ids", None)
    best = [int(row.argmax()) for row in rows]
    return best if ids is None else ids[best].tolist()


@pytest.mark.parametrize("name", networks())
def test_a_chain_is_what_training_unrolled(name: str) -> None:
    """Wrong positions, pairs shifted by one, stale memory of drafts and a missing fc all change some token here."""
    made = drafter(name, TreeSpec.from_options(4))
    played = Played(made, [1, 1, 1], len(made.spec.hidden_layers) * 32)
    for counts in ([5, 20, 1], [1, 3, 2], [4, 1, 1], [2, 2, 9]):
        played.commit(counts)
        for r, features, drafted in zip(played.requests, played.features, played.drafts(4), strict=True):
            assert len(drafted) == 4
            assert drafted == unroll_argmax(name, r.tokens, features, drafted), f"after {r.num_tokens} tokens"


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3, two layers"])
@pytest.mark.parametrize(
    "plan",
    [TreeSpec.from_options(4, 14, 3), TreeSpec.from_options(4, branching=(3, 2, 1, 2))],
    ids=["dynamic", "fixed"],
)
def test_every_path_of_a_tree_is_what_a_chain_would_be(name: str, plan: TreeSpec) -> None:
    """A branch that saw its sibling's memory, or another parent's output, would not."""
    made = drafter(name, plan)
    played = Played(made, [1, 1], len(made.spec.hidden_layers) * 32)
    played.commit([12, 30])
    played.drafts(40)
    played.commit([2, 1])
    batch = Batch(tuple(played.requests), (1, 1), (40, 40))
    tree = made.propose(batch)
    network = networks()[name][0]
    for b, r in enumerate(played.requests):
        depths, tokens = tree.depths[b], tree.tokens[b]
        assert max(depths) > 2
        for node in range(1, len(tokens)):
            path = tree.get_draft_path(b, node)
            rows = _rows(network, r.tokens, played.features[b], path)
            order = rows[len(path) - 1].topk(3).indices.tolist()
            assert tokens[node] in order[: plan.width], f"node {node}"
            elder = [c for c in tree.children[b][tree.parents[b][node]] if c < node]
            if not elder:
                assert tokens[node] == order[0]


def _rows(network: nn.Module, text: list[int], features: Tensor, path: list[int]) -> list[Tensor]:
    n, steps = len(text), len(path)
    tokens = torch.tensor([[*text, *path]])
    padded = torch.cat([features[: n - 1], torch.zeros(steps, features.shape[-1], dtype=torch.float64)])[None]
    log_probs = TargetLogProbs.from_logits(torch.zeros(1, padded.shape[1], 2))
    trace = Trace(tokens, padded, log_probs, torch.ones_like(tokens, dtype=torch.bool))
    return [step.logits[0, n - 2] for step in unroll(network, trace, network.project_features(padded), steps)]


def test_a_gap_in_what_was_seen_ends_drafting_for_that_text_alone() -> None:
    made = drafter("eagle", TreeSpec.from_options(3))
    played = Played(made, [1, 1], 32)
    played.commit([8, 8])
    played.requests[0].num_computed += 1  # a position that the drafter never saw
    played.requests[0].output.append(3)
    played.commit([2, 2])
    first, second = played.drafts(3)
    assert first == []
    assert len(second) == 3
    made.forget([0, 1])
    assert played.drafts(3) == [[], []]


@pytest.mark.parametrize(
    "make", [lambda: TreeSpec.from_options(3, branching=()), lambda: TreeSpec.from_options(3, 4, 2, (1, 2))]
)
def test_plans_that_make_no_tree_are_refused(make: Callable[[], TreeSpec]) -> None:
    with pytest.raises(Exception, match="branching"):
        make()


def test_a_stretch_without_drafts_costs_no_pass_and_the_next_draft_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are deferred; read together, they give the same result as read one by one."""
    made, always = drafter("eagle3", TreeSpec.from_options(4)), drafter("eagle3", TreeSpec.from_options(4))
    played, drafted = Played(made, [1, 1], 64), Played(always, [1, 1], 64)
    passes = []
    forward = made.lm.forward
    monkeypatch.setattr(made.lm, "forward", lambda *args: passes.append(1) or forward(*args))
    for counts in ([5, 9], *[[1, 1]] * 20, [3, 2]):
        played.commit(counts)
        drafted.commit(counts)
        drafted.drafts(4)
        for pending in made._pending.values():
            assert len(pending.features) - pending.num_joined < feature_drafter.MAX_REFERENCES
            copies = pending.features[: pending.num_joined]
            assert all(part.rows.untyped_storage().nbytes() == part.read().nbytes for part in copies)
    assert not passes
    assert {pending.num_joined for pending in made._pending.values()} == {1}, "rows were copied once"
    assert played.drafts(4) == drafted.drafts(4)
    assert len(passes) == 4, "one to read in, and one for each level but the first"
    assert not made._pending


def test_what_is_put_off_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise states of a long sequence would pile up while no request is drafted for."""
    monkeypatch.setattr(feature_drafter, "MAX_PENDING_PAIRS", 8)
    made = drafter("eagle", TreeSpec.from_options(3))
    played = Played(made, [1, 1], 32)
    for _ in range(9):
        played.commit([2, 1])
        assert all(len(pending.tokens) < 8 for pending in made._pending.values())
        assert [made._count_observed_pairs(slot) for slot in (0, 1)] == [r.num_computed for r in played.requests]
    assert made.draft_kv.num_valid == {0: 16, 1: 8}
    made.forget([0, 1])
    assert not made._pending
    assert not made.draft_kv.num_valid


def test_settling_reads_what_completes_a_page_and_no_more() -> None:
    made = drafter("eagle", TreeSpec.from_options(3))
    played = Played(made, [1, 1], 32)
    played.commit([15, 16])
    made.flush([0, 1])
    assert made.draft_kv.num_valid == {1: 16}


def test_what_is_put_off_keeps_no_tensor_of_others_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_features, "MAX_REFERENCED_ROWS", 8)
    made = drafter("eagle", TreeSpec.from_options(3))
    played = Played(made, [1, 1], 32)
    played.commit([20, 1])
    [small] = made._pending[1].features
    assert small.rows.untyped_storage().nbytes() == small.read().nbytes


def test_a_long_chunk_that_is_put_off_keeps_no_padding_of_others_alive() -> None:
    """Fault: a view of one long chunk kept the padding of all other requests, here 4 times the rows of the chunk."""
    made = drafter("eagle", TreeSpec.from_options(3))
    played = Played(made, [1, 1, 1, 1], 32)
    played.commit([20, 1, 1, 1])
    [long] = made._pending[0].features
    assert len(long.read()) == 20
    assert long.rows.untyped_storage().nbytes() == long.read().nbytes
