"""LoRA adapters: the outputs of peft's merged model, and weights that are shared with the base."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foredraft import LLM, ForedraftError, Sampling, zoo
from foredraft.models.hf import get_packed_weights
from foredraft.models.lora import check_lora_folder
from tests.support import tiny_models, tiny_seq2seq

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft reads it
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is missing")
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = Sampling(temperature=1, seed=3, max_tokens=24, ignore_eos=True)
PROMPT = [5, 9, 12, 40]


def save_adapter(folder: Path, base: Path, modules: list[str]) -> Path:
    """Save an adapter with random matrices, large enough to change outputs."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=modules)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_models.llama(hidden=64).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"), base, ["q_proj", "down_proj"])


@pytest.fixture(scope="module")
def merged(base, adapter, tmp_path_factory) -> Path:
    from peft import PeftModel

    folder = tmp_path_factory.mktemp("merged")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().save_pretrained(
        folder
    )
    return folder


def generate(llm: LLM, sampling: Sampling) -> list[int]:
    return llm.generate([PROMPT], sampling)[0].token_ids


@needs_peft
class TestAnAdapter:
    @pytest.mark.parametrize(
        "options", [{}, {"fused": False}, {"quantization": "int8"}], ids=["native", "torch", "int8"]
    )
    def test_it_has_the_outputs_of_the_model_that_peft_merges(self, base, adapter, merged, options):
        llm = LLM(str(base), None, **options)
        adapted = LLM(str(base), None, lora=adapter, shares_weights_of=llm, **options)
        expected = LLM(str(merged), None, **options)
        for sampling in (GREEDY, SEEDED):
            assert generate(adapted, sampling) == generate(expected, sampling) != generate(llm, sampling)
        for name, parameter in expected.target.model.named_parameters():
            assert torch.equal(adapted.target.model.get_parameter(name), parameter), name
        pairs = zip(get_packed_weights(adapted.target), get_packed_weights(expected.target), strict=True)
        assert all(torch.equal(own.data, other.data) for own, other in pairs)

    def test_it_has_the_greedy_text_of_transformers(self, base, adapter):
        """Float32, because in bfloat16 two orders of summation may choose different tokens."""
        from peft import PeftModel

        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
        ids = model.merge_and_unload().generate(
            torch.tensor([PROMPT]), do_sample=False, min_new_tokens=24, max_new_tokens=24, pad_token_id=0
        )
        allowed = Sampling(temperature=0, max_tokens=24, min_tokens=24)
        adapted = LLM(str(base), "ngram", lora=adapter, dtype="float32")
        assert generate(adapted, allowed) == ids[0, len(PROMPT) :].tolist()

    def test_only_layers_that_the_adapter_changes_take_memory(self, base, adapter):
        llm = LLM(str(base), None)
        adapted = LLM(str(base), None, lora=adapter, shares_weights_of=llm)
        for name, parameter in adapted.target.model.named_parameters():
            own = llm.target.model.get_parameter(name)
            assert parameter.numel() == 0 or parameter.data_ptr() == own.data_ptr(), name
        pairs = list(zip(get_packed_weights(llm.target), get_packed_weights(adapted.target), strict=True))
        shared = [a is b for a, b in pairs]
        # by layer: query, key and value; output; gate and up; down. Then the head.
        assert shared == [False, True, True, False] * 2 + [True]
        expected = generate(adapted, GREEDY)
        llm.close()
        assert generate(adapted, GREEDY) == expected  # shared weights live as long as any model has them

    def test_modules_of_torch_are_shared_too(self, base, adapter):
        llm = LLM(str(base), None, fused=False, dtype="float64")
        adapted = LLM(str(base), None, lora=adapter, shares_weights_of=llm, fused=False, dtype="float64")
        own = dict(llm.target.model.named_parameters())
        for name, parameter in adapted.target.model.named_parameters():
            is_adapted = name.split(".")[-2] in ("q_proj", "down_proj")
            assert (parameter.data_ptr() == own[name].data_ptr()) != is_adapted, name

    def test_a_head_of_the_base_drafts_for_it(self, tmp_path):
        folder = Path(str(zoo.find_target_folder(zoo.DEFAULT_TARGET)))
        adapter = save_adapter(tmp_path, folder, ["v_proj"])
        plain = LLM(lora=adapter, drafter=None)
        drafted = LLM(lora=adapter, drafter={"method": "eagle3", "num_speculative_tokens": 3})
        found, expected = (llm.generate(["def f(n):"], GREEDY)[0] for llm in (drafted, plain))
        assert found.token_ids == expected.token_ids
        assert found.stats.num_accepted > 0

    def test_an_adapter_of_another_model_is_refused(self, base, tmp_path):
        other = tmp_path / "other"
        tiny_models.llama(hidden=32).bfloat16().save_pretrained(other)
        adapter = save_adapter(tmp_path / "adapter", other, ["q_proj"])
        with pytest.raises(ForedraftError, match="does not fit"):
            LLM(str(base), None, lora=adapter)
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["c_attn"]}))
        with pytest.raises(ForedraftError, match="does not fit"):
            LLM(str(base), None, lora=adapter)

    def test_weights_that_are_missing_are_refused(self, base, adapter, tmp_path):
        """peft would initialise them at random, with a warning."""
        for file in adapter.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((adapter / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "k_proj"]}))
        with pytest.raises(ForedraftError, match=r"lacks weights that its adapter_config\.json names"):
            LLM(str(base), None, lora=tmp_path)

    def test_an_encoder_is_refused(self, base, adapter, tmp_path):
        tiny_seq2seq.make_model("t5").save_pretrained(tmp_path)
        with pytest.raises(ForedraftError, match="has an encoder"):
            LLM(str(tmp_path), None, lora=adapter)


def test_a_loaded_model_takes_no_adapter():
    with pytest.raises(ForedraftError, match="give its folder or hub id"):
        LLM(tiny_models.target(), None, lora="x")


def test_folders_that_are_no_adapter_are_refused(tmp_path):
    def write(**files: object) -> str:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path)

    for make, words in [
        (lambda: str(tmp_path / "nothing"), "is no folder; give the folder of a LoRA adapter"),
        (lambda: write(config={}), "so it is no adapter; a whole model is given as a model"),
        (lambda: write(adapter_config={"peft_type": "PROMPT_TUNING"}), "only LORA is served"),
        (lambda: write(adapter_config=[]), "is not a JSON object"),
        (lambda: write(adapter_config={"peft_type": "LORA"}), r"has no adapter_model\.safetensors"),
    ]:
        with pytest.raises(ForedraftError, match=words):
            check_lora_folder(make())
