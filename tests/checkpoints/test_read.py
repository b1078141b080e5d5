"""Published layouts: every one is recognised and read, tensor by tensor, with the sizes that its tensors imply."""

import json
from pathlib import Path

import pytest
import torch

from foredraft.checkpoints.formats import LayoutOrder
from foredraft.checkpoints.tensors import open_tensors
from foredraft.drafters.blockwise.checkpoint import BlockwiseShape
from foredraft.drafters.checkpoint_folders import list_formats, read, recognise
from foredraft.drafters.eagle.checkpoint import EagleShape
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.drafters.hydra.checkpoint import HydraPrefixShape, HydraShape
from foredraft.drafters.medusa.checkpoint import MedusaShape
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import HEAD_DIM, HEADS, INNER, KV_HEADS, TARGET, VD, H, V


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_are_counted_from_the_keys_for_published_configs_miscount_them(tmp_path, file, layers):
    folder = published_folders.medusa(tmp_path, heads=5, layers=layers, file=file)
    held = read(folder, TARGET)
    assert held.shape == MedusaShape(H, V, num_heads=5, num_layers=layers)
    assert held.tensors.keys() == published_folders.read_tensors(folder).keys()
    assert all(torch.equal(value, held.tensors[name]) for name, value in published_folders.read_tensors(folder).items())
    assert held.config["medusa_num_heads"] == 2


def test_medusa_heads_without_a_matrix_use_the_targets(tmp_path):
    held = read(published_folders.medusa(tmp_path, version2=True), TARGET)
    assert held.shape == MedusaShape(H, V, num_heads=3, has_own_head=False)


def test_accuracies_beside_medusa_heads_are_read(tmp_path):
    table = [[0.6, 0.1], [0.3, 0.1], [0.2]]
    held = read(published_folders.medusa(tmp_path, foredraft_head_accuracies=table), TARGET)
    assert held.shape.accuracies == ((0.6, 0.1), (0.3, 0.1), (0.2,))


@pytest.mark.parametrize("layers", [1, 2])
def test_vllms_names_for_medusa(tmp_path, layers):
    folder = published_folders.vllm_medusa(tmp_path, layers=layers)
    held, raw = read(folder, TARGET), published_folders.read_tensors(folder)
    assert held.shape == MedusaShape(H, V, num_heads=3, num_layers=layers)
    assert torch.equal(held.tensors["1.0.linear.bias"], raw["medusa_heads.blocks.1.layers.0.bias"])
    assert torch.equal(held.tensors[f"2.{layers}.weight"], raw["medusa_heads.lm_heads.2.weight"])


def test_vllms_medusa_without_biases_has_zeros_and_shares_its_one_matrix(tmp_path):
    folder = published_folders.vllm_medusa(tmp_path, shared=True, bias=False)
    held, raw = read(folder, TARGET), published_folders.read_tensors(folder)
    assert not held.tensors["0.0.linear.bias"].any()
    assert held.tensors["0.1.weight"] is held.tensors["2.1.weight"]
    assert torch.equal(held.tensors["0.1.weight"], raw["medusa_heads.lm_head.weight"])


def test_of_a_whole_model_with_medusa_heads_only_the_heads_are_read(tmp_path, caplog):
    held = read(published_folders.medusa2(tmp_path), TARGET)
    assert held.shape == MedusaShape(H, V, num_heads=3)
    assert "they belong to that model" in caplog.text


@pytest.mark.parametrize("inner", [24, H])
@pytest.mark.parametrize("tied", [False, True])
def test_an_mlp_speculator(tmp_path, tied, inner):
    folder = published_folders.mlp_speculator(tmp_path, tied=tied, inner=inner, scaled=True)
    held, raw = read(folder, TARGET), published_folders.read_tensors(folder)
    assert held.shape == MlpSpeculatorShape(
        H, inner, V, 3, is_tied=tied, scales_input=True, branching=(4, 3, 2), candidates=5
    )
    assert {f"speculator.{name}" for name in held.tensors} == raw.keys()


def test_tied_steps_are_the_same_whether_the_file_repeats_them(tmp_path):
    once = read(published_folders.mlp_speculator(tmp_path / "once", tied=True), TARGET)
    repeated = read(published_folders.mlp_speculator(tmp_path / "repeated", tied=True, repeated=True), TARGET)
    assert once.shape == repeated.shape
    assert once.tensors.keys() == repeated.tensors.keys()


