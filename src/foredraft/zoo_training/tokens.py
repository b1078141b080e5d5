"""Training of the built-in byte-level BPE tokenizer, and encoding of the corpus."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foredraft.zoo.corpus import SourceFile
from foredraft.zoo_training.recipe import END_OF_TEXT, VOCAB_SIZE

BATCH_FILES = 256  # files encoded together; an encoding needs about 100 times the memory of its ids


def train_tokenizer(files: list[SourceFile]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `VOCAB_SIZE` tokens; id 0 is the end-of-text token."""
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
    """Load tokenizer.json of a folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer to a model's folder in the format of transformers."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def encode(tokenizer: Tokenizer, files: list[SourceFile]) -> np.ndarray:
    """Return the token ids of the files, [T] uint16; the end-of-text id begins each file."""
    parts: list[np.ndarray] = [np.empty(0, dtype=np.uint16)]
    for first in range(0, len(files), BATCH_FILES):
        for encoding in tokenizer.encode_batch([source.text for source in files[first : first + BATCH_FILES]]):
            parts.append(np.array([0, *encoding.ids], dtype=np.uint16))
    return np.concatenate(parts)
