"""A draft of another vocabulary for the tiny target, and tokenizers of several kinds to read and to write with.

The target's 97 ids stand for letters and for pairs of letters. The draft has other ids for the same letters, lacks two
of them, and shares two pairs in three; apart from that it is a copy that mostly agrees.
"""

from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabDrafter
from foredraft.drafters.draft_model.cross_vocab.slem import SlemDrafter
from foredraft.drafters.draft_model.cross_vocab.tli import TliDrafter
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.drafters.method import DrafterContext
from foredraft.models.hf import HFModel
from foredraft.tokenization.byte_vocabulary import TokenizerVocabulary
from tests.support import tiny_models
from tests.support.devices import TEST_DEVICE, TEST_DTYPE

CROSS_VOCAB_CASES = ("draft_model, slem", "draft_model, tli", "draft_model, tli tree")  # names in `methods_made.MADE`
CONTROLS = ["<unk>", "<s>", "<pad>", "<end>"]
LETTERS = [chr(i) for i in (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1), *range(ord("0"), ord("8")))]
PAIRS = [(LETTERS[i], LETTERS[(7 * i + 3) % 60]) for i in range(33)]
OWN_PAIRS = [(LETTERS[i], LETTERS[(11 * i + 5) % 60]) for i in range(20, 28)]  # of the draft alone
TARGET_NAMES = [*CONTROLS, *LETTERS, *map("".join, PAIRS)]
DRAFT_LETTERS = LETTERS[57::-1]
DRAFT_PAIRS = [p for p in (*OWN_PAIRS[:4], *PAIRS[:22], *OWN_PAIRS[4:]) if {*p} <= {*DRAFT_LETTERS}]
DRAFT_NAMES = ["<end>", *map("".join, DRAFT_PAIRS), *DRAFT_LETTERS, "<pad>"]


def letter_tokenizer(names: list[str], pairs: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """BPE of single letters and of pairs, whatever stands beside them."""
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([name for name in CONTROLS if name in names])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


@cache
def letters() -> VocabMap:
    """Make the tiny target's vocabulary and its draft's."""
    target = TokenizerVocabulary(letter_tokenizer(TARGET_NAMES, PAIRS), tiny_models.VOCAB)
    draft = TokenizerVocabulary(letter_tokenizer(DRAFT_NAMES, DRAFT_PAIRS), len(DRAFT_NAMES))
    return VocabMap(target, draft)


def remap_vocabulary(model: LlamaForCausalLM, rows: list[int], seed: int = 5) -> LlamaForCausalLM:
    """Copy a model so that token i has the given model's row rows[i]; a random row for -1."""
    copy = tiny_models.llama(len(rows), seed, hidden=model.config.hidden_size)
    own = {name: tensor for name, tensor in model.state_dict().items() if len(tensor) != model.config.vocab_size}
    copy.load_state_dict(own, strict=False)
    known = [i for i, row in enumerate(rows) if row >= 0]
    for mine, theirs in [
        (copy.get_input_embeddings(), model.get_input_embeddings()),
        (copy.get_output_embeddings(), model.get_output_embeddings()),
    ]:
        mine.weight.data[known] = theirs.weight.data[[rows[i] for i in known]]
    return copy


def draft_rows() -> list[int]:
    """List the target's id for every id of the draft."""
    return [TARGET_NAMES.index(name) if name in TARGET_NAMES else -1 for name in DRAFT_NAMES]


@cache
def draft() -> LlamaForCausalLM:
    return remap_vocabulary(tiny_models.draft(), draft_rows())


def drafter(
    vocab: str,
    num_tokens: int,
    options: TreeOptions | None = None,
    kv_tokens: int | None = 8192,
    device: torch.device = TEST_DEVICE,
) -> CrossVocabDrafter:
    """Make the renamed draft as a drafter, with shared tokens (tli) or as text (slem)."""
    size = tiny_models.VOCAB
    context = DrafterContext(size, num_speculative_tokens=num_tokens, dtype=TEST_DTYPE, device=device)
    made = {"tli": TliDrafter, "slem": SlemDrafter}[vocab]
    return made(
        HFModel.wrap_model(tiny_models.move_copy(draft(), device), "draft"), context, letters(), options, kv_tokens
    )


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with merges that the one of `models_made` has not, and other ids."""
    pairs = [
        ("Ġ", "t"),
        ("Ġt", "h"),
        ("e", "n"),
        ("Ġ", "e"),
        ("Ċ", "Ċ"),
        ("Ġ", "Ġ"),
        ("ð", "Ł"),
        ("a", "n"),
        ("an", "d"),
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    names = [*alphabet, "<stop>", *map("".join, pairs), "<end>", "<start>"]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<start>", "<stop>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", bos_token="<start>")


@cache
def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2: ▁ for a space and one before every text, bytes for what it lacks, a token before every text."""
    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)]
    pairs = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("e", "n"), ("en", "d"), ("▁", "▁"), ("▁", "end"), ("h", "e")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    names += ["".join(pair) for pair in pairs]
    made = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, pairs, unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


@cache
def lower_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words and letters, all of them small, put side by side with spaces when they are decoded."""
    names = ["[UNK]", "the", "end", *(chr(i) for i in range(ord("a"), ord("z") + 1)), "##e", "##n", "##d", "."]
    made = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]"])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