@pytest.mark.parametrize("repeated", [False, True])
def test_an_lstm_speculator(tmp_path, repeated):
    held = read(published_folders.lstm_speculator(tmp_path, repeated=repeated), TARGET)
    assert held.shape == MlpSpeculatorShape(
        H, 24, V, 3, is_tied=True, scales_input=True, branching=(1, 1, 1), candidates=3, is_lstm=True
    )
    raw = published_folders.read_tensors(tmp_path)
    assert len(held.tensors) == 14
    assert all(torch.equal(value, raw[name]) for name, value in held.tensors.items())


def test_untied_steps_are_counted_by_tensors(tmp_path):
    folder = published_folders.mlp_speculator(tmp_path, n=3)
    published_folders.edit_config(folder, n_predict=5)
    assert read(folder, TARGET).shape.n_predict == 3


def test_blockwise_heads(tmp_path):
    held = read(published_folders.blockwise(tmp_path, heads=4), TARGET)
    assert held.shape == BlockwiseShape(H, V, num_heads=4, inner=20)
    raw = published_folders.read_tensors(tmp_path)
    assert raw.keys() == {f"blockwise.{name}" for name in held.tensors}
    assert all(torch.equal(value, raw[f"blockwise.{name}"]) for name, value in held.tensors.items())


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "model.safetensors"])
@pytest.mark.parametrize("layers", [1, 3])
def test_hydra_heads_and_none_of_the_targets_embeddings(tmp_path, layers, file):
    folder = published_folders.hydra(tmp_path, heads=4, layers=layers, file=file, hidden_state_offset=2)
    held = read(published_folders.edit_config(folder, drop=("grounded_heads",), hydra_num_heads=2), TARGET)
    assert held.shape == HydraShape(H, V, num_heads=4, num_layers=layers, offset=2)
    raw = published_folders.read_tensors(folder)
    assert raw.keys() - held.tensors.keys() == {"input_embed_fn.weight"}
    assert all(torch.equal(value, raw[name]) for name, value in held.tensors.items())


def test_hydra_heads_behind_a_prefix_layer(tmp_path):
    folder = published_folders.hydra(tmp_path, layers=2, prefix=True, file="model.safetensors")
    held, raw = read(folder, TARGET), published_folders.read_tensors(folder)
    assert held.shape == HydraShape(H, V, num_heads=3, num_layers=2, prefix=HydraPrefixShape(H, 16, 8))
    assert torch.equal(held.tensors["hydra_mlp.1.1.linear.weight"], raw["hydra_mlp.1.3.linear.weight"])
    assert torch.equal(held.tensors["hydra_mlp.1.0.res_connection.bias"], raw["hydra_mlp.1.1.res_connection.bias"])
    assert torch.equal(held.tensors["hydra_lm_head.2.bias"], raw["hydra_lm_head.2.1.bias"])
    assert "prefix_embeding_layer.norm.weight" in held.tensors
    assert "prefix_embeding_layer.embed_tokens.weight" not in held.tensors
    unsaid = read(published_folders.edit_config(folder, drop=("hydra_head_arch",)), TARGET)
    assert unsaid.shape == held.shape


def test_short_forms_of_hydra_heads(tmp_path):
    held = read(published_folders.hydra(tmp_path, own_head=False, rank=9), TARGET)
    assert held.shape == HydraShape(H, V, num_heads=3, has_own_head=False, rank=9)
    assert held.format == "lean Hydra"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors", "sharded"])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_eagle_with_and_without_the_bias_of_fc(tmp_path, file, fc_bias):
    folder = published_folders.eagle(tmp_path, fc_bias=fc_bias, qkv_bias=True, file=file, dtype=torch.float16)
    published_folders.edit_config(folder, drop=("bias",))
    held = read(folder, TARGET, "eagle")
    assert isinstance(held.shape, EagleShape)
    assert (held.shape.has_fc_bias, held.shape.has_embedding, held.shape.num_layers) == (fc_bias, True, 1)
    block = held.shape.block
    assert (block.hidden, block.heads, block.kv_heads, block.head_dim) == (H, HEADS, KV_HEADS, HEAD_DIM)
    assert (block.intermediate, block.eps, block.has_qkv_bias, block.has_out_bias) == (INNER, 1e-5, True, False)
    assert block.rope == {"rope_type": "default", "rope_theta": 500.0}
    assert {value.dtype for value in held.tensors.values()} == {torch.float16}
    assert held.tensors.keys() == published_folders.read_tensors(folder).keys()


