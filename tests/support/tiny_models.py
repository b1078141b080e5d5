"""Tiny models and a tokenizer, made on the spot and once per session: random weights need no download.

The weights are large (initializer_range 0.3), so that the distributions are far from uniform and greedy decoding meets
no ties. All is float64, so that two orders of summation never disagree about a token. Another device has float32.
"""

import copy
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import LLM
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.llm import MemoryLimits
from foredraft.models.hf import HFModel
from tests.support.devices import TEST_DEVICE, TEST_DTYPE

VOCAB = 97
CONTEXT = 256
TEXT = """
def naïve(café, größe): return "½ of the 東京 sushi 🍣🍣 costs 5 €"  # πάντα ῥεῖ
for word in ("the", "there", "then", "these"): print(word, "the end", "Ende", "ende.")
Привет, мир! 你好 世界 👩‍🚀 and the and the and then the end of the end
"""


def llama(vocab_size: int = VOCAB, seed: int = 0, context: int = CONTEXT, hidden: int = 32) -> LlamaForCausalLM:
    """Make a random two-layer Llama with grouped heads, and with an EOS that may well be sampled."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=3,
    )
    return LlamaForCausalLM(config).to(TEST_DEVICE, TEST_DTYPE).eval()


def perturb(model: LlamaForCausalLM, noise: float, seed: int = 1) -> LlamaForCausalLM:
    """Copy a model so that it mostly agrees: its drafts are accepted and rejected."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.state_dict().values():
            change = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight += noise * weight.std() * change.to(weight.device, weight.dtype)
    return noisy


def move_copy(model: LlamaForCausalLM, device: torch.device) -> LlamaForCausalLM:
    """Return a copy of a model on another device; on the CPU the model itself."""
    return model if device.type == "cpu" else copy.deepcopy(model).to(device)


@cache
def target() -> LlamaForCausalLM:
    return llama()


@cache
def draft() -> LlamaForCausalLM:
    return perturb(target(), 0.04)


@cache
def plain() -> LLM:
    """Make the target without a drafter; it checks its integrity after every step."""
    return LLM(target(), None, is_debug=True)


def draft_model(
    num_tokens: int,
    branching: tuple[int, ...] | None = None,
    model: LlamaForCausalLM | None = None,
    options: TreeOptions | None = None,
    device: torch.device = TEST_DEVICE,
) -> DraftModel:
    """Make the perturbed copy as a drafter."""
    model = move_copy(model or draft(), device)
    size = model.config.vocab_size
    context = DrafterContext(size, num_speculative_tokens=num_tokens, dtype=TEST_DTYPE, device=device)
    return DraftModel(HFModel.wrap_model(model, "draft"), context, options or TreeOptions(branching=branching))


def limit_memory(
    llm: LLM, drafter: object, limits: MemoryLimits, verify: str = "match", max_chunk: int | None = None
) -> LLM:
    """Build the same model with another drafter and other limits; LLM does not offer `max_chunk`, an engine setting."""
    from dataclasses import replace

    other = llm.with_drafter(None)
    other.limits = limits
    other = other.with_drafter(drafter, verify=verify)  # type: ignore[arg-type]
    if max_chunk is not None:
        scheduler = other.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_chunk=max_chunk)
    return other


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens, so that every character beyond ASCII is split over several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>", "<stop>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@cache
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral decode: a space is ▁, and what the vocabulary lacks is spelt in bytes <0x00>..<0xFF>."""
    pieces = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "a", "b", "▁end"]
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")
