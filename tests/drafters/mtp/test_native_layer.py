"""MTP layers as native code against the target's own layer class."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from foredraft.drafters.mtp.network import MtpNetwork, make_native
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.kv.pool import KVPool
from foredraft.models.draft_layer import attend_causal
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel
from foredraft.models.span import Span
from tests.support.hybrids import DELTA, MOE

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "qwen2": lambda: hf.Qwen2Config(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**SMALL, sliding_window=5, layer_types=["full_attention"] * 2),
    "glm4": lambda: hf.Glm4Config(**SMALL, partial_rotary_factor=0.5, pad_token_id=0),
    "mixtral": lambda: hf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**{**SMALL, **MOE}),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**{**SMALL, **DELTA, "head_dim": 32}),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**{**SMALL, **DELTA, **MOE, "head_dim": 32}),
}
LENGTH, PAGE = 11, 4


def make_network(family: str, **flags: bool) -> MtpNetwork:
    torch.manual_seed(0)
    target = HFModel.wrap_model(hf.AutoModelForCausalLM.from_config(CONFIGS[family]()).float(), family, is_fused=True)
    if target.fused is None:
        pytest.skip("the native kernels are not built")
    network = MtpNetwork(MtpShape(target.hidden_size, target.vocab_size, **flags), target)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("flags", [{}, {"puts_state_first": True}, {"has_output_norm": False}])
@torch.inference_mode()
def test_native_outputs_are_those_of_the_layer_class(family: str, flags: dict[str, bool]) -> None:
    network = make_network(family, **{"has_output_norm": True, **flags})
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 61, (1, LENGTH), generator=g)
    features = 2 * torch.randn(1, LENGTH, 64, generator=g)
    states, following = network(tokens, features, torch.arange(LENGTH)[None], attend_causal)
    expected = network.compute_logits(states)[0], following[0]
    native = make_native(network)
    assert native is not None
    span = Span([3, 1, 2], 0, tokens[0].tolist(), range(LENGTH))
    found = native.forward(ForwardBatch.from_spans([span], PAGE, "cpu"), KVPool(is_native=True), features[0])
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted.float(), rtol=5e-4, atol=5e-4)


def test_a_layer_that_zeroes_the_first_embedding_runs_on_torch() -> None:
    assert make_native(make_network("llama", zeroes_first=True)) is None
