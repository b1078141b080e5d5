"""P-EAGLE heads: chains of the formulas from one pass, their folders, and training on masks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import Sampling
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.eagle3.method import METHOD
from foredraft.drafters.eagle3.training import TrainConfig, create_trainee
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from tests.drafters.dflash.test_drafter import PAGE, PAGES, observe, target
from tests.support.checkpoints import published_folders, reference_networks
from tests.support.checkpoints.published_folders import TARGET, H, V
from tests.support.checkpoints.reference_networks import Eagle3Flags, LayerNumbers
from tests.support.requests import make_request

GREEDY = Sampling(temperature=0, max_tokens=20)
LENGTHS, MASK = (9, 6), 39


def make_drafter(folder: Path, **options: Any) -> Any:
    context = DrafterContext(V, target(), model=str(folder), dtype=torch.float64, fused=False, num_speculative_tokens=3)
    return create_drafter(METHOD, METHOD.config(**options), context)


def test_chains_are_those_of_the_formulas(tmp_path: Path) -> None:
    """Two steps, so that entries of masks which are left in the cache would be read as pairs."""
    folder = published_folders.peagle(tmp_path)
    drafter = make_drafter(folder)
    g = torch.Generator().manual_seed(3)
    states = [2 * torch.randn(n, 3 * H, generator=g, dtype=torch.float64) for n in LENGTHS]
    tokens = [torch.randint(0, V, (n + 1,), generator=g).tolist() for n in LENGTHS]
    weights = reference_networks.to_double(published_folders.read_tensors(folder))
    ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
    requests = [make_request(i, tokens[i][:5], GREEDY, pages=PAGES[i]) for i in range(2)]
    for counts in ((4, 4), (5, 2)):
        for i, request in enumerate(requests):
            request.output += tokens[i][request.num_tokens : request.num_computed + counts[i] + 1]
        observe(drafter, requests, states, counts)
        tree = drafter.propose(Batch(tuple(requests), (1, 1), (3, 3), PAGE))
        assert drafter.draft_kv.num_valid == {i: request.num_computed for i, request in enumerate(requests)}
        for i, request in enumerate(requests):
            n = request.num_computed
            rows = torch.cat([states[i][:n], weights["mask_hidden"][0].expand(2, -1)])
            logits, _ = reference_networks.eagle3(
                weights, [*tokens[i][1 : n + 1], MASK, MASK], rows.chunk(3, -1), target().embedding,
                weights["lm_head.weight"], LayerNumbers(), Eagle3Flags(),
            )  # fmt: skip
            assert list(tree.tokens[i][1:]) == ids[logits[n - 1 :].argmax(-1)].tolist()
    again = drafter.propose(Batch(tuple(requests), (1, 1), (3, 3), PAGE))
    assert again.tokens == tree.tokens, "without new pairs the first row is that of the step before"


@pytest.mark.parametrize("options", [{"tree_nodes": 9, "top_k": 3}, {"branching": (2, 2, 1, 1)}])
def test_masks_take_no_more_positions_than_granted_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Fault: a tree of depth 4 with 2 granted nodes had 3 masks, behind the pages of its request."""
    drafter = make_drafter(published_folders.peagle(tmp_path), **options)
    request = make_request(0, range(5), GREEDY, pages=PAGES[0])
    request.output.append(7)
    observe(drafter, [request], [torch.ones(5, 3 * H, dtype=torch.float64)], [5])
    masks = []
    forward = drafter.lm.forward
    monkeypatch.setattr(
        drafter.lm, "forward", lambda batch, features: masks.append(len(features) - 5) or forward(batch, features)
    )
    tree = drafter.propose(Batch((request,), (1,), (2,), PAGE))
    assert len(tree.tokens[0]) == 3
    assert masks == [1]


@pytest.mark.parametrize("key", ["ptd_token_id", "mask_token_id"])
def test_folders_are_written_as_they_were_read(tmp_path: Path, key: str) -> None:
    checkpoint = read(str(published_folders.peagle(tmp_path / "a", key=key)), TARGET)
    assert checkpoint.method == "eagle3"
    assert METHOD.checkpoint is not None
    assert METHOD.checkpoint.make_layout is not None
    layout = METHOD.checkpoint.make_layout(checkpoint.shape, checkpoint.tensors)
    again = read(str(published_folders.save(tmp_path / "b", layout.config, layout.tensors)), TARGET)
    assert again.shape == checkpoint.shape
    assert torch.equal(again.tensors["mask_hidden"], checkpoint.tensors["mask_hidden"])


def test_folders_of_speculators_are_read(tmp_path: Path) -> None:
    folder = published_folders.speculators(tmp_path, [1, 4, 9], kind="peagle")
    more = {"mask_hidden": torch.ones(1, 1, 3 * H)}
    published_folders.edit_config(published_folders.edit_tensors(folder, more=more), mask_token_id=MASK)
    shape: Any = read(str(folder), TARGET).shape
    assert shape.mask_token_id == MASK


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=r"ptd_token_id to a token of the-target \(0..39\), not 40"):
        read(str(published_folders.peagle(tmp_path / "a", mask=V)), TARGET)
    with pytest.raises(ForedraftError, match="omit feedback"):
        make_drafter(published_folders.peagle(tmp_path / "b"), feedback="raw")
    with pytest.raises(ForedraftError, match="set parallel=true too"):
        create_trainee(TrainConfig(mask_token_id=1), target())


def test_later_steps_of_the_loss_read_masks() -> None:
    """The token that a step of drafts would read must not be seen, or acceptance is less than the loss promises."""
    torch.manual_seed(0)
    trainee = create_trainee(TrainConfig(parallel=True, steps=2, taps=(2, 5), loss="ce", decay=0.5), target())
    for layer in trainee.network.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight)
    mask = torch.zeros(1, 5, dtype=torch.bool)
    mask[0, 4] = True  # the first step predicts token 4 from token 3, the second step from the mask behind token 2
    states, uniform = torch.randn(1, 4, 2 * H), TargetLogProbs(torch.zeros(1, 4, V).log_softmax(-1))
    found = []
    for token in (7, 8):
        trace = Trace(torch.tensor([[1, 2, 3, token, 5]]), states, uniform, mask)
        found.append(trainee.compute_loss(trace).components)
    assert found[0]["loss_1"] != found[1]["loss_1"]
    assert found[0]["loss_2"] == found[1]["loss_2"]
    trainee.compute_loss(trace).total.backward()
    gradient = trainee.network.get_parameter("mask_hidden").grad
    assert gradient is not None
    assert float(gradient.abs().sum()) > 0
