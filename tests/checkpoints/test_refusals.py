"""Faulty drafter folders: the error is one line that names the fault, before any weights are read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foredraft.checkpoints.schema import TargetInfo
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.checkpoint_folders import read, recognise
from foredraft.errors import ForedraftError
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import IDS, LLAMA, TARGET, VD, H, V, d2t


def refusal(folder: Path, target: TargetInfo = TARGET, method: str | None = None) -> str:
    with pytest.raises(ForedraftError) as caught:
        read(folder, target, method)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid reading tensors into memory, except for the maps of token ids."""
    whole = TensorFiles.read

    def read_id_maps(self, names):
        names = list(names)
        assert set(names) <= {"d2t", "t2d"}, f"read {names} before the shapes were checked"
        return whole(self, names)

    monkeypatch.setattr(TensorFiles, "read", read_id_maps)


MAKERS: list[Callable[[Path], Path]] = [
    published_folders.medusa, published_folders.mlp_speculator, published_folders.blockwise, published_folders.hydra,
    published_folders.eagle, published_folders.eagle3, published_folders.modelopt, published_folders.speculators,
    published_folders.lstm_speculator,
]  # fmt: skip


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("make", MAKERS)
def test_a_drafter_for_a_target_of_another_width(tmp_path, make):
    text = refusal(make(tmp_path), replace(TARGET, hidden=36))
    assert "the-target" in text
    assert "36" in text
    assert str(H) in text or "96" in text  # 96 = what fc.weight of three states reads


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("make", MAKERS)
def test_a_drafter_for_a_target_of_another_vocabulary(tmp_path, make):
    text = refusal(make(tmp_path), replace(TARGET, vocab_size=V + 8))
    assert f"vocabulary size {V}, and the-target has {V + 8}" in text


@pytest.mark.parametrize(
    ("make", "holds", "method"),
    [
        (published_folders.eagle3, "an EAGLE-3 head", "eagle3"),
        (published_folders.speculators, "an EAGLE-3 head", "eagle3"),
        (published_folders.eagle, "an EAGLE head", "eagle"),
        (published_folders.medusa, "Medusa heads", "medusa"),
        (published_folders.mlp_speculator, "an MLP speculator", "mlp_speculator"),
        (published_folders.blockwise, "blockwise heads", "blockwise"),
        (published_folders.hydra, "Hydra heads", "hydra"),
    ],
)
def test_a_folder_given_as_another_method(tmp_path, make, holds, method):
    asked = "eagle" if method != "eagle" else "eagle3"
    text = refusal(make(tmp_path), method=asked)
    assert f"{tmp_path} holds {holds}, not {asked}; use --spec-method {method}" in text


def whole_model(folder: Path) -> Path:
    weights = {"model.embed_tokens.weight": torch.ones(V, H), "model.layers.0.input_layernorm.weight": torch.ones(H)}
    return published_folders.save(folder, LLAMA, weights)


def test_a_whole_model_is_recognised_and_is_no_head(tmp_path):
    assert recognise(whole_model(tmp_path)) == ("draft_model", "causal LM")
    assert "holds a whole language model, not eagle; use --spec-method draft_model" in refusal(tmp_path, method="eagle")
    assert "not a drafter's head" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["transformer.h.0.ln_1.weight", "wte.weight", "unheard.of.weight"])
def test_a_whole_model_of_another_architecture(tmp_path, name):
    folder = published_folders.save(tmp_path, {"architectures": ["GPT2LMHeadModel"]}, {name: torch.ones(2)})
    assert recognise(folder)[0] == "draft_model"


@pytest.mark.parametrize(
    ("config", "tensor", "name"),
    [
        ({"dspark_config": {}}, "markov_w1", "DSpark"),
        ({}, "mtp_layers.0.fc.weight", "MTP"),
        ({}, "model.layers.61.eh_proj.weight", "MTP"),
        ({"speculators_model_type": "domino"}, "fc.weight", "speculators' domino"),
        ({"speculators_model_type": "eagle"}, "fusion_fc.weight", "speculators' eagle"),
        ({}, "fusion_fc.weight", "HASS"),
    ],
)
def test_methods_that_are_not_read_are_refused_by_name(tmp_path, config, tensor, name):
    text = refusal(published_folders.save(tmp_path, config, {tensor: torch.ones(2)}))
    assert f"{name} drafter, which is not supported" in text


