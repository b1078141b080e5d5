"""Recorded draft loops: the drafts, q and KV of growth level by level, for every network and shape."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from foredraft.drafters.common.device_loop.plan import LoopPlan, plan_loop
from foredraft.drafters.common.step_drafter import GrowingStepDraft
from foredraft.drafters.common.tree_builder import TreeBuilder, TreeSpec
from foredraft.drafters.eagle.network import EagleNetwork
from foredraft.kernels.gpu.graphs import CallingRecorder
from foredraft.models.hf import HFModel
from foredraft.verification.registry import RULES
from tests.support import tiny_models
from tests.support.loop_heads import (
    BUDGETS,
    CHAIN,
    DYNAMIC,
    GREEDY,
    HEADS,
    SAMPLED,
    SHAPES,
    STATIC,
    make_twins,
    run_steps,
)
from tests.support.no_waits import StrictRecorder, wrap_kernels
from tests.support.pretend_gpu import DEVICE, pretend_gpu
from tests.support.requests import make_request


@pytest.fixture(autouse=True)
def grow_greedy_chains_as_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy chains of heads on states have a shorter way on the CPU, which does not end at end ids."""
    monkeypatch.setattr(GrowingStepDraft, "is_greedy_chain", False)


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "title", [pytest.param("eagle", marks=pytest.mark.soak), "eagle3", "draft_model", "mlp_speculator"]
)
def test_loop_drafts_what_levels_draft(title: str, shape: str, rule: str) -> None:
    twins = make_twins(title, 4, SHAPES[shape])
    trees = run_steps(twins, [(GREEDY, rule), (SAMPLED, rule), (SAMPLED, rule)], BUDGETS)
    loop = twins.looping.loop
    assert (loop.num_replays, loop.refusals) == (len(BUDGETS), {})
    assert sum(len(tokens) - 1 for tree in trees for tokens in tree.tokens) > 12


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize(
    ("title", "options"),
    [("hydra", STATIC), ("hydra++", DYNAMIC), ("blockwise", CHAIN), ("medusa", CHAIN), ("medusa", {"tree_nodes": 12})],
)
def test_heads_on_states_draft_what_levels_draft(title: str, options: Mapping[str, Any], rule: str) -> None:
    twins = make_twins(title, 4, options)
    run_steps(twins, [(GREEDY, rule), (SAMPLED, rule), (SAMPLED, rule)], BUDGETS)
    assert twins.looping.loop.num_replays == len(BUDGETS)


@pytest.mark.parametrize("depth", [1, 2, 6])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_padding_and_depth(count: int, depth: int) -> None:
    twins = make_twins("eagle", depth, [CHAIN, DYNAMIC][count % 2])
    budget = [9 - 2 * i for i in range(count)]
    run_steps(twins, [(GREEDY, "match")] * count, [budget, budget[::-1]])
    assert twins.looping.loop.num_replays == 2


@pytest.mark.soak
@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("title", ["eagle", "eagle3", "draft_model", "mlp_speculator"])
def test_every_padding_and_depth(title: str, shape: str, count: int, depth: int) -> None:
    twins = make_twins(title, depth, {"branching": (3, 2, 1, 2, 1, 1)[:depth]} if shape == "static" else SHAPES[shape])
    kinds = [(GREEDY, "match"), (SAMPLED, "reject"), (SAMPLED, "match"), (replace(SAMPLED, top_k=0), "typical")]
    kinds = [kind for i in range(count) for kind in [kinds[i % len(kinds)]]]
    run_steps(twins, kinds, [[1 + (5 * i + 3 * b) % 9 for b in range(count)] for i in range(4)])
    assert twins.looping.loop.num_replays == 4


