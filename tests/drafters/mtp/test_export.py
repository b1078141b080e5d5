"""MTP layers in copies of their targets: what was trained drafts alike from there."""

import json

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.checkpoints.target import read_target
from foredraft.checkpoints.write import save
from foredraft.drafters.checkpoint_folders import export, read
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.mtp.training import TrainConfig, create_trainee
from foredraft.errors import ForedraftError
from tests.drafters.mtp.test_targets import make_target

GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("qwen3_5", "mtp_num_hidden_layers", "mtp.fc.weight"),
        ("glm4_moe", "num_nextn_predict_layers", "model.layers.2.mlp.experts.3.up_proj.weight"),
        ("ernie4_5_moe", "num_nextn_predict_layers", "model.mtp_linear_proj.0.weight"),
    ],
)
def test_a_copy_of_the_target_drafts_with_the_trained_layer(tmp_path, family, key, name):
    target, folders = make_target(family), [str(tmp_path / part) for part in ("target", "layer", "out")]
    target.model.save_pretrained(folders[0])
    trainee = create_trainee(TrainConfig(), target)
    with torch.no_grad():
        for value in trainee.network.parameters():
            value += 0.1 * torch.randn_like(value)
    save(folders[1], trainee.to_checkpoint())
    export(read(folders[1], describe_target(target)), "target", folders[2], read_target(folders[0]))
    out = tmp_path / "out"
    assert json.loads((out / "config.json").read_text())[key] == 1
    assert name in json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    draft = {"method": "mtp", "num_speculative_tokens": 3}
    kinds = {"dtype": torch.float32}
    apart = LLM(folders[0], drafter={**draft, "model": folders[1]}, **kinds).generate([[5, 6, 7]], GREEDY)[0]
    stitched = LLM(folders[2], drafter=draft, **kinds).generate([[5, 6, 7]], GREEDY)[0]
    assert stitched.token_ids == apart.token_ids
    assert stitched.stats.accepted_at == apart.stats.accepted_at
    assert stitched.stats.num_drafted == apart.stats.num_drafted > 0


def test_a_layer_of_another_family_is_refused(tmp_path):
    make_target("glm4_moe").model.save_pretrained(tmp_path / "target")
    save(tmp_path / "layer", create_trainee(TrainConfig(), make_target("qwen2")).to_checkpoint())
    checkpoint = read(tmp_path / "layer", describe_target(make_target("qwen2")))
    with pytest.raises(ForedraftError, match="the family of"):
        export(checkpoint, "target", tmp_path / "out", read_target(str(tmp_path / "target")))