def test_tensors_of_nothing_known(tmp_path):
    assert "its tensors (a, b, ...) are those of no drafter" in refusal(
        published_folders.save(tmp_path, {}, {"b": torch.ones(2), "a": torch.ones(2)})
    )


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("make", MAKERS)
def test_a_tensor_left_over(tmp_path, make):
    folder = make(tmp_path)
    extra = published_folders.read_tensors(folder) | {"layers.0.mlp.experts.weight": torch.ones(3)}
    for file in (*folder.glob("*.pt"), *folder.glob("*.bin")):
        file.unlink()
    save_file(extra, next(iter(folder.glob("*.safetensors")), folder / "model.safetensors"))
    assert "no place for layers.0.mlp.experts.weight" in refusal(folder)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda f: published_folders.medusa(f, file="medusa_lm_head.safetensors"), "1.0.linear.weight"),
        (lambda f: published_folders.medusa(f, file="medusa_lm_head.safetensors"), "1.0.linear.bias"),
        (lambda f: published_folders.medusa(f, file="medusa_lm_head.safetensors"), "1.1.weight"),
        (published_folders.vllm_medusa, "medusa_heads.lm_heads.1.weight"),
        (published_folders.mlp_speculator, "speculator.ln.1.bias"),
        (published_folders.lstm_speculator, "output_proj.1.weight"),
        (lambda f: published_folders.hydra(f, file="model.safetensors"), "hydra_mlp.2.0.res_connection.bias"),
        (lambda f: published_folders.hydra(f, file="model.safetensors"), "hydra_lm_head.1.bias"),
        (lambda f: published_folders.hydra(f, file="model.safetensors", rank=9), "hydra_reduce.1.weight"),
        (lambda f: published_folders.hydra(f, file="model.safetensors", layers=2), "hydra_mlp.0.1.linear.weight"),
        (lambda f: published_folders.mlp_speculator(f, tied=True), "speculator.proj.1.weight"),
        (lambda f: published_folders.eagle(f, file="model.safetensors"), "layers.0.self_attn.k_proj.weight"),
        (lambda f: published_folders.eagle(f, file="model.safetensors"), "layers.0.post_attention_layernorm.weight"),
        (published_folders.eagle3, "fc.weight"),
        (published_folders.eagle3, "norm.weight"),
        (published_folders.eagle3, "lm_head.weight"),
        (published_folders.eagle3, "d2t"),
        (published_folders.eagle3, "midlayer.hidden_norm.weight"),
        (lambda f: published_folders.eagle3(f, hidden=16, target_hidden_size=H), "embed_tokens.weight"),
        (lambda f: published_folders.eagle3(f, norms=("fc_norm",)), "fc_norm.1.weight"),
        (lambda f: published_folders.eagle3(f, norms=("input_norm",), norm_before_fc=True), "input_norm.weight"),
        (lambda f: published_folders.eagle3(f, qkv_bias=True), "midlayer.self_attn.v_proj.bias"),
    ],
)
def test_a_missing_tensor(tmp_path, make, name):
    ours = name.replace("midlayer", "layers.0").removeprefix("speculator.").replace("medusa_heads.lm_heads.1.", "1.1.")
    assert f"{ours} is missing" in refusal(published_folders.edit_tensors(make(tmp_path), drop=(name,)))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("make", "name", "size"),
    [
        (lambda f: published_folders.medusa(f, file="medusa_lm_head.safetensors"), "2.0.linear.weight", [H, 2 * H]),
        (lambda f: published_folders.medusa(f, file="medusa_lm_head.safetensors"), "2.1.weight", [V + 1, H]),
        (published_folders.mlp_speculator, "speculator.proj.1.weight", [24, 20]),
        (published_folders.blockwise, "blockwise.hidden.bias", [21]),
        (published_folders.blockwise, "blockwise.output.weight", [3 * H, 19]),
        (lambda f: published_folders.hydra(f, file="model.safetensors"), "hydra_mlp.1.0.linear.weight", [H, 2 * H]),
        (lambda f: published_folders.hydra(f, file="model.safetensors"), "hydra_lm_head.2.weight", [V + 1, H]),
        (lambda f: published_folders.hydra(f, file="model.safetensors", rank=9), "hydra_reduce.2.weight", [9, 3 * H]),
        (lambda f: published_folders.eagle(f, file="model.safetensors"), "layers.0.mlp.down_proj.weight", [H, 3]),
        (lambda f: published_folders.eagle(f, file="model.safetensors"), "fc.weight", [H, H]),
        (published_folders.eagle3, "midlayer.self_attn.q_proj.weight", [H, H]),
        (published_folders.eagle3, "midlayer.self_attn.v_proj.weight", [3, 2 * H]),
        (published_folders.eagle3, "lm_head.weight", [VD, H - 1]),
        (published_folders.eagle3, "t2d", [V - 1]),
        (published_folders.eagle3, "d2t", [VD + 1]),
        (published_folders.eagle3, "norm.weight", [H, 1]),
    ],
)
def test_a_tensor_of_another_shape(tmp_path, make, name, size):
    folder = make(tmp_path)
    kind = published_folders.read_tensors(folder)[name].dtype
    text = refusal(published_folders.edit_tensors(folder, more={name: torch.zeros(size, dtype=kind)}))
    assert f"{name} is {size}" in text