@pytest.mark.parametrize("options", [CHAIN, STATIC, DYNAMIC])
def test_requests_of_all_rules_in_one_batch(options: Mapping[str, Any]) -> None:
    twins = make_twins("eagle", 4, options)
    kinds = [(GREEDY, "match"), (SAMPLED, "reject"), (replace(SAMPLED, top_p=1.0), "match"), (SAMPLED, "typical")]
    kinds += [] if options is DYNAMIC else [(SAMPLED, "block")]  # drafts chains: a part of a fixed tree alone
    run_steps(twins, kinds, [[9] * len(kinds), [3] * len(kinds)])
    assert twins.looping.loop.num_replays == 2


def test_trees_wider_than_the_vocabulary_of_the_head() -> None:
    run_steps(make_twins("eagle3", 2, {"tree_nodes": 60, "top_k": 50}), [(GREEDY, "match")], [[60]])


@pytest.mark.parametrize("options", SHAPES.values())
def test_drafts_end_at_the_depth_of_their_request(options: Mapping[str, Any]) -> None:
    twins = make_twins("eagle3", 4, options)
    short = [(replace(sampling, max_tokens=length), "reject") for sampling, length in ((GREEDY, 4), (SAMPLED, 10))]
    run_steps(twins, [(GREEDY, "match"), *short], [[9, 9, 9]])  # 1 and 8 tokens are committed


def test_noise_of_a_merged_draft_has_its_stream() -> None:
    twins = make_twins("eagle3", 3, STATIC)
    run_steps(twins, [(SAMPLED, "reject"), (SAMPLED, "match")], [])
    twins.step([9, 9], stream=2)
    assert twins.looping.loop.num_replays == 1


@torch.inference_mode()
def test_invalid_logits_end_a_draft_and_no_other() -> None:
    twins = make_twins("eagle", 3, DYNAMIC)
    run_steps(twins, [(GREEDY, "match"), (GREEDY, "match"), (SAMPLED, "reject")], [])
    for drafter in (twins.looping, twins.reference):
        last = drafter._pending[1].features[-1]
        last.rows[last.indices[-1]] = torch.nan
    tree = twins.step([9, 9, 9])
    assert [len(tokens) > 1 for tokens in tree.tokens] == [True, False, True]


@pytest.mark.parametrize(("title", "options"), [("eagle", DYNAMIC), ("medusa", {"tree_nodes": 9})])
def test_q_outlives_the_next_replay(title: str, options: Mapping[str, Any]) -> None:
    twins = make_twins(title, 3, options)
    first = run_steps(twins, [(SAMPLED, "reject")], [[9]])[0].q
    kept = first.clone()
    twins.step([9])
    assert twins.looping.loop.num_replays == 2
    assert torch.equal(first, kept)


SOAKED = {"eagle", "hydra++", "blockwise"}  # their parts are those of others


@pytest.mark.parametrize(
    "title", [pytest.param(x, marks=pytest.mark.soak) if x in SOAKED else x for x in [*HEADS, "draft_model"]]
)
def test_loops_neither_wait_nor_copy(title: str) -> None:
    """On a pretended GPU, where tensors of two devices cannot meet."""
    with pretend_gpu():
        options = {"medusa": {"tree_nodes": 6}, "blockwise": CHAIN}.get(title, {"tree_nodes": 5, "top_k": 2})
        target = HFModel.wrap_model(tiny_models.move_copy(tiny_models.target(), DEVICE), "tiny")
        twins = make_twins(title, 2, options, target, recorder=StrictRecorder(), kernels=wrap_kernels())
        run_steps(twins, [(GREEDY, "match"), (SAMPLED, "reject")], [[5, 5]])
        assert twins.looping.loop.num_replays == 1


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 1],
        lambda x: x.cpu(),
        lambda x: x if x.max() > 1 else -x,
        lambda x: torch.full_like(x, x.tolist()[0]),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.tensor([1.0], device="cuda"),
    ],
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_wait_in_a_recording_is_found(run: Any, is_inference: bool) -> None:
    with pretend_gpu(), torch.inference_mode(is_inference):
        x = torch.arange(3.0, device="cuda")
        with pytest.raises(AssertionError, match=r"waits|copies|counts"):
            StrictRecorder().record(lambda: (run(x),))


