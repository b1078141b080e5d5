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


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            lambda f: gguf(f) / "tiny.Q4_K_M.gguf",
            "is a GGUF file, which is not read; give the folder of the safetensors",
        ),
        (gguf, "it holds tiny.Q4_K_M.gguf, and GGUF files are not read: give the folder of the safetensors"),
        (adapter, r"it holds an adapter \(LoRA\): merge it into its base model first"),
    ],
)
def test_gguf_and_adapters_are_named_with_what_to_do(tmp_path, read, place, said):
    with pytest.raises(ForedraftError, match=said) as caught:
        read(str(place(tmp_path)))
    assert "\n" not in str(caught.value)


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
