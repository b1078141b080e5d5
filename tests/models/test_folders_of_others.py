"""Folders without a model: the error names their content and the remedy."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models

from foredraft import LLM
from foredraft.checkpoints.target import read_target
from foredraft.drafters.checkpoint_folders import recognise
from foredraft.errors import ForedraftError
from foredraft.models.loading import load_model, load_tokenizer
from tests.support import tiny_models

CPU = torch.device("cpu")
READERS = [lambda name: load_model(name, "auto", CPU), recognise, read_target]


def gguf(folder: Path) -> Path:
    (folder / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF")
    return folder


def adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/x"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def check_refusal(read, place: Path, said: str) -> None:
    with pytest.raises(ForedraftError, match=said) as caught:
        read(str(place))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS)
def test_adapters_are_named_with_what_to_do(tmp_path, read):
    check_refusal(read, adapter(tmp_path), r"it holds an adapter \(LoRA\): merge it into its base model first")


@pytest.mark.parametrize("read", [recognise, read_target])
def test_gguf_is_named_where_a_folder_is_needed(tmp_path, read):
    said = "GGUF file.* read only as (a )?models? that runs? in one process.* here give the folder of the safetensors"
    check_refusal(read, gguf(tmp_path), said)
    check_refusal(read, tmp_path / "tiny.Q4_K_M.gguf", said)


@pytest.mark.parametrize("read", READERS)
def test_a_name_that_is_neither_here_nor_in_the_cache_may_be_a_mistyped_folder(read, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ForedraftError, match="there is no such folder"):
        read("pair/tarjet")


def test_a_tokenizer_of_another_model_is_refused_and_a_padded_vocabulary_is_not(tmp_path):
    tiny_models.llama(vocab_size=4096).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(3)}
    hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0"))).save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match=r"its tokenizer has 3 tokens and the model 4096.*tokenizer=N") as caught:
        LLM(str(tmp_path), None)
    assert "\n" not in str(caught.value)
    assert LLM(str(tmp_path), None, tokenizer=None).tokenizer is None
    tiny_models.tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), 384) is not None  # 320 tokens, padded