class RefusingRecorder(CallingRecorder):
    """Recorder of a model that waits for the device."""

    def record(self, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_loop_that_cannot_be_recorded_drafts_level_by_level(caplog: pytest.LogCaptureFixture) -> None:
    twins = make_twins("eagle", 3, DYNAMIC, recorder=RefusingRecorder())
    run_steps(twins, [(GREEDY, "match"), (SAMPLED, "reject")], [[9, 9], [9, 3]])
    assert twins.looping.loop.refusals == {"a pass that cannot be recorded": 2}
    assert len([r for r in caplog.records if "not permitted" in r.message]) == 1  # said once


@pytest.mark.parametrize(
    ("kinds", "options", "reason"),
    [
        ([(replace(GREEDY, frequency_penalty=0.5), "match")], CHAIN, "logits that depend"),
        ([(replace(SAMPLED, typical_p=0.5), "match")], CHAIN, "typical_p"),
        ([(GREEDY, "match")], {"min_confidence": 0.01}, "min_confidence"),
        ([(SAMPLED, "spectr")], {"num_drafts": 3}, "sampled independently"),
        ([(GREEDY, "match"), (SAMPLED, "block")], DYNAMIC, "different kinds"),
    ],
)
def test_what_the_loop_does_not_take_grows_level_by_level(kinds: Any, options: Mapping[str, Any], reason: str) -> None:
    twins = make_twins("eagle", 2, options)
    run_steps(twins, kinds, [[5] * len(kinds)])
    loop = twins.looping.loop
    assert loop.num_replays == 0
    assert [reason in found for found in loop.refusals] == [True]


def test_a_recording_has_64_drafts_at_most() -> None:
    spec = TreeSpec.from_options(3)
    builder = TreeBuilder(make_request(0, [1], GREEDY), spec)
    plan = plan_loop([builder] * 33, spec, None, 100)
    assert isinstance(plan, LoopPlan)
    assert plan.num_requests == 64
    assert plan_loop([builder] * 65, spec, None, 100) == "more than 64 drafts at once"


def test_equally_likely_nodes_rank_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = EagleNetwork.compute_logits
    monkeypatch.setattr(EagleNetwork, "compute_logits", lambda self, states: compute(self, states) * 0)
    run_steps(make_twins("eagle", 4, DYNAMIC), [(GREEDY, "match"), (SAMPLED, "reject")], [[9, 9]])


def test_q_of_a_recording_is_limited() -> None:
    tree = TreeSpec.from_options(6, tree_nodes=60, top_k=10)
    builder = TreeBuilder(make_request(0, [1], SAMPLED, rule=RULES["reject"]), tree)
    assert isinstance(plan_loop([builder] * 2, tree, None, 128_000), LoopPlan)
    assert plan_loop([builder] * 40, tree, None, 128_000) == "probabilities of too many nodes at once"


def test_recordings_are_made_anew_if_the_kv_cache_moved() -> None:
    twins = make_twins("draft_model", 3, CHAIN)
    run_steps(twins, [(GREEDY, "match")], [[3]])
    with mock.patch.object(CallingRecorder, "record", autospec=True, side_effect=CallingRecorder.record) as record:
        twins.step([3])
        assert not record.called
    for drafter in (twins.looping, twins.reference):
        drafter.forget([0])
        drafter.lm.pool.clear()
    with mock.patch.object(CallingRecorder, "record", autospec=True, side_effect=CallingRecorder.record) as record:
        twins.step([3])
        assert record.called
    assert twins.looping.loop.num_replays == 3


def test_a_kv_cache_that_may_grow_is_not_recorded() -> None:
    twins = make_twins("eagle", 3, CHAIN)
    twins.looping.lm.pool.is_whole = twins.reference.lm.pool.is_whole = False
    run_steps(twins, [(GREEDY, "match")], [[3]])
    assert twins.looping.loop.refusals == {"a KV cache that may still grow": 1}
