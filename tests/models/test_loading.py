"""Loading: a fault of a folder or a name gives an error of one line; nothing is initialised at random."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from foredraft.errors import ForedraftError
from foredraft.models.loading import load_model, load_tokenizer, parse_device, parse_dtype
from foredraft.models.vocabularies import check_vocabularies
from tests.support.families import TINY, VOCAB

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refusal(name: str | Path, **options: Any) -> str:
    with pytest.raises(ForedraftError) as caught:
        load_model(str(name), options.get("dtype", "auto"), CPU)
    text = str(caught.value)
    assert "\n" not in text
    assert str(name) in text
    return text


def rewrite_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite_weights(folder: Path, drop: str | None = None, **more: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file) | more
    save_file({key: value for key, value in weights.items() if key != drop}, file, {"format": "pt"})


def test_a_good_folder_loads_with_its_own_weights_and_in_the_dtype_asked_for(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model = load_model(str(folder), "float64", CPU)
    assert model.dtype == torch.float64
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"].double())
    assert load_model(str(folder), "auto", CPU).dtype == torch.float32


def test_tied_embeddings_are_stored_once_and_not_missing(tmp_path: Path) -> None:
    hf.LlamaForCausalLM(hf.LlamaConfig(**TINY | {"tie_word_embeddings": True})).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(str(tmp_path), "auto", CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_folder_under_the_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    load_model("~/llama", "auto", CPU)
    assert load_tokenizer("~/llama") is None


def test_a_missing_path(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing")


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    assert "is a file; give the folder" in refusal(folder / "model.safetensors")


def test_a_device_instead_of_a_folder() -> None:
    assert "is a file; give the folder" in refusal("/dev/null")


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "without a config.json" in refusal(tmp_path)


def test_a_configuration_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(folder)


def test_an_unknown_architecture(folder: Path) -> None:
    rewrite_config(folder, model_type="perceptron9000")
    assert "no architecture that this transformers version supports" in refusal(folder)


def test_a_model_that_writes_no_text(folder: Path) -> None:
    rewrite_config(folder, model_type="vit")
    assert "is not a causal language model (ViTConfig)" in refusal(folder)


def test_weights_of_another_kind_of_model(folder: Path) -> None:
    rewrite_config(folder, model_type="t5", is_encoder_decoder=True)
    assert "lack" in refusal(folder)


def test_weights_only_in_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refusal(folder)
    assert "pytorch_model.bin" in text
    assert "save them as safetensors" in text


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no safetensors weights" in refusal(folder)


@pytest.mark.parametrize("size", [3, 100, 5000])
def test_weights_cut_off(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors is cut off" in refusal(folder)


def test_weights_that_are_something_else(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "model.safetensors is not a safetensors file" in refusal(folder)


def test_a_shard_that_is_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    # transformers has an option to fill it with random numbers
    rewrite_config(folder, intermediate_size=64)
    text = refusal(folder)
    assert "model.layers.0.mlp.down_proj.weight is stored as [32, 48] and config.json makes it [32, 64]" in text


def test_a_tensor_that_is_missing(folder: Path) -> None:
    # transformers warns and initialises it at random
    rewrite_weights(folder, drop="model.layers.1.mlp.up_proj.weight")
    assert "its weights lack model.layers.1.mlp.up_proj.weight;" in refusal(folder)


def test_a_checkpoint_of_fewer_layers_than_configured(folder: Path) -> None:
    rewrite_config(folder, num_hidden_layers=4)
    assert "its weights lack model.layers.3.input_layernorm.weight (and 8 more)" in refusal(folder)


def test_a_checkpoint_of_more_layers_than_configured(folder: Path) -> None:
    # transformers warns and leaves them out
    rewrite_config(folder, num_hidden_layers=2)
    assert "no place for model.layers.2.input_layernorm.weight (and 8 more)" in refusal(folder)


def test_a_bias_that_the_configuration_turned_off(folder: Path) -> None:
    rewrite_weights(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    assert "no place for model.layers.0.self_attn.q_proj.bias of its weights" in refusal(folder)


def test_tensors_that_no_layer_of_the_model_resembles_are_let_be(folder: Path) -> None:
    # old checkpoints store rotary tables; new ones bring heads for other methods
    rewrite_weights(
        folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "mtp.proj.weight": torch.ones(3)}
    )
    load_model(str(folder), "auto", CPU)


def test_an_unknown_dtype_or_device(folder: Path) -> None:
    with pytest.raises(ForedraftError, match="unknown dtype 'int3'; use auto, float32"):
        load_model(str(folder), "int3", CPU)
    with pytest.raises(ForedraftError, match=r"unknown dtype 'torch\.int8'; use auto"):
        parse_dtype(torch.int8)
    with pytest.raises(ForedraftError, match="unknown device 'abacus'; use auto, cpu, cuda"):
        parse_device("abacus")
    with pytest.raises(ForedraftError, match="device 'meta' is not supported; use auto"):
        parse_device("meta")
    assert parse_dtype("auto") is None
    assert parse_dtype(torch.bfloat16) == parse_dtype("bfloat16") == torch.bfloat16
    assert parse_device("cpu") == parse_device(CPU) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_gpu_that_is_not_there(device: str | torch.device) -> None:
    with pytest.raises(ForedraftError, match="torch sees no GPU; use device='cpu'"):
        parse_device(device)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "no-such-model"])
def test_a_hub_id_without_a_network(name: str) -> None:
    assert "is not in the local cache and could not be fetched; check the name or the network" in refusal(name)


def tokenizer(words: list[str]) -> Any:
    vocab = {word: i for i, word in enumerate(words)}
    return hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, words[0])))


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    assert load_tokenizer(str(folder)) is None


def test_a_tokenizer_is_loaded_and_a_broken_one_refused(folder: Path) -> None:
    tokenizer(["?", "a", "b"]).save_pretrained(folder)
    loaded = load_tokenizer(str(folder))
    assert loaded is not None
    assert loaded.get_vocab() == {"?": 0, "a": 1, "b": 2}
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ForedraftError, match="the tokenizer of") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_vocabularies_padded_to_different_widths_are_one() -> None:
    words = [f"w{i}" for i in range(90)]
    check_vocabularies(("big", tokenizer(words), 128), ("small", tokenizer(words), VOCAB))
    check_vocabularies(("big", tokenizer(words), 90), ("small", tokenizer(words), 128))


def test_the_first_token_that_differs_is_named_with_both_models() -> None:
    words = [f"w{i}" for i in range(90)]
    other = [*words[:40], "other", *words[41:60], "more", *words[61:]]
    with pytest.raises(ForedraftError) as caught:
        check_vocabularies(("org/target", tokenizer(words), 90), ("org/draft", tokenizer(other), 90))
    text = str(caught.value)
    assert "org/draft does not share the vocabulary of org/target: token 40 is 'other' in the draft" in text
    assert "'w40' in the target" in text


def test_a_token_that_one_of_them_lacks_is_a_difference() -> None:
    words = [f"w{i}" for i in range(90)]
    with pytest.raises(ForedraftError, match="token 89 is 'w89' in the draft and missing in the target"):
        check_vocabularies(("org/target", tokenizer(words[:-1]), 90), ("org/draft", tokenizer(words), 90))


def test_without_tokenizers_only_the_widths_can_be_compared() -> None:
    check_vocabularies(("big", None, 90), ("small", None, 90))
    check_vocabularies(("big", tokenizer(["a"]), 90), ("small", None, 90))
    with pytest.raises(ForedraftError, match="small has 91 tokens and big 90, and without both tokenizers"):
        check_vocabularies(("big", None, 90), ("small", None, 91))
