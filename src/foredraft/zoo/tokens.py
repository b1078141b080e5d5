"""The built-in byte-level BPE tokenizer, and the corpus as one array of its ids."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foredraft.zoo.corpus import SourceFile
from foredraft.zoo.recipe import END_OF_TEXT, VOCAB_SIZE

BATCH_FILES = 256  # files encoded together: an encoding takes a hundred times the memory of its ids


def train_tokenizer(files: list[SourceFile]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in files), trainer)
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer as transformers expects it beside a model."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def encode(tokenizer: Tokenizer, files: list[SourceFile]) -> np.ndarray:
    """[T] uint16: every file, each preceded by the end-of-text id."""
    parts: list[np.ndarray] = [np.empty(0, dtype=np.uint16)]
    for first in range(0, len(files), BATCH_FILES):
        for encoding in tokenizer.encode_batch([source.text for source in files[first : first + BATCH_FILES]]):
            parts.append(np.array([0, *encoding.ids], dtype=np.uint16))
    return np.concatenate(parts)
