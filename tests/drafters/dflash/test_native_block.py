"""Blocks and context rows of the native code against those of torch's operators.

Guards against rows of a block that see too few or too many rows, and blocks whose rows lie beyond a request's pages.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import Sampling
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.dflash.drafter import DFlash
from foredraft.drafters.dflash.network import DFlashNetwork
from foredraft.drafters.dflash.shape import DFlashShape
from foredraft.drafters.method import DrafterContext
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.models.hf import HFModel
from foredraft.path_features import PathFeatures
from foredraft.request import Batch, Request
from foredraft.tree import Commit
from tests.support import tiny_models
from tests.support.requests import make_request

HIDDEN, PAGE, SIZE = 64, 4, 6
PAGES = ([5, 2, 7], [3, 1])  # of two requests; their blocks end behind the last page
LENGTHS = (10, 6)  # tokens with states
CASES = {
    "both ways": {},
    "causal": {"causal_layers": (True, True)},
    "windows": {"windows": (3, 5)},
    "norms of heads, Markov head": {"has_qk_norm": True, "markov_rank": 16},
    "bias": {"has_qkv_bias": True},
}


def make_target() -> HFModel:
    return HFModel.wrap_model(tiny_models.llama(hidden=HIDDEN).float().cpu(), "the-target", is_fused=True)


def make_network(
    target: HFModel, *, causal_layers: tuple[bool, ...] = (), windows: tuple[int, ...] = (), markov_rank: int = 0,
    **block: Any,
) -> DFlashNetwork:  # fmt: skip
    """Make a network of random weights; two of one target are equal."""
    layer = DraftLayerShape(HIDDEN, 48, 2, 1, 16, sliding_windows=windows, **block)
    shape = DFlashShape(
        layer, target.vocab_size, (1, 2), 2, SIZE, 3, causal_layers=causal_layers, markov_rank=markov_rank
    )
    torch.manual_seed(1)
    network = DFlashNetwork(shape, target)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def make_drafter(target: HFModel, is_native: bool, **shape: Any) -> DFlash:
    network = make_network(target, **shape)
    context = DrafterContext(target.vocab_size, target, dtype=torch.float32, fused=is_native)
    spec = TreeSpec(max_nodes=SIZE - 1, max_depth=SIZE - 1, width=1)
    return DFlash(network, spec, context)


def observe(drafter: DFlash, requests: list[Request], states: list[Tensor]) -> None:
    padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    tokens = [[request.get_token(i + 1) for i in range(n)] for request, n in zip(requests, LENGTHS, strict=True)]
    commit = Commit([list(range(n)) for n in LENGTHS], tokens, PathFeatures.from_padded(padded, LENGTHS))
    drafter.observe(Batch(tuple(requests), LENGTHS, (0,) * len(LENGTHS), PAGE), commit)


@pytest.mark.parametrize("case", CASES)
def test_native_states_are_those_of_the_formulas(case: str) -> None:
    target = make_target()
    if target.fused is None:
        pytest.skip("the native kernels are not built")
    g = torch.Generator().manual_seed(3)
    states = [torch.randn(n, 2 * HIDDEN, generator=g) for n in LENGTHS]
    tokens = [torch.randint(0, target.vocab_size, (n + 1,), generator=g).tolist() for n in LENGTHS]
    results = []
    for is_native in (False, True):
        drafter = make_drafter(target, is_native, **CASES[case])
        assert (drafter.native is not None) is is_native
        assert drafter.spec.is_native is is_native
        requests = [make_request(i, tokens[i], Sampling(), pages=PAGES[i]) for i in range(2)]
        observe(drafter, requests, states)
        found = drafter.compute_states(requests, PAGE, SIZE - 1)
        again = drafter.compute_states(requests[::-1], PAGE, SIZE - 1).flip(0)  # the first block left no trace
        torch.testing.assert_close(again, found)
        results.append((found, drafter.network.compute_logits(found)))
    for native, reference in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(native, reference, rtol=2e-4, atol=2e-4)


def test_a_block_writes_to_no_page_that_another_request_has() -> None:
    target = make_target()
    if target.fused is None:
        pytest.skip("the native kernels are not built")
    drafter = make_drafter(target, is_native=True)
    g = torch.Generator().manual_seed(3)
    states = [torch.randn(n, 2 * HIDDEN, generator=g) for n in LENGTHS]
    requests = [make_request(i, [1] * (n + 1), Sampling(), pages=PAGES[i]) for i, n in enumerate(LENGTHS)]
    observe(drafter, requests, states)
    with torch.inference_mode():
        drafter.rows.write_pending([0, 1])
    before = [tensor.clone() for pair in drafter.rows.draft_kv.pool.layers.values() for tensor in pair]
    drafter.compute_states(requests[:1], PAGE, SIZE - 1)
    after = [tensor for pair in drafter.rows.draft_kv.pool.layers.values() for tensor in pair]
    free = list(range(7 * PAGE + LENGTHS[0] % PAGE, 8 * PAGE))  # of request 0, behind its committed tokens
    kept = [slot for page in (0, 1, 2, 3, 5, 7) for slot in range(page * PAGE, (page + 1) * PAGE) if slot not in free]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[kept], old[kept])


def test_heads_with_causal_and_other_layers_run_on_torch() -> None:
    target = make_target()
    assert make_drafter(target, is_native=True, causal_layers=(True, False)).native is None
