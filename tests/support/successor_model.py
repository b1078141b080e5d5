"""A target with fixed successors: x is followed by x + 7, and its states encode x and nothing else.

Heads with exact predictions can be written down for it: if one position is off, no draft token is accepted.
"""

from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import LLM
from foredraft.drafters.method import DrafterContext

V = 48
STRIDE = 7  # no divisor in common with V: the walk visits every token


def power(k: int) -> Tensor:
    """[V, V] the matrix that takes the state of x to logits for the k-th token after it."""
    matrix = torch.zeros(V, V, dtype=torch.float64)
    x = torch.arange(V)
    matrix[(x + k * STRIDE) % V, x] = 1
    return matrix


@cache
def model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """One layer that adds nothing; the state after the norm is sqrt(V) at x and zero elsewhere."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=V, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        made.model.layers[0].self_attn.o_proj.weight.zero_()
        made.model.layers[0].mlp.down_proj.weight.zero_()
        made.model.embed_tokens.weight.copy_(torch.eye(V))
        made.lm_head.weight.copy_(power(1))
    return made.to(dtype)


@cache
def llm(dtype: torch.dtype = torch.float64) -> LLM:
    return LLM(model(dtype), None, is_debug=True, fused=None if dtype == torch.float64 else True)


def context(num_tokens: int, dtype: torch.dtype = torch.float64) -> DrafterContext:
    return DrafterContext(vocab_size=V, target=llm(dtype).target, num_speculative_tokens=num_tokens, dtype=dtype)
