"""The built-in n-gram table: what the standard library's own text says of the next token."""

import numpy as np

from foredraft.models.ngram import NgramModel
from foredraft.zoo.recipe import VOCAB_SIZE

ORDER = 4
MAX_ENTRIES = 470_000  # about 2.5 MB on disk
END_OF_TEXT_ID = 0


def train_builtin(ids: np.ndarray) -> NgramModel:
    """An n-gram table from [T] token ids, every file preceded by the end-of-text id."""
    # Counted once per file. On held-out files with their own counts added, order 4 does as well as order 5 and needs
    # fewer contexts for the same number of entries.
    files = np.split(ids.astype(np.int64), np.flatnonzero(ids == END_OF_TEXT_ID)[1:])
    files = [file for file in files if len(file)]
    return NgramModel.train(files, ORDER, VOCAB_SIZE, max_entries=MAX_ENTRIES, once_per_sequence=True).quantised()