@pytest.mark.usefixtures("unread")
def test_heads_that_do_not_divide_the_weights(tmp_path):
    text = refusal(published_folders.eagle(tmp_path, num_attention_heads=3, num_key_value_heads=1))
    assert "q_proj has 32 rows and k_proj 16, and config.json makes them 3 and 1 heads" in text
    published_folders.edit_config(tmp_path, drop=("num_attention_heads",))
    assert "must set num_attention_heads" in refusal(tmp_path)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2}}, "rope_type 'su'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"hidden_size": 64}, "hidden_size 64"),
    ],
)
def test_a_layer_that_computes_something_else(tmp_path, config, said):
    assert said in refusal(published_folders.eagle(tmp_path, **config))


@pytest.mark.usefixtures("unread")
def test_an_eagle_head_with_a_head_of_its_own(tmp_path):
    folder = published_folders.eagle(tmp_path, file="model.safetensors")
    assert "lm_head.weight has no place" in refusal(
        published_folders.edit_tensors(folder, more={"lm_head.weight": torch.ones(V, H)})
    )


@pytest.mark.usefixtures("unread")
def test_one_tensor_under_two_names(tmp_path):
    folder = published_folders.eagle3(tmp_path)
    published_folders.edit_tensors(folder, more={"layers.0.input_layernorm.weight": torch.ones(H)})
    assert "are the same tensor in two naming schemes" in refusal(folder)


@pytest.mark.usefixtures("unread")
def test_quantised_weights(tmp_path):
    folder = published_folders.eagle3(tmp_path)
    weight = torch.zeros(H, 3 * H, dtype=torch.float8_e4m3fn)
    published_folders.edit_tensors(folder, more={"fc.weight": weight})
    assert "fc.weight is stored as F8_E4M3" in refusal(folder)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("make", [published_folders.eagle3, published_folders.speculators])
@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([2, 6, 6], "boundary 6 occurs twice in [2, 6, 6]"),
        ([2, 6, 13], "boundary 13 is out of range 0 to 12"),
        ([-1, 6, 9], "boundary -1 is out of range 0 to 12"),
        ([6, 2, 9], "[6, 2, 9] are not ascending"),
        ([2, 6], "fc.weight reads 3 states of the target, and there are 2 layers"),
        ([2, 6.5, 9], "has to be a list of layer numbers"),
        ("2,6,9", "has to be a list of layer numbers"),
    ],
)
def test_layers_that_cannot_be_read(tmp_path, make, ids, said):
    folder = published_folders.edit_config(make(tmp_path), **{IDS: ids})
    assert said in refusal(folder)


@pytest.mark.usefixtures("unread")
def test_the_last_output_that_sglang_can_name_is_boundary_n(tmp_path):
    assert "boundary 13 is out of range" in refusal(published_folders.specforge(tmp_path, [1, 5, 12]))


@pytest.mark.usefixtures("unread")
def test_layers_named_twice_and_differently(tmp_path):
    folder = published_folders.eagle3(tmp_path, **{IDS: [2, 6, 9], "eagle_config": {IDS: [2, 6, 9]}})
    text = refusal(folder)
    assert "[2, 6, 9]" in text
    assert "boundaries [3, 7, 10]" in text


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("layers", [3, 4, 5, 6])
def test_default_layers_of_a_target_too_small_for_them(tmp_path, layers):
    text = refusal(published_folders.eagle3(tmp_path), replace(TARGET, num_layers=layers))
    assert f"for a target of {layers} layers is not 3 ascending ones; write {IDS}" in text


