"""Tiny Gemma-4 targets and assistants of transformers' own classes, with random weights in float64."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from foredraft import LLM
from tests.support import tiny_models

WINDOW, CENTROIDS = 12, 8
ORDERED = {"use_ordered_embeddings": True, "num_centroids": CENTROIDS, "centroid_intermediate_top_k": 3}
SLIDING, FULL = "sliding_attention", "full_attention"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
VOCAB = 96  # a multiple of the number of clusters


def make_text_config(kinds: list[str], num_shared: int, hidden: int, **settings: Any) -> hf.Gemma4TextConfig:
    """Make a configuration of a decoder with layers of these kinds, the last `num_shared` of which share keys."""
    return hf.Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=len(kinds),
        layer_types=kinds, num_kv_shared_layers=num_shared, sliding_window=WINDOW, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, max_position_embeddings=tiny_models.CONTEXT, initializer_range=0.3,
        eos_token_id=3, bos_token_id=None, pad_token_id=None, **HEADS | settings,
    )  # fmt: skip


@cache
def make_target(num_shared: int = 2) -> Any:
    """Make a target with two layers of each kind, the last `num_shared` of which have no keys of their own."""
    torch.manual_seed(0)
    kinds = [SLIDING, FULL] * 2 if num_shared in (0, 2) else [SLIDING, FULL, SLIDING, SLIDING, FULL]
    model = hf.Gemma4ForCausalLM(make_text_config(kinds, num_shared, 32, final_logit_softcapping=30.0))
    return model.double().eval()


@cache
def make_llm(num_shared: int = 2) -> LLM:
    return LLM(make_target(num_shared), None, is_debug=True)


@cache
def make_assistant(is_ordered: bool = False, seed: int = 1) -> Any:
    """Make an assistant of three layers for these targets."""
    torch.manual_seed(seed)
    text = make_text_config([SLIDING, SLIDING, FULL], 3, 24)
    extra = ORDERED if is_ordered else {}
    config = hf.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32, **extra)
    model = hf.Gemma4AssistantForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "scalar" in name:
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
        if is_ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


def save_assistant(folder: Path, is_ordered: bool = False) -> Path:
    """Write the folder of an assistant as transformers does."""
    make_assistant(is_ordered).save_pretrained(folder)
    return folder
