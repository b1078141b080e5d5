"""Written folders: they are read back unchanged, and are laid out as published."""

import pytest
import torch

from foredraft.drafters.checkpoint_folders import read, write
from foredraft.errors import ForedraftError
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import IDS, TARGET


@pytest.mark.parametrize(
    "make",
    [
        lambda f: published_folders.medusa(f, layers=2, foredraft_head_accuracies=[[0.5], [0.4], [0.3]]),
        lambda f: published_folders.medusa(f, version2=True),
        lambda f: published_folders.vllm_medusa(f, shared=True),
        lambda f: published_folders.mlp_speculator(f),
        lambda f: published_folders.mlp_speculator(f, tied=True, scaled=True),
        lambda f: published_folders.lstm_speculator(f),
        lambda f: published_folders.blockwise(f),
        lambda f: published_folders.hydra(f, layers=2, hidden_state_offset=1),
        lambda f: published_folders.hydra(f, own_head=False, rank=9),
        lambda f: published_folders.hydra(f, layers=2, prefix=True),
        lambda f: published_folders.eagle(f, layers=2, qkv_bias=True, dtype=torch.float16),
        lambda f: published_folders.eagle(f, fc_bias=False, embedding=False),
        lambda f: published_folders.eagle3(
            f, norms=("input_norm", "fc_norm"), norm_before_residual=True, norm_output=True
        ),
        lambda f: published_folders.eagle3(f, whole=True, qk_norm=True, qkv_bias=True, dtype=torch.bfloat16),
        lambda f: published_folders.eagle3(
            f, layers=2, first="layers.0", hidden=16, target_hidden_size=published_folders.H
        ),
        lambda f: published_folders.eagle3(f, states=2, **{IDS: [0, 12]}),
        lambda f: published_folders.modelopt(f, fc=False),
        lambda f: published_folders.speculators(f, [1, 2, 3], rope_scaling={"rope_type": "linear", "factor": 4.0}),
        lambda f: published_folders.eagle3(f, head=False, whole=True),
        lambda f: published_folders.chimera(f, heads=3),
        lambda f: published_folders.chimera(
            f, taps=(-1,), heads=1, rope_scaling={"rope_type": "linear", "factor": 4.0}
        ),
    ],
)
def test_what_is_written_reads_back_the_same(tmp_path, make):
    first = read(make(tmp_path / "published"), TARGET)
    write(tmp_path / "ours", first.method, first.shape, first.tensors, {"base_model_name_or_path": "t"})
    again = read(tmp_path / "ours", TARGET)
    assert again.shape == first.shape
    assert again.tensors.keys() == first.tensors.keys()
    assert all(torch.equal(value, again.tensors[name]) for name, value in first.tensors.items())
    assert again.config["base_model_name_or_path"] == "t"


def test_eagle3_is_written_with_layers_in_both_conventions_and_the_authors_names(tmp_path):
    held = read(published_folders.eagle3(tmp_path / "published", first="layers.0"), TARGET)
    write(tmp_path / "ours", "eagle3", held.shape, held.tensors, {})
    again = read(tmp_path / "ours", TARGET)
    assert (again.config[IDS], again.config["eagle_config"][IDS]) == ([2, 6, 9], [1, 5, 8])
    assert again.config["num_aux_hidden_states"] == 3
    raw = published_folders.read_tensors(tmp_path / "ours")
    assert "midlayer.hidden_norm.weight" in raw
    assert torch.equal(raw["t2d"].nonzero().flatten(), raw["d2t"] + torch.arange(published_folders.VD))


def test_config_extra_overrides_nothing_that_the_weights_say(tmp_path):
    held = read(published_folders.medusa(tmp_path / "published"), TARGET)
    write(tmp_path / "ours", "medusa", held.shape, held.tensors, {"medusa_num_heads": 9, "note": "kept"})
    config = read(tmp_path / "ours", TARGET).config
    assert (config["medusa_num_heads"], config["note"]) == (3, "kept")


def test_tensors_that_do_not_fit_the_shape_are_our_own_mistake(tmp_path):
    held = read(published_folders.medusa(tmp_path / "published"), TARGET)
    with pytest.raises(ValueError, match=r"0\.0\.linear\.bias"):
        write(tmp_path, "medusa", held.shape, {k: v for k, v in held.tensors.items() if k != "0.0.linear.bias"}, {})
    with pytest.raises(ForedraftError, match="MedusaShape is not the shape of eagle drafters"):
        write(tmp_path, "eagle", held.shape, held.tensors, {})
    assert not list(tmp_path.glob("*.safetensors"))
