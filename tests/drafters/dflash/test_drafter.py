"""DFlash heads: logits of the formulas from context rows on pages, the layouts of folders, and the loss."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import Sampling
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.dflash.method import METHOD
from foredraft.drafters.dflash.training import TrainConfig, choose_roots, create_trainee
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.path_features import PathFeatures
from foredraft.request import Batch, Request
from foredraft.tree import Commit
from tests.support.checkpoints import published_folders, reference_networks
from tests.support.checkpoints.published_folders import LAYERS, TARGET, H, V
from tests.support.checkpoints.reference_networks import DFlashFlags, LayerNumbers
from tests.support.requests import make_request

TOLERANCE = 1e-5
PAGE, PAGES = 4, ([5, 2, 7], [3, 1])
LENGTHS = (9, 6)  # tokens with states, of two requests
CAUSAL: dict[str, Any] = {"nested": {"causal": True}}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@cache
def target() -> HFModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return HFModel.wrap_model(LlamaForCausalLM(config).double(), "the-target")


def make_drafter(folder: Path, num_tokens: int = 3, **options: Any) -> Any:
    context = DrafterContext(
        V, target(), model=str(folder), dtype=torch.float64, fused=False, num_speculative_tokens=num_tokens
    )
    return create_drafter(METHOD, METHOD.config(**options), context)


def observe(drafter: Any, requests: list[Request], states: list[Tensor], counts: tuple[int, ...]) -> None:
    """Let the drafter observe the next states of every request."""
    seen, tokens = [], []
    for request, rows, count in zip(requests, states, counts, strict=True):
        first = request.num_computed
        seen.append(rows[first : first + count])
        tokens.append([request.get_token(i + 1) for i in range(first, first + count)])
    padded = torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)
    commit = Commit([list(range(n)) for n in counts], tokens, PathFeatures.from_padded(padded, counts))
    drafter.observe(Batch(tuple(requests), counts, (0,) * len(counts), PAGE), commit)
    for request, count in zip(requests, counts, strict=True):
        request.num_computed += count


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, DFlashFlags()),
        ({"nested": {"causal": True}}, DFlashFlags(causal=(True, True))),
        (SLIDING, DFlashFlags(causal=(True, False), windows=(4, None))),
        ({"nested": {"use_swa": True, "swa_window_size": 3}}, DFlashFlags(windows=(3, 3))),
        ({"nested": {"sample_from_anchor": True}, "copies": True}, DFlashFlags()),
    ],
)
def test_logits_from_rows_on_pages_equal_the_formulas(tmp_path: Path, options: Any, flags: DFlashFlags) -> None:
    """Rows of another position, page or request, or a wrong mask inside the block, would change the logits."""
    folder = published_folders.dflash(tmp_path, **options)
    drafter = make_drafter(folder)
    assert drafter.spec.hidden_layers == (2, 5, 10)
    g = torch.Generator().manual_seed(3)
    states = [2 * torch.randn(n, 3 * H, generator=g, dtype=torch.float64) for n in LENGTHS]
    tokens = [torch.randint(0, V, (n + 1,), generator=g).tolist() for n in LENGTHS]
    requests = [make_request(i, tokens[i], Sampling(), pages=PAGES[i]) for i in range(2)]
    observe(drafter, requests, states, (5, 1))
    with torch.inference_mode():
        drafter.rows.write_pending([0, 1])  # later states join rows that are written already
    observe(drafter, requests, states, (4, 5))
    with torch.inference_mode():
        logits = drafter.network.compute_logits(drafter.compute_states(requests, PAGE, 3))
    weights = reference_networks.to_double(published_folders.read_tensors(folder))
    first = drafter.network.shape.first_row
    assert first == (0 if "sample_from_anchor" in options.get("nested", {}) else 1)
    for i, rows in enumerate(states):
        wanted = reference_networks.dflash(
            weights, tokens[i][-1], rows, target().embedding, target().head_weight, LayerNumbers(), flags
        )
        assert float((logits[i] - wanted[first : first + 3]).abs().max()) < TOLERANCE


def test_drafts_are_as_deep_as_a_block_at_most(tmp_path: Path) -> None:
    folder = published_folders.dflash(tmp_path)
    assert make_drafter(folder, num_tokens=10).tree_spec.max_depth == 3
    with pytest.raises(ForedraftError, match="a block of this head drafts 3 tokens"):
        make_drafter(folder, branching=(2, 1, 1, 1))


def test_layouts_are_recognised_and_written_as_they_were_read(tmp_path: Path) -> None:
    """A head whose class config.json does not name has tensors of EAGLE-3's names, and is none."""
    for i, options in enumerate(
        ({}, {"architectures": ["Other"]}, SLIDING, {"nested": {"causal": True}}, {"copies": True})
    ):
        checkpoint = read(str(published_folders.dflash(tmp_path / str(i), **options)), TARGET)
        assert checkpoint.method == "dflash"
        assert METHOD.checkpoint is not None
        assert METHOD.checkpoint.make_layout is not None
        layout = METHOD.checkpoint.make_layout(checkpoint.shape, checkpoint.tensors)
        again = published_folders.save(tmp_path / f"{i} again", layout.config, layout.tensors)
        assert read(str(again), TARGET).shape == checkpoint.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nested": {"mask_token_id": V}}, "mask_token_id 40 has no row"),
        ({"nested": {"target_layer_ids": [1, 4]}}, r"boundaries \[2, 5\]"),
        ({"nested": {"target_layer_ids": [1, 4, 12]}}, r"boundaries \[2, 5, 13\]"),
        ({"nested": {"aux_hidden_state_layer_ids": [1, 4, 9]}}, "remove one"),
        ({"size": 1}, "block_size to an integer of at least 2"),
    ],
)
def test_config_that_does_not_fit_is_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        read(str(published_folders.dflash(tmp_path, **options)), TARGET)


