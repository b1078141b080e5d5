"""Training of MTP layers: new ones, those of a target's folder, and the folders that are written."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from foredraft.checkpoints.write import save
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.mtp.training import TrainConfig, create_trainee
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import attend_causal
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from tests.drafters.mtp.test_targets import make_inputs, make_target, spell
from tests.support import tiny_heads, tiny_models


@torch.no_grad()
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_a_new_layer_is_the_normed_identity(family):
    network = create_trainee(TrainConfig(), make_target(family)).network.double()
    tokens, features, positions = make_inputs(network)
    states = network(tokens, features, positions, attend_causal)[0]
    rms = features.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(states, features / rms, atol=1e-4)


def test_later_steps_count_less():
    llm = tiny_models.plain()
    trace = tiny_heads.make_trace(llm, (AFTER_FINAL_NORM,))
    losses = []
    for steps, decay in ((1, 1.0), (2, 1.0), (2, 0.5)):
        trainee = create_trainee(TrainConfig(steps=steps, decay=decay), llm.target)
        losses.append(float(trainee.compute_loss(trace).total.detach()))
    first, both, weighted = losses
    second = 2 * both - first
    assert weighted == pytest.approx((first + 0.5 * second) / 1.5, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["ernie4_5_moe", "qwen2"])
def test_a_published_layer_is_trained_on_and_written(tmp_path, family):
    """Flags that Qwen's names do not tell, and experts, return from the folder."""
    (tmp_path / "target").mkdir()
    save_file(spell(family), tmp_path / "target" / "model.safetensors")
    target = replace(make_target(family), name=str(tmp_path / "target"))
    trainee = create_trainee(TrainConfig(fine_tunes=True), target)
    save(tmp_path / "layer", trainee.to_checkpoint())
    checkpoint = read(tmp_path / "layer", describe_target(target), "mtp")
    assert checkpoint.shape == replace(trainee.network.shape, block=None)
    again = create_trainee(TrainConfig(), target, checkpoint)
    expected = trainee.network.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.network.state_dict().items())


def test_two_layers_to_start_from_are_refused(tmp_path):
    target = make_target("qwen2")
    save(tmp_path, create_trainee(TrainConfig(), target).to_checkpoint())
    start = read(tmp_path, describe_target(target), "mtp")
    with pytest.raises(ForedraftError, match="leave one out"):
        create_trainee(TrainConfig(fine_tunes=True), target, start)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"decay": 0.0}, {"decay": 1.5}])
def test_impossible_settings(settings):
    with pytest.raises(ForedraftError, match="must be"):
        create_trainee(TrainConfig(**settings), make_target("qwen2"))
