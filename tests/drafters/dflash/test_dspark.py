"""DSpark heads: chains of the formulas, chains that end where acceptance is improbable, folders, and the losses."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import Sampling
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.dflash.method import METHOD
from foredraft.drafters.dflash.training import TrainConfig, create_trainee
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from tests.drafters.dflash.test_drafter import PAGE, PAGES, make_drafter, observe, target
from tests.support.checkpoints import published_folders, reference_networks
from tests.support.checkpoints.published_folders import TARGET, H, V
from tests.support.checkpoints.reference_networks import DFlashFlags, LayerNumbers
from tests.support.requests import make_request

KINDS = ("vanilla", "gated", "rnn")
GREEDY = Sampling(temperature=0, max_tokens=20)


def draft(folder: Path, **options: Any) -> tuple[list[list[int]], list[tuple[list[int], list[float]]]]:
    """Draft for two requests; return the chains, and those of the formulas with the predicted acceptance."""
    drafter = make_drafter(folder, num_tokens=4, **options)
    g = torch.Generator().manual_seed(3)
    states = [2 * torch.randn(n, 3 * H, generator=g, dtype=torch.float64) for n in (9, 6)]
    tokens = [torch.randint(0, V, (len(rows) + 1,), generator=g).tolist() for rows in states]
    requests = [make_request(i, tokens[i], GREEDY, pages=PAGES[i]) for i in range(2)]
    observe(drafter, requests, states, (9, 6))
    tree = drafter.propose(Batch(tuple(requests), (1, 1), (4, 4), PAGE))
    weights, head = reference_networks.to_double(published_folders.read_tensors(folder)), target().head_weight
    wanted = []
    for i, rows in enumerate(states):
        block = reference_networks.dflash_states(
            weights, tokens[i][-1], rows, target().embedding, LayerNumbers(), DFlashFlags()
        )
        kind = drafter.network.shape.markov_type
        wanted.append(reference_networks.dspark_chain(weights, kind, tokens[i][-1], block, head))
    assert tree.confidences is not None
    for i, confidences in tree.confidences.items():
        assert len(confidences) == len(tree.tokens[i]) - 1
        assert torch.allclose(torch.tensor(confidences), torch.tensor(wanted[i][1][: len(confidences)]), atol=1e-5)
    return [list(nodes[1:]) for nodes in tree.tokens], wanted


@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_the_formulas(tmp_path: Path, kind: str) -> None:
    """A row beside the wrong token or memory, or the state of another row, would change a token."""
    found, wanted = draft(published_folders.dspark(tmp_path, kind=kind))
    assert found == [tokens for tokens, _ in wanted]
    assert all(len(tokens) == 4 for tokens in found), "the first row drafts too"


def test_a_chain_ends_before_a_token_that_is_probably_rejected(tmp_path: Path) -> None:
    folder = published_folders.dspark(tmp_path)
    _, wanted = draft(folder)
    survival = [[math.prod(chances[: k + 1]) for k in range(4)] for _, chances in wanted]
    threshold = 0.999 * survival[0][1]
    found, _ = draft(folder, min_confidence=threshold)
    lengths = [sum(chance >= threshold for chance in row) for row in survival]
    assert lengths[0] == 2
    assert found == [tokens[:length] for (tokens, _), length in zip(wanted, lengths, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_written_as_they_were_read(tmp_path: Path, kind: str) -> None:
    checkpoint = read(str(published_folders.dspark(tmp_path / "a", kind=kind)), TARGET)
    assert METHOD.checkpoint is not None
    assert METHOD.checkpoint.make_layout is not None
    layout = METHOD.checkpoint.make_layout(checkpoint.shape, checkpoint.tensors)
    again = read(str(published_folders.save(tmp_path / "b", layout.config, layout.tensors)), TARGET)
    assert again.shape == checkpoint.shape
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())


def test_folders_of_speculators_hold_the_same_head(tmp_path: Path) -> None:
    """Fault that it guards: the first row of a DSpark block taken for a row that drafts nothing."""
    plain = read(str(published_folders.dspark(tmp_path / "a")), TARGET)
    options = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "markov_rank": 6}
    folder = published_folders.dflash_speculators(tmp_path / "b", **options)
    more = {name: tensor for name, tensor in plain.tensors.items() if "_head." in name}
    found = read(str(published_folders.edit_tensors(folder, more=more)), TARGET)
    assert (found.format, found.shape) == ("speculators DSpark", plain.shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 9}, "markov_rank 9, and the Markov head has rank 6"),
        ({"markov_head_type": "lstm"}, "one of vanilla, gated, rnn"),
        ({"markov_head_type": "rnn"}, "markov_head.joint_proj.bias"),
    ],
)
def test_config_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = published_folders.edit_config(published_folders.dspark(tmp_path), **changes)
    with pytest.raises(ForedraftError, match=message):
        read(str(folder), TARGET)


def test_the_loss_is_that_of_the_authors() -> None:
    """One block in a sequence: 0.1 cross entropy + 0.9 L1 + the cross entropy of the predicted acceptance."""
    torch.manual_seed(1)
    config = TrainConfig(
        l1_share=0.9, block_size=2, anchors=1, taps=(2, 5), num_layers=1, predicts_from_root=True, markov_rank=3,
        markov_type="gated", has_confidence=True, gamma=2.0,
    )  # fmt: skip
    trainee = create_trainee(config, target())
    with torch.no_grad():
        trainee.network.markov_head.markov_w2.weight.normal_()  # type: ignore[union-attr]
    tokens, mask = torch.randint(0, V, (1, 8)), torch.tensor([[0, 1, 0, 0, 0, 1, 1, 1]]).bool()
    states, p = torch.randn(1, 7, 2 * H), torch.randn(1, 7, V).log_softmax(-1)
    mask[0, 1] = mask[0, 7] = False  # one root: 5, and one token after it
    loss = trainee.compute_loss(Trace(tokens, states, TargetLogProbs(p), mask)).total
    network, w = trainee.network, reference_networks.to_double(trainee.network.state_dict())
    block = network.shape.block
    numbers = LayerNumbers(block.heads, block.kv_heads, block.head_dim, block.eps, block.rope["rope_theta"])
    flags = DFlashFlags(1, 2, V - 1, (False,), (None,))
    root = int(tokens[0, 5])
    h = reference_networks.dflash_states(w, root, states[0, :5].double(), target().embedding, numbers, flags)[0]
    e = w["markov_head.markov_w1.weight"][root]
    gate = torch.sigmoid(w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"])
    logits = target().head_weight @ h + w["markov_head.markov_w2.weight"] @ (gate * e)
    distance = float((logits.softmax(-1) - p[0, 5].exp().double()).abs().sum())
    odds = w["confidence_head.proj.weight"] @ torch.cat([h, e]) + w["confidence_head.proj.bias"]
    chance, accepted = float(torch.sigmoid(odds)), 1 - distance / 2
    wanted = -0.1 * float(logits.log_softmax(-1)[tokens[0, 6]]) + 0.9 * distance
    wanted -= accepted * math.log(chance) + (1 - accepted) * math.log(1 - chance)
    assert math.isclose(float(loss.detach()), wanted, rel_tol=1e-4)


def test_settings_that_are_no_head_are_refused() -> None:
    for wrong, message in (
        ({"l1_share": 2.0}, "in 0..1, got 2.0"),
        ({"markov_type": "lstm"}, "one of vanilla"),
        ({"markov_type": "rnn"}, "needs a Markov head; set markov_rank=256 too"),
    ):
        with pytest.raises(ForedraftError, match=message):
            create_trainee(replace(TrainConfig(), **wrong), target())  # type: ignore[arg-type]