@pytest.mark.usefixtures("unread")
def test_states_of_another_number_without_layers(tmp_path):
    assert "is not 2 ascending ones" in refusal(published_folders.eagle3(tmp_path, states=2))


@pytest.mark.usefixtures("unread")
def test_aux_states_denied_and_there(tmp_path):
    folder = published_folders.modelopt(tmp_path)
    published_folders.edit_config(folder, eagle_config={"use_aux_hidden_state": False})
    assert "use_aux_hidden_state false, and fc.weight is there" in refusal(folder)


IDS_NOT_OFFSETS = d2t() + torch.arange(VD)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("table", "said"),
    [
        (IDS_NOT_OFFSETS, "out of range 0 to 39; it has to hold offsets"),
        (d2t() - 40, "out of range 0 to 39"),
        (torch.cat([d2t()[:1], d2t()[:1] - 1, d2t()[2:]]), "draft tokens 0 and 1 are tokens"),
        (d2t().flip(0), "d2t is not ascending"),
        (d2t(step=2), "t2d and d2t name different tokens"),
        (d2t().float(), "d2t is stored as float32"),
    ],
)
def test_a_map_that_is_none(tmp_path, table, said):
    folder = published_folders.eagle3(tmp_path)
    assert said in refusal(published_folders.edit_tensors(folder, more={"d2t": table}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("make", "name"),
    [(published_folders.eagle3, "norm.weight"), (published_folders.mlp_speculator, "speculator.ln.0.bias")],
)
def test_numbers_that_are_none(tmp_path, make, name, value):
    folder = make(tmp_path)
    broken = published_folders.read_tensors(folder)[name].clone()
    broken[3] = value
    assert f"{name} holds NaN or infinite numbers" in refusal(
        published_folders.edit_tensors(folder, more={name: broken})
    )


def test_numbers_that_are_none_in_a_pickle(tmp_path):
    tensors = published_folders.read_tensors(published_folders.medusa(tmp_path))
    tensors["1.0.linear.weight"][0, 0] = float("nan")
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert "1.0.linear.weight holds NaN" in refusal(tmp_path)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("kept", [0, 5, 200, 4000, -1])
def test_a_safetensors_file_that_is_cut_off(tmp_path, kept):
    file = published_folders.eagle3(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors is cut off" in refusal(tmp_path)


@pytest.mark.usefixtures("unread")
def test_a_shard_that_is_cut_off_or_missing_or_another(tmp_path):
    published_folders.eagle3(tmp_path, file="sharded")
    index = tmp_path / "model.safetensors.index.json"
    file = tmp_path / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert f"{file.name} is cut off: {len(whole) - 4} of {len(whole)} bytes are there" in refusal(tmp_path)
    file.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    assert f"{file.name} does not hold" in refusal(tmp_path)
    file.unlink()
    assert f"{file.name} is missing" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    assert "points outside the folder" in refusal(tmp_path)
    index.write_text("{}")
    assert "has no weight_map" in refusal(tmp_path)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("size", [50, -40])
def test_a_pickle_that_is_cut_off(tmp_path, size):
    file = published_folders.eagle(tmp_path) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:size])
    assert "pytorch_model.bin is cut off or not a torch file" in refusal(tmp_path)


class Payload:
    """Object that a restricted reader must not build."""


def test_a_pickle_that_is_more_than_tensors_is_not_opened(tmp_path):
    file = published_folders.medusa(tmp_path) / "medusa_lm_head.pt"
    torch.save({"a": Payload()}, file)
    assert "more than tensors in it, which could run code" in refusal(tmp_path)
    torch.save({"state": {"0.0.linear.weight": torch.ones(2)}}, file)
    assert "not a flat table of tensors" in refusal(tmp_path)