def test_eagle_of_two_layers_without_an_embedding(tmp_path):
    held = read(published_folders.eagle(tmp_path, layers=2, embedding=False), TARGET)
    assert (held.shape.num_layers, held.shape.has_embedding) == (2, False)
    assert "layers.1.input_layernorm.weight" in held.tensors


EAGLE3 = [
    published_folders.eagle3,
    published_folders.specforge,
    published_folders.modelopt,
    published_folders.speculators,
]


@pytest.mark.parametrize("make", EAGLE3)
@pytest.mark.parametrize("whole", [False, True])
def test_eagle3_of_every_writer(tmp_path, make, whole):
    folder = make(tmp_path, whole=whole)
    held, raw = read(folder, TARGET), published_folders.read_tensors(folder)
    assert isinstance(held.shape, Eagle3Shape)
    assert held.shape.draft_vocab_size == (V if whole else VD)
    assert (held.shape.target_hidden, held.shape.hidden_layers, held.shape.num_layers) == (H, (2, 6, 9), 1)
    assert not any(name.startswith("midlayer") for name in held.tensors)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in raw.items() if name != "t2d"}
    assert held.tensors.keys() == renamed.keys()
    assert all(torch.equal(value, held.tensors[name]) for name, value in renamed.items())


@pytest.mark.parametrize(
    ("make", "method", "layout"),
    [
        (published_folders.medusa, "medusa", "medusa"),
        (published_folders.medusa2, "medusa", "medusa"),
        (published_folders.mlp_speculator, "mlp_speculator", "mlp_speculator"),
        (published_folders.lstm_speculator, "mlp_speculator", "arctic_lstm_speculator"),
        (published_folders.blockwise, "blockwise", "blockwise"),
        (published_folders.hydra, "hydra", "hydra"),
        (published_folders.eagle, "eagle", "eagle"),
        (published_folders.eagle3, "eagle3", "eagle3"),
        (published_folders.chimera, "chimera", "chimera"),
        (published_folders.speculators, "eagle3", "speculators"),
    ],
)
def test_the_method_is_recognised(tmp_path, make, method, layout):
    assert recognise(make(tmp_path)) == (method, layout)


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (published_folders.eagle3, "EAGLE-3"),
        (published_folders.specforge, "SpecForge EAGLE-3"),
        (published_folders.modelopt, "ModelOpt EAGLE-3"),
        (published_folders.speculators, "speculators EAGLE-3"),
    ],
)
def test_the_layout_of_the_source_is_reported(tmp_path, make, layout):
    assert read(make(tmp_path), TARGET).format == layout


# The layer-id trap: the same states are [2, 6, 9] as boundaries and [1, 5, 8] as outputs of layers.
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (published_folders.eagle3, {}),
        (published_folders.eagle3, {published_folders.IDS: [2, 6, 9]}),
        (published_folders.eagle3, {"eagle_config": {published_folders.IDS: [1, 5, 8]}}),
        (
            published_folders.eagle3,
            {published_folders.IDS: [2, 6, 9], "eagle_config": {published_folders.IDS: [1, 5, 8]}},
        ),
        (published_folders.specforge, {"ids": [1, 5, 8]}),
        (published_folders.modelopt, {"ids": [1, 5, 8]}),
        (published_folders.speculators, {"ids": [2, 6, 9]}),
    ],
)
def test_layer_ids_mean_what_their_writer_meant(tmp_path, make, options, caplog):
    caplog.set_level("INFO")
    assert read(make(tmp_path, **options), TARGET).shape.hidden_layers == (2, 6, 9)
    assert "boundaries [2, 6, 9]" in caplog.text


@pytest.mark.parametrize(("ids", "taps"), [([0], (0,)), ([4, 12], (4, 12)), ([1, 3, 5, 7], (1, 3, 5, 7))])
def test_fc_tells_how_many_states_there_are(tmp_path, ids, taps):
    folder = published_folders.eagle3(tmp_path, states=len(ids), **{published_folders.IDS: ids})
    assert read(folder, TARGET).shape.hidden_layers == taps


def test_without_aux_states_the_last_one_normalised_is_read(tmp_path):
    shape = read(published_folders.modelopt(tmp_path, fc=False), TARGET).shape
    assert (shape.has_fc, shape.hidden_layers) == (False, (AFTER_FINAL_NORM,))


