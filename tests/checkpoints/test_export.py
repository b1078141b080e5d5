"""Exported folders: names, counts, layer ids and flags as each engine reads them; ambiguous ones are refused."""

import json

import pytest
import torch

from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.checkpoint_folders import export, read
from foredraft.errors import ForedraftError
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import IDS, LAYERS, TARGET, VD, H, V

AIM = ExportTarget(TARGET, ("LlamaForCausalLM",))


def export_drafter(tmp_path, folder, fmt):
    """Return (config, tensors, messages of the export)."""
    out = tmp_path / f"out-{fmt}"
    said = export(read(folder, TARGET), fmt, out, AIM)
    return json.loads((out / "config.json").read_text()), published_folders.read_tensors(out), said


def refusal(tmp_path, folder, fmt) -> str:
    with pytest.raises(ForedraftError) as caught:
        export(read(folder, TARGET), fmt, tmp_path / "out", AIM)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fmt", ["eagle3", "vllm", "sglang"])
def test_default_layers_are_left_unsaid_for_every_engine_takes_them(tmp_path, fmt):
    config, tensors, _ = export_drafter(
        tmp_path, published_folders.speculators(tmp_path / "in", norm_before_residual=False), fmt
    )
    assert IDS not in config
    assert "eagle_config" not in config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (VD, V)
    assert "embed_tokens.weight" not in tensors
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * H)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].sum() == VD
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0


def test_other_layers_are_said_to_each_engine_where_it_looks_and_as_it_counts(tmp_path):
    config, _, said = export_drafter(
        tmp_path, published_folders.eagle3(tmp_path / "in", states=2, **{IDS: [3, 7]}), "eagle3"
    )
    assert (config[IDS], config["num_aux_hidden_states"]) == ([3, 7], 2)  # vLLM: boundaries
    assert config["eagle_config"][IDS] == [2, 6]  # SGLang: outputs of layers
    assert "boundaries [3, 7]" in said.notes[0]


@pytest.mark.parametrize("fmt", ["eagle3", "vllm", "sglang", "speculators"])
@pytest.mark.parametrize(("taps", "outer"), [([0, 5], 0), ([5, LAYERS], LAYERS)])
def test_the_outermost_boundaries_are_refused(tmp_path, fmt, taps, outer):
    folder = published_folders.eagle3(tmp_path / "in", states=2, **{IDS: taps})
    assert f"boundary {outer}," in refusal(tmp_path, folder, fmt)


@pytest.mark.parametrize("fmt", ["eagle3", "sglang"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norms": ("input_norm",)}, "norm_before_fc"),
        ({"norm_output": True}, "norm_output"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"head": False, "whole": True}, "the target's lm_head"),
    ],
)
def test_what_sglang_would_ignore_is_refused_and_vllm_carries_it(tmp_path, fmt, options, said):
    folder = published_folders.eagle3(tmp_path / "in", **options)
    assert f"uses {said}: SGLang would compute something else; use --format vllm" in refusal(tmp_path, folder, fmt)
    first = read(folder, TARGET)
    for other in ("vllm", "speculators"):
        export_drafter(tmp_path, folder, other)
        again = read(tmp_path / f"out-{other}", TARGET)
        assert again.shape == first.shape
        assert all(torch.equal(value, again.tensors[name]) for name, value in first.tensors.items())


@pytest.mark.parametrize("fmt", ["eagle3", "vllm", "sglang", "speculators"])
def test_biases_that_engines_have_no_place_for(tmp_path, fmt):
    folder = published_folders.eagle3(tmp_path / "in", qkv_bias=True)
    assert "biases in some matrices" in refusal(tmp_path, folder, fmt)
    published_folders.edit_tensors(published_folders.eagle3(tmp_path / "in"), more={"fc.bias": torch.ones(H)})
    assert "uses a bias in fc" in refusal(tmp_path, tmp_path / "in", fmt)


def test_sliding_attention_goes_where_it_is_read_and_nowhere_else(tmp_path):
    options = {"layer_types": ["sliding_attention"], "sliding_window": 3, "ids": [2, 6, 9]}
    folder = published_folders.speculators(tmp_path / "in", norm_before_residual=False, **options)
    for fmt in ("eagle3", "vllm", "sglang"):
        assert "uses sliding attention" in refusal(tmp_path, folder, fmt)
    export_drafter(tmp_path, folder, "speculators")
    assert read(tmp_path / "out-speculators", TARGET).shape.block.sliding_windows == (3,)