def test_a_file_that_is_no_safetensors_file(tmp_path):
    file = published_folders.eagle3(tmp_path) / "model.safetensors"
    file.write_bytes((10).to_bytes(8, "little") + b"not a json")
    assert "model.safetensors is not a safetensors file" in refusal(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "model.safetensors is" in refusal(tmp_path)


def test_no_weights_or_too_many(tmp_path):
    folder = published_folders.eagle3(tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert read(folder, TARGET).method == "eagle3"
    save_file({"x": torch.ones(1)}, folder / "b.safetensors")
    assert "holds 2 safetensors files (a.safetensors, ...)" in refusal(folder)
    (folder / "a.safetensors").unlink()
    (folder / "b.safetensors").rename(folder / "optimizer.pt")
    assert "holds no weights" in refusal(folder)


def test_a_config_that_is_none(tmp_path):
    file = published_folders.eagle3(tmp_path) / "config.json"
    for text, said in [("{", "not valid JSON"), ("[]", "not a JSON object")]:
        file.write_text(text)
        assert said in refusal(tmp_path)
    file.unlink()
    assert "without a config.json" in refusal(tmp_path)


def test_a_path_that_is_none(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing")
    file = published_folders.eagle3(tmp_path) / "config.json"
    assert "is a file; give the folder" in refusal(file)


@pytest.mark.parametrize("name", ["foredraft-test/no-such-drafter", "no such name"])
def test_a_name_that_is_not_in_the_cache_while_offline(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ForedraftError, match=rf"^{name} is (not in the local cache|neither a local folder)"):
        read(name, TARGET)


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (published_folders.medusa, {"foredraft_head_accuracies": [[0.5]]}, "has to be 3 lists"),
        (published_folders.medusa, {"foredraft_head_accuracies": [[0.5], [0.4], [1.5]]}, "has to be 3 lists"),
        (published_folders.mlp_speculator, {"top_k_tokens_per_head": [4, 3]}, "has to be 3 positive numbers"),
    ],
)
def test_config_of_another_length_than_the_weights(tmp_path, make, config, said):
    assert said in refusal(make(tmp_path, **config))


def test_tied_steps_that_differ(tmp_path):
    folder = published_folders.mlp_speculator(tmp_path, tied=True, repeated=True)
    published_folders.edit_tensors(folder, more={"speculator.emb.2.weight": torch.ones(V, 24)})
    assert "speculator.emb.2.weight differs from speculator.emb.0.weight" in refusal(folder)
    once = published_folders.mlp_speculator(tmp_path / "once", tied=True)
    assert "must set n_predict" in refusal(published_folders.edit_config(once, drop=("n_predict",)))


@pytest.mark.parametrize(
    ("name", "original"), [("cell_emb.0.weight", "forget_emb.0.weight"), ("head.2.weight", "head.0.weight")]
)
def test_repeats_of_an_lstm_speculator_that_differ(tmp_path, name, original):
    folder = published_folders.lstm_speculator(tmp_path)
    published_folders.edit_tensors(folder, more={name: torch.ones(V, 24)})
    assert f"{name} differs from {original}" in refusal(folder)
    assert "embeddings of their own" in refusal(published_folders.edit_config(folder, tie_lstm_embs=False))


def test_an_lstm_speculator_without_the_number_of_steps(tmp_path):
    folder = published_folders.edit_config(published_folders.lstm_speculator(tmp_path), drop=("n_predict",))
    assert "must set n_predict" in refusal(folder)


def test_a_truncated_vocabulary_of_medusa(tmp_path):
    folder = published_folders.vllm_medusa(tmp_path)
    published_folders.edit_tensors(folder, more={"token_map": torch.arange(4)})
    assert "token_map" in refusal(folder)


def test_two_norms_of_a_later_layer_that_differ(tmp_path):
    folder = published_folders.eagle3(tmp_path, layers=2, first="layers.0", later=("input_layernorm", "hidden_norm"))
    published_folders.edit_tensors(folder, more={"layers.1.hidden_norm.weight": torch.ones(H)})
    assert "layers.1.hidden_norm.weight and layers.1.input_layernorm.weight differ" in refusal(folder)


def test_a_count_no_file_could_hold(tmp_path):
    folder = published_folders.medusa(tmp_path, file="medusa_lm_head.safetensors")
    published_folders.edit_tensors(folder, more={"999999999.0.linear.weight": torch.ones(H, H)})
    assert "is missing" in refusal(folder)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hydra_head_arch": "cross-attn"}, "'cross-attn', which is not supported (its heads attend"),
        ({"hydra_head_arch": "eagle-attn"}, "'eagle-attn', which is not supported (it is a decoder layer"),
        ({"hydra_head_arch": "transformer"}, "'transformer', which is not supported (this name is unknown"),
        ({"hydra_head_arch": ["mlp"]}, "['mlp'], which is not supported"),
        ({"grounded_heads": False}, "not grounded"),
        ({"hidden_state_offset": 13}, "0 to the 12 layers of the-target"),
        ({"hidden_state_offset": -1}, "hidden_state_offset in config.json is -1"),
        ({"hidden_state_offset": True}, "hidden_state_offset in config.json is True"),
    ],
)
def test_hydra_heads_that_compute_something_else(tmp_path, config, said):
    assert said in refusal(published_folders.hydra(tmp_path, **config))


