"""Tiny random encoder-decoder models of every family, in float64, with distributions that are far from uniform."""

import copy
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import nn

from foredraft import LLM, Seq2Seq
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.models.wrap import wrap_model

VOCAB = 61
PAD, START, EOS = 0, 1, 3
T5 = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
BART = {
    "bart": "Bart",
    "mbart": "MBart",
    "plbart": "PLBart",
    "pegasus": "Pegasus",
    "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall",
    "m2m_100": "M2M100",
}
FAMILIES = (*T5, *BART, "marian", "whisper")
FRAMES, BINS = 30, 8


def make_model(family: str, seed: int = 0, layers: int = 2, width: int = 32, vocab: int = VOCAB, **options: Any) -> Any:
    """Make a random model with heads 16 wide."""
    torch.manual_seed(seed)
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": START} | options.pop("ids", {})
    config = _config(family, layers, width, {"vocab_size": vocab, **ids, **options})
    if family in T5:
        model = getattr(hf, f"{T5[family]}ForConditionalGeneration")(config)
    elif family == "marian":
        model = hf.MarianMTModel(config)
    elif family == "whisper":
        model = hf.WhisperForConditionalGeneration(config)
    else:
        model = getattr(hf, f"{BART[family]}ForConditionalGeneration")(config)
    for name, weight in model.named_parameters():
        if "embed_positions" not in name and "norm" not in name:
            nn.init.normal_(weight, std=0.35 if weight.dim() > 1 else 0.2)
    if getattr(model, "final_logits_bias", None) is not None:
        nn.init.normal_(model.final_logits_bias, std=0.2)
    model.generation_config = hf.GenerationConfig(**ids)
    return model.double().eval()


def _config(family: str, layers: int, width: int, common: dict[str, Any]) -> Any:
    heads = width // 16
    if family in T5:
        config = getattr(hf, f"{T5[family]}Config")
        return config(
            d_model=width, d_kv=16, d_ff=48, num_layers=2, num_decoder_layers=layers, num_heads=heads,
            relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0, **common,
        )  # fmt: skip
    common = {
        "d_model": width, "encoder_layers": 2, "decoder_layers": layers, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads, "dropout": 0.0, **common,
    }  # fmt: skip
    if family == "whisper":
        return hf.WhisperConfig(
            num_mel_bins=BINS, max_source_positions=FRAMES, max_target_positions=128, bos_token_id=START,
            suppress_tokens=None, begin_suppress_tokens=None, **common,
        )  # fmt: skip
    config = hf.MarianConfig if family == "marian" else getattr(hf, f"{BART[family]}Config")
    return config(max_position_embeddings=128, forced_eos_token_id=None, **common)


def perturb(model: Any, noise: float = 0.05, seed: int = 1) -> Any:
    """Copy a model so that it mostly agrees."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return other


def sources(family: str, lengths: tuple[int, ...] = (5, 11, 7, 20), seed: int = 0) -> list[Any]:
    """Prompts of these many tokens; of sound they are all of one length."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        made = [torch.randn(BINS, 2 * FRAMES, generator=generator, dtype=torch.float64) for _ in lengths]
        return [Seq2Seq(features=features) for features in made]
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def reference(model: Any, prompt: Any, count: int) -> list[int]:
    """Generate the tokens after the start token with transformers' own generate()."""
    if isinstance(prompt, Seq2Seq):
        given = {"input_features": prompt.features[None].to(model.dtype)}
    else:
        given = {"input_ids": torch.tensor([prompt])}
    # Whisper's own generate() is for long sound and timestamps
    return hf.GenerationMixin.generate(model, **given, max_new_tokens=count, do_sample=False)[0].tolist()[1:]


@cache
def t5() -> Any:
    return make_model("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)


@cache
def plain() -> LLM:
    return LLM(t5(), None, is_debug=True)


def draft_model(num_tokens: int, model: Any = None, target: Any = None, **options: Any) -> DraftModel:
    """Make a draft that mostly agrees with the target."""
    lm = wrap_model(perturb(target or t5()) if model is None else model, "draft")
    return DraftModel(
        lm, DrafterContext(vocab_size=lm.vocab_size, num_speculative_tokens=num_tokens), TreeOptions(**options)
    )