def test_a_hydra_head_of_another_rotary_base_than_the_authors_is_refused(tmp_path):
    folder = published_folders.hydra(tmp_path / "in", prefix=True, rope_theta=77.0)
    assert "supports only base 10000" in refusal(tmp_path, folder, "hydra")


def test_a_head_of_the_last_state_is_vllms_alone(tmp_path):
    folder = published_folders.modelopt(tmp_path / "in", fc=False)
    config, _, _ = export_drafter(tmp_path, folder, "vllm")
    assert config["eagle_config"] == {"use_aux_hidden_state": False}
    for fmt in ("eagle3", "sglang", "speculators"):
        assert "the target's last state without fc" in refusal(tmp_path, folder, fmt)


@pytest.mark.parametrize(("options", "kind"), [({}, "llama"), ({"qk_norm": True}, "qwen3")])
def test_speculators(tmp_path, options, kind):
    config, tensors, said = export_drafter(
        tmp_path, published_folders.eagle3(tmp_path / "in", **options), "speculators"
    )
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "the-target", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert (config[IDS], config["norm_before_residual"]) == ([2, 6, 9], False)
    assert config["transformer_layer_config"]["model_type"] == kind
    assert "layers.0.hidden_norm.weight" in tensors
    assert not any(name.startswith("midlayer") for name in tensors)
    assert said.command == f"vllm serve {tmp_path / 'out-speculators'}"
    assert read(tmp_path / "out-speculators", TARGET).format == "speculators EAGLE-3"


@pytest.mark.parametrize(("ids", "said"), [([3, 7], 2), ([1, 3, 5], None)])
def test_in_speculators_another_number_of_states_is_said_where_vllm_sizes_fc_by_it(tmp_path, ids, said):
    folder = published_folders.eagle3(tmp_path / "in", states=len(ids), **{IDS: ids})
    config, _, _ = export_drafter(tmp_path, folder, "speculators")
    assert config["transformer_layer_config"].get("num_aux_hidden_states") == said


def test_vllms_qwen3_variant_is_named_for_norms_of_queries_and_keys(tmp_path):
    config, _, _ = export_drafter(tmp_path, published_folders.eagle3(tmp_path / "in", qk_norm=True), "vllm")
    assert (config["architectures"], config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")


def test_a_later_layers_norm_has_the_names_of_both_engines(tmp_path):
    _, tensors, _ = export_drafter(
        tmp_path, published_folders.eagle3(tmp_path / "in", layers=2, first="layers.0"), "eagle3"
    )
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])


def test_of_own_embeddings_sglang_is_said_to_drop_them(tmp_path):
    folder = published_folders.eagle3(tmp_path / "in", embedding=True)
    _, tensors, said = export_drafter(tmp_path, folder, "eagle3")
    assert "embed_tokens.weight" in tensors
    assert any("SGLang reads the target's embeddings" in note for note in said.notes)


def test_the_bias_of_an_eagle_head_goes_to_sglang_and_not_to_vllm(tmp_path):
    with_bias = published_folders.eagle(tmp_path / "with", file="model.safetensors")
    assert "has an fc.bias" in refusal(tmp_path, with_bias, "vllm")
    config, tensors, _ = export_drafter(tmp_path, with_bias, "sglang")
    assert tensors["fc.bias"].any()
    assert (config["architectures"], config["bias"]) == (["LlamaForCausalLMEagle"], False)

    zeros = published_folders.edit_tensors(with_bias, more={"fc.bias": torch.zeros(H)})
    _, tensors, _ = export_drafter(tmp_path, zeros, "vllm")
    assert "fc.bias" not in tensors

    without = published_folders.eagle(tmp_path / "without", fc_bias=False)
    _, tensors, _ = export_drafter(tmp_path / "2", without, "sglang")
    assert tensors["fc.bias"].shape == (H,)
    assert not tensors["fc.bias"].any()


def test_attention_biases_of_an_eagle_head_go_to_vllm_alone(tmp_path):
    folder = published_folders.eagle(tmp_path / "in", fc_bias=False, qkv_bias=True)
    assert "biases in its attention" in refusal(tmp_path, folder, "sglang")
    config, tensors, _ = export_drafter(tmp_path, folder, "vllm")
    assert (config["qkv_bias"], config["attention_bias"], config["bias"]) == (True, False, False)
    assert "layers.0.self_attn.q_proj.bias" in tensors


