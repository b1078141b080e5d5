"""Untrained heads of every method with a draft loop, as twins: one with a loop, one without."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.registry import load_methods
from foredraft.models.hf import HFModel
from foredraft.sampling.params import Sampling
from tests.support import tiny_models
from tests.support.draft_loops import Twins, make_pair

VOCAB = tiny_models.VOCAB
# Training settings that make an untrained head, by title.
HEADS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {"taps": (1,), "draft_vocab_size": 40}),
    "mlp_speculator": ("mlp_speculator", {"n_predict": 6, "inner": 24}),
    "lstm speculator": ("mlp_speculator", {"n_predict": 6, "inner": 24, "cell": "lstm"}),
    "hydra": ("hydra", {"heads": 6}),
    "hydra++": ("hydra", {"heads": 6, "prefix": True}),
    "blockwise": ("blockwise", {"heads": 6, "inner": 16}),
    "medusa": ("medusa", {"heads": 6, "layers": 2}),
}
CHAIN, STATIC, DYNAMIC = {}, {"branching": (3, 2, 1, 1)}, {"tree_nodes": 9, "top_k": 3}
SHAPES: dict[str, Mapping[str, Any]] = {"chain": CHAIN, "static": STATIC, "dynamic": DYNAMIC}
STOPS = tuple(range(4))
GREEDY = Sampling(max_tokens=90, temperature=0, stop_token_ids=STOPS)
SAMPLED = Sampling(max_tokens=90, temperature=6.0, top_k=20, top_p=0.95, min_p=0.01, stop_token_ids=STOPS[:2])
BUDGETS = ([9, 9, 9], [4, 0, 9], [9, 3, 1])


@cache
def make_weights(title: str) -> tuple[Any, dict[str, Tensor]]:
    """Make the shape and large random weights of a head, so that no two tokens have similar states."""
    name, settings = HEADS[title]
    training = load_methods()[name].training
    assert training is not None
    assert training.create_trainee is not None
    torch.manual_seed(5)
    trainee: Any = training.create_trainee(training.config(loss="ce", **settings), tiny_models.plain().target, None)
    network = trainee.network
    if trainee.spec.prepare is not None:
        trainee.spec.prepare(torch.arange(VOCAB) % 7)
    for weight_name, weight in network.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.4)
        elif "norm" in weight_name:
            nn.init.uniform_(weight, 0.5, 1.5)
    return network.shape, {key: x.double() if x.is_floating_point() else x for key, x in network.state_dict().items()}


def make_twins(title: str, depth: int, options: Mapping[str, Any], target: HFModel | None = None, **how: Any) -> Twins:
    """Make twins of a head, or of a draft model; `how` goes to `make_pair`."""
    target = target or tiny_models.plain().target
    device = target.device
    if title not in HEADS:
        pair = make_pair(lambda: tiny_models.draft_model(depth, options=TreeOptions(**options), device=device), **how)
        return Twins(*pair, width=32, vocab_size=VOCAB, device=str(device))
    shape, tensors = make_weights(title)
    method = load_methods()[HEADS[title][0]]
    context = DrafterContext(VOCAB, target, depth, dtype=torch.float64, device=device, fused=False)
    checkpoint = Checkpoint(method.name, "made", "an untrained head", shape, tensors)
    make: Any = method.from_checkpoint
    pair = make_pair(lambda: make(method.config(**options), checkpoint, context), **how)
    return Twins(*pair, width=32 * len(pair[0].spec.hidden_layers), vocab_size=VOCAB, device=str(device))


def run_steps(twins: Twins, requests: Sequence[tuple[Sampling, str]], budgets: Sequence[Sequence[int]]) -> list[Any]:
    """Add requests of ragged lengths and draft with some budgets; returns the trees."""
    for sampling, rule in requests:
        twins.add(sampling, rule)
    twins.start([1 + 7 * i % 11 for i in range(len(requests))])
    return [twins.step(given) for given in budgets]
