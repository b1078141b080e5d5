"""A model that reads a weight by itself decodes as transformers does, and a packed weight gives no numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GotOcr2Config,
    LongcatFlashConfig,
    Qwen2Config,
)

from foredraft import LLM, Sampling
from foredraft.models.weight_use import WeightPlaceholder, track_weight_reads

PROMPT = [5, 9, 7, 11, 5, 9, 7, 11, 5, 9]


class Router(nn.Module):
    """Calls one of its layers, and reads the weight of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.called(x), self.read.weight.type(torch.float32))


def test_a_weight_read_outside_its_module_is_noticed_and_all_is_as_before():
    model, x = Router(), torch.randn(2, 4)
    own, expected = [model.called.weight, model.read.weight], model(x)
    with track_weight_reads([model.called, model.read]) as found:
        assert torch.equal(model(x), expected)
    assert found
    assert set(found) == {model.read}
    assert model.called.weight is own[0]
    assert model.read.weight is own[1]
    assert not model.called._forward_hooks


def test_a_multimodal_model_attends_as_before_after_it_was_tried(tmp_path):
    """Fault: its text attended without a cache after packing, because one name was given back for all of its parts."""
    text = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    sight = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32, "output_channels": 16}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(GotOcr2Config(text_config=text, vision_config=sight)).eval().float()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    [out] = LLM(tmp_path, drafter="ngram").generate([PROMPT], sampling)
    assert out.token_ids == ids[0, len(PROMPT) :].tolist()


def test_an_outline_has_a_shape_and_a_type_and_no_numbers():
    weight = WeightPlaceholder.from_shape(3, 5, torch.bfloat16)
    assert (weight.shape, weight.size(0), weight.dtype, weight.device.type) == ((3, 5), 3, torch.bfloat16, "cpu")
    for use in (lambda: weight.float(), lambda: F.linear(torch.ones(1, 5), weight), lambda: weight + 1):
        with pytest.raises(RuntimeError, match="fused=False"):
            use()


def test_longcats_router_reads_its_weight_and_the_text_is_transformers_own(tmp_path):
    """Fault: its classifier was packed, the router read a weight without numbers, and the text was another."""
    config = LongcatFlashConfig(
        vocab_size=128, hidden_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=4, ffn_hidden_size=96,
        expert_ffn_hidden_size=32, n_routed_experts=4, moe_topk=2, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, head_dim=16, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist()
    [out] = LLM(tmp_path, drafter="ngram").generate([PROMPT], Sampling(temperature=0, max_tokens=16, min_tokens=16))
    assert out.token_ids == expected