def test_speculators_folders_hold_the_same_head(tmp_path: Path) -> None:
    """Fault that it guards: boundaries taken for layer outputs, which reads the states of the next layers."""
    plain = read(str(published_folders.dflash(tmp_path / "plain")), TARGET)
    found = read(str(published_folders.dflash_speculators(tmp_path / "speculators")), TARGET)
    assert (found.method, found.format) == ("dflash", "speculators DFlash")
    assert found.shape == plain.shape
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in plain.tensors.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": V - 8}, "32 of 40 tokens"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
    ],
)
def test_speculators_folders_of_other_heads_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        read(str(published_folders.dflash_speculators(tmp_path, **options)), TARGET)


def test_roots_and_their_successors_are_tokens_to_learn() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 1, 1, 1]]).bool()
    roots = choose_roots(mask, 2)
    assert sorted(roots[0].tolist()) == [2, 3]
    assert set(roots[1].tolist()) < {1, 5, 6}


def test_loss_is_that_of_the_blocks_as_they_are_drafted() -> None:
    """A context that contains the root, or a shifted target, would lower the loss and not the acceptance."""
    torch.manual_seed(1)
    config = TrainConfig(block_size=3, anchors=1, gamma=2.0, taps=(2, 5), num_layers=1)
    trainee = create_trainee(config, target())
    tokens, mask = torch.randint(0, V, (1, 8)), torch.tensor([[0, 1, 0, 0, 0, 1, 1, 0]]).bool()  # one root: 5
    states = torch.randn(1, 7, 2 * H)
    uniform = TargetLogProbs(torch.full((1, 7, V), -math.log(V)))
    loss = trainee.compute_loss(Trace(tokens, states, uniform, mask))
    weights = reference_networks.to_double(trainee.network.state_dict())
    block = trainee.network.shape.block
    numbers = LayerNumbers(block.heads, block.kv_heads, block.head_dim, block.eps, block.rope["rope_theta"])
    flags = DFlashFlags(1, 3, V - 1, (False,), (None,))
    head = target().head_weight
    logits = reference_networks.dflash(
        weights, int(tokens[0, 5]), states[0, :5].double(), target().embedding, head, numbers, flags
    )
    wanted = -float(logits[1].log_softmax(-1)[tokens[0, 6]])
    assert math.isclose(float(loss.total.detach()), wanted, rel_tol=1e-4)
    assert loss.components["loss_2"] == 0.0  # token 7 is not to learn