@pytest.mark.parametrize("fmt", ["medusa", "vllm"])
def test_medusa_announces_its_biases_which_vllm_drops_otherwise(tmp_path, fmt):
    folder = published_folders.medusa(tmp_path / "in", heads=4, layers=2)
    config, _, said = export_drafter(tmp_path, folder, fmt)
    assert config["medusa_fc_bias"] is True
    assert config["num_heads" if fmt == "vllm" else "medusa_num_heads"] == 4
    first, again = read(folder, TARGET), read(tmp_path / f"out-{fmt}", TARGET)
    assert again.shape == first.shape
    assert all(torch.equal(value, again.tensors[name]) for name, value in first.tensors.items())
    assert said.notes


def test_medusa_heads_on_the_targets_matrix_are_not_for_vllm(tmp_path):
    assert "uses the target's lm_head" in refusal(
        tmp_path, published_folders.medusa(tmp_path / "in", version2=True), "vllm"
    )


@pytest.mark.parametrize("shared", [False, True])
def test_a_command_is_shown_only_for_medusa_heads_that_vllm_reads_alike(tmp_path, shared):
    """vLLM loads heads on the target's matrix without an error, and accepts none of their tokens."""
    folder = published_folders.medusa(tmp_path / "in", version2=shared)
    *_, said = export_drafter(tmp_path, folder, "medusa")
    assert (said.command is None) is shared
    assert any("target's lm_head" in note for note in said.notes) is shared


def test_an_mlp_speculator_is_written_and_who_loads_it_is_said(tmp_path):
    folder = published_folders.mlp_speculator(tmp_path / "in", tied=True)
    _, tensors, said = export_drafter(tmp_path, folder, "mlp_speculator")
    assert tensors.keys() == published_folders.read_tensors(folder).keys()
    assert "neither vLLM nor SGLang" in said.notes[0]
    for fmt in ("vllm", "sglang"):
        assert "use --format mlp_speculator" in refusal(tmp_path, folder, fmt)


def test_an_lstm_speculator_is_written_as_arctic_loads_it(tmp_path):
    """Arctic Inference requires the embedding of every gate, and splits the widths as text."""
    folder = published_folders.lstm_speculator(tmp_path / "in")
    config, tensors, said = export_drafter(tmp_path, folder, "mlp_speculator")
    raw = published_folders.read_tensors(folder)
    assert tensors.keys() == raw.keys() - {"head.1.weight", "head.2.weight"}
    assert all(torch.equal(value, raw[name]) for name, value in tensors.items())
    given = json.loads((folder / "config.json").read_text())
    assert {name: config.get(name) for name in given} == given
    assert "Arctic Inference does" in said.notes[0]


def test_hydra_heads_are_written_as_their_authors_load_them(tmp_path):
    folder = published_folders.hydra(tmp_path / "in", layers=2)
    config, tensors, said = export_drafter(tmp_path, folder, "hydra")
    assert tensors.keys() == published_folders.read_tensors(folder).keys() - {"input_embed_fn.weight"}
    assert (tmp_path / "out-hydra" / "hydra_lm_head.pt").exists()
    assert (config["hydra_num_heads"], config["hydra_num_layers"], config["hydra_head_arch"]) == (3, 2, "mlp")
    assert (config["grounded_heads"], config["hidden_state_offset"]) == (True, 0)
    assert "neither vLLM nor SGLang" in said.notes[0]
    assert "vLLM loads no Hydra heads; use --format hydra" in refusal(tmp_path, folder, "vllm")


@pytest.mark.parametrize("options", [{"own_head": False}, {"rank": 9}])
def test_short_forms_of_hydra_heads_are_not_for_others(tmp_path, options):
    assert "a form of this project" in refusal(tmp_path, published_folders.hydra(tmp_path / "in", **options), "hydra")


@pytest.mark.parametrize("fmt", ["hydra", "vllm"])
def test_blockwise_heads_are_refused_because_no_other_engine_loads_them(tmp_path, fmt):
    assert "which no other engine loads" in refusal(tmp_path, published_folders.blockwise(tmp_path / "in"), fmt)


@pytest.mark.parametrize("fmt", ["eagle3", "speculators", "mlp_speculator"])
def test_a_format_of_another_method(tmp_path, fmt):
    assert f"{fmt} is no format for it; use --format medusa or vllm" in refusal(
        tmp_path, published_folders.medusa(tmp_path / "in"), fmt
    )


def test_other_weights_in_the_folder_would_be_loaded_too(tmp_path):
    folder = published_folders.eagle3(tmp_path / "in")
    out = published_folders.medusa(tmp_path / "out")
    for forced, said in [(False, "is not empty"), (True, "holds other weights (medusa_lm_head.pt)")]:
        with pytest.raises(ForedraftError) as caught:
            export(read(folder, TARGET), "eagle3", out, AIM, forced)
        assert said in str(caught.value)