def test_norm_before_residual_is_on_by_default_in_speculators_alone(tmp_path):
    for make, default in zip(EAGLE3, (False, False, False, True), strict=True):
        folder = tmp_path / make.__name__
        assert read(make(folder), TARGET).shape.norm_before_residual is default
        given = make(folder / "given", norm_before_residual=not default)
        assert read(given, TARGET).shape.norm_before_residual is not default


@pytest.mark.parametrize(("norms", "flags"), [(("input_norm",), (True, False)), (("fc_norm",), (False, True)),
                                              (("aux_norm",), (False, True))])  # fmt: skip
def test_norms_before_fc_show_by_their_tensors(tmp_path, norms, flags):
    held = read(published_folders.eagle3(tmp_path, norms=norms), TARGET)
    assert (held.shape.norm_before_fc, held.shape.has_fc_norm) == flags
    assert ("fc_norm.2.weight" in held.tensors) is flags[1]


def test_a_missing_head_is_borrowed_from_the_target(tmp_path):
    shape = read(published_folders.eagle3(tmp_path, head=False, whole=True, draft_vocab_size=VD), TARGET).shape
    assert (shape.has_own_head, shape.draft_vocab_size) == (False, V)


def test_a_map_of_the_whole_vocabulary_is_dropped(tmp_path):
    folder = published_folders.eagle3(tmp_path, whole=True)
    published_folders.edit_tensors(
        folder, more={"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    )
    assert "d2t" not in read(folder, TARGET).tensors


def test_qwen3s_norms_and_biases_show_by_their_tensors(tmp_path):
    block = read(published_folders.eagle3(tmp_path, qkv_bias=True, qk_norm=True), TARGET).shape.block
    assert (block.has_qkv_bias, block.has_out_bias, block.has_qk_norm) == (True, False, True)


@pytest.mark.parametrize("later", [("input_layernorm",), ("hidden_norm",), ("input_layernorm", "hidden_norm")])
def test_the_norm_of_later_layers_has_two_names_in_the_wild(tmp_path, later):
    held = read(published_folders.eagle3(tmp_path, layers=2, first="layers.0", later=later), TARGET)
    assert held.shape.num_layers == 2
    assert "layers.1.input_layernorm.weight" in held.tensors
    assert "layers.1.hidden_norm.weight" not in held.tensors


def test_a_draft_narrower_than_its_target(tmp_path):
    folder = published_folders.eagle3(tmp_path, hidden=16, target_hidden_size=H)
    shape = read(folder, TARGET).shape
    assert (shape.block.hidden, shape.target_hidden, shape.has_embedding) == (16, H, True)


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
        (
            {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0},
        ),
        ({"rope_theta": 9.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 9.0}),
    ],
)
def test_both_spellings_of_rope(tmp_path, given, rope):
    assert read(published_folders.eagle(tmp_path, **given), TARGET).shape.block.rope == rope


def test_buffers_that_old_libraries_stored_are_no_weights(tmp_path):
    folder = published_folders.eagle(tmp_path, file="model.safetensors")
    published_folders.edit_tensors(folder, more={"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    read(folder, TARGET)


def test_a_folder_given_as_path_or_text_and_under_home(tmp_path, monkeypatch):
    published_folders.eagle(tmp_path / "head")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/head", TARGET).folder == "~/head"
    assert read(Path(tmp_path / "head"), TARGET).method == "eagle"


@pytest.mark.parametrize(
    "make",
    [
        published_folders.medusa, published_folders.vllm_medusa, published_folders.medusa2,
        published_folders.mlp_speculator, published_folders.blockwise, published_folders.hydra,
        published_folders.eagle, published_folders.eagle3, published_folders.specforge, published_folders.modelopt,
        published_folders.speculators, published_folders.chimera, published_folders.lstm_speculator,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_signs_of_the_same_order_exclude_each_other(tmp_path, make):
    """Otherwise the alphabet would decide between two methods."""
    files = open_tensors(make(tmp_path), str(tmp_path))
    names, config = list(files.stored_tensors), json.loads((tmp_path / "config.json").read_text())
    for order in LayoutOrder:
        found = [
            (method, layout.name)
            for method, entry in list_formats().items()
            for layout in entry.layouts
            if layout.order == order and layout.matches(names, config)
        ]
        assert len(found) <= 1, order
