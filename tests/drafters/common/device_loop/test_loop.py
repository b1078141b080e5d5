"""Recorded draft loops: the drafts, q and KV of growth level by level, for every network and shape."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from foredraft.drafters.common.feature_drafter import FeatureDrafter, FeatureLoopNetwork
from foredraft.drafters.common.static_tree import StaticTree
from foredraft.drafters.common.tree_builder import TreeOptions, TreeSpec
from foredraft.drafters.draft_model.drafter import DraftModel, DraftModelLoopNetwork
from foredraft.drafters.eagle.checkpoint import EagleShape
from foredraft.drafters.eagle.network import EagleNetwork
from foredraft.drafters.eagle3.network import Eagle3Network
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.drafters.method import DrafterContext
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.models.feature_lm import FeatureLM
from foredraft.sampling.params import Sampling
from tests.support import tiny_models
from tests.support.draft_loops import Twins, give_kernels, make_loop

BLOCK = DraftLayerShape(hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8)
SIZE, FEW = tiny_models.VOCAB, 40
LOPSIDED = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]])
SHAPES: dict[str, Callable[[int], TreeSpec]] = {
    "chain": lambda depth: TreeSpec.from_options(depth),
    "static": lambda depth: TreeSpec.from_static_tree(LOPSIDED),
    "dynamic": lambda depth: TreeSpec.from_options(depth, tree_nodes=9, top_k=3),
}
STOPS = tuple(range(5))  # so many that drafts meet them
GREEDY = Sampling(max_tokens=60, temperature=0, stop_token_ids=STOPS)
SAMPLED = Sampling(max_tokens=60, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, stop_token_ids=STOPS[:2])


def scatter_weights(network: Any) -> Any:
    torch.manual_seed(5)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
        elif "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return network.double().eval().requires_grad_(False)


@cache
def make_network(name: str) -> Any:
    target = tiny_models.plain().target
    if name == "eagle":
        return scatter_weights(EagleNetwork(EagleShape(BLOCK, SIZE), target))
    shape = Eagle3Shape(BLOCK, SIZE, draft_vocab_size=FEW, target_hidden=32, hidden_layers=(1, 2))
    network = scatter_weights(Eagle3Network(shape, target))
    network.d2t.copy_(torch.randperm(SIZE)[:FEW].sort().values - torch.arange(FEW))
    return network


def make_context(depth: int) -> DrafterContext:
    target = tiny_models.plain().target
    return DrafterContext(SIZE, target, depth, dtype=torch.float64)


def make_feature_twins(name: str, spec: TreeSpec) -> Twins:
    network = make_network(name)
    ids = getattr(network, "token_ids", None)
    made = []
    for _ in range(2):
        lm = FeatureLM(network, torch.float64)
        give_kernels(lm.pool)
        taps = getattr(network.shape, "hidden_layers", (-1,))
        made.append(FeatureDrafter(lm, taps, spec, make_context(spec.max_depth), ids))
    looping = made[0]
    looping.loop = make_loop(FeatureLoopNetwork(looping.lm, SIZE, ids), spec, looping.lm.pool)
    return Twins(*made, width=32 * len(looping.spec.hidden_layers), vocab_size=SIZE)


def make_model_twins(spec: TreeSpec) -> Twins:
    made = []
    for _ in range(2):
        drafter = tiny_models.draft_model(spec.max_depth, options=TreeOptions())
        drafter.tree_spec = spec
        give_kernels(drafter.lm.pool)
        made.append(drafter)
    made[0].loop = make_loop(DraftModelLoopNetwork(made[0].lm, SIZE), spec, made[0].lm.pool)
    return Twins(*made, width=32, vocab_size=SIZE)


def make_twins(name: str, spec: TreeSpec) -> Twins:
    return make_model_twins(spec) if name == "draft_model" else make_feature_twins(name, spec)


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "draft_model"])
def test_loop_drafts_what_levels_draft(name: str, shape: str, rule: str) -> None:
    twins = make_twins(name, SHAPES[shape](4))
    for sampling in (GREEDY, SAMPLED, SAMPLED):
        twins.add(sampling, rule)
    twins.start([2, 9, 5])
    for budgets in ([9, 9, 9], [4, 0, 9], [9, 3, 1], [9, 9, 6]):
        twins.step(budgets)
    assert twins.looping.loop.num_replays == 4
    assert not twins.looping.loop.refusals