@pytest.mark.usefixtures("unread")
def test_hydra_heads_without_matrices_that_no_field_declares_as_borrowed(tmp_path):
    folder = published_folders.hydra(tmp_path, own_head=False)
    assert "hydra_lm_head.0.weight is missing" in refusal(
        published_folders.edit_config(folder, drop=("foredraft_lm_head",))
    )
    whole = published_folders.hydra(tmp_path / "whole", file="model.safetensors", foredraft_lm_head="target")
    torn = published_folders.edit_tensors(whole, drop=("hydra_lm_head.0.weight",))
    assert "hydra_lm_head.0.weight is missing" in refusal(torn)


@pytest.mark.usefixtures("unread")
def test_hydra_heads_whose_names_are_of_another_architecture(tmp_path):
    plain = published_folders.hydra(tmp_path, hydra_head_arch="prefix-mlp")
    assert "hydra_mlp.0.0.linear.weight is missing" in refusal(plain)
    behind = published_folders.hydra(tmp_path / "b", prefix=True, hydra_head_arch="mlp")
    assert "is missing" in refusal(behind)
    torn = published_folders.hydra(tmp_path / "c", prefix=True, file="model.safetensors")
    published_folders.edit_tensors(torn, drop=("prefix_embeding_layer.norm.weight",))
    assert "prefix_embeding_layer.norm.weight is missing" in refusal(torn)


@pytest.mark.usefixtures("unread")
def test_hydra_heads_of_an_architecture_known_by_config_alone(tmp_path):
    folder = published_folders.save(tmp_path, {"hydra_head_arch": "eagle-attn"}, {"fc.weight": torch.ones(H, 2 * H)})
    assert "its hydra_head_arch is 'eagle-attn'" in refusal(folder)
    nothing = published_folders.save(tmp_path / "b", {"hydra_num_heads": 4}, {"x": torch.ones(2)})
    assert "hydra_mlp.0.0.linear.weight is missing" in refusal(nothing)


@pytest.mark.usefixtures("unread")
def test_a_count_of_hydra_heads_no_file_could_hold(tmp_path):
    folder = published_folders.hydra(tmp_path, file="model.safetensors")
    published_folders.edit_tensors(folder, more={"hydra_mlp.999999999.0.linear.weight": torch.ones(H, H)})
    assert "is missing" in refusal(folder)


@pytest.mark.usefixtures("unread")
def test_blockwise_heads_of_another_number_than_config_says(tmp_path):
    assert "sets blockwise_num_heads 4, and the weights hold 3" in refusal(
        published_folders.blockwise(tmp_path, blockwise_num_heads=4)
    )
    folder = published_folders.blockwise(tmp_path / "b")
    text = refusal(published_folders.edit_tensors(folder, more={"blockwise.output.weight": torch.zeros(3 * H + 1, 20)}))
    assert "has 97 rows and has to have 32 for every head" in text
    empty = published_folders.edit_tensors(folder, more={"blockwise.output.weight": torch.zeros(0, 20)})
    assert "has 0 rows" in refusal(empty)


@pytest.mark.parametrize("name", ["blockwise.hidden.weight", "blockwise.output.weight"])
@pytest.mark.usefixtures("unread")
def test_blockwise_heads_that_are_torn(tmp_path, name):
    folder = published_folders.edit_tensors(published_folders.blockwise(tmp_path), drop=(name,))
    assert f"{name.removeprefix('blockwise.')} is missing" in refusal(folder)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"layer_types": ["sliding_attention"]}, "sliding_window in config.json has to be a positive number"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window in config.json has to be"),
        ({"layer_types": ["linear_attention"]}, "layer_types in config.json has to be 1 of"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types in config.json has to be 1 of"),
    ],
)
def test_attention_that_config_json_does_not_describe_is_refused(tmp_path, said, why):
    assert why in refusal(published_folders.speculators(tmp_path, **said))


@pytest.mark.usefixtures("unread")
def test_a_feedback_of_no_known_name_is_refused(tmp_path):
    assert "foredraft_feedback in config.json" in refusal(published_folders.eagle3(tmp_path, foredraft_feedback="half"))
