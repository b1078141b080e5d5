"""Training of an n-gram table: counting, no gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.ngram_lm.kneser_ney import train
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the trained table.

    Attributes:
        order: contexts of up to order - 1 tokens.
        max_entries: number of entries to keep, the most useful first; about 5 bytes each. None = all.
        min_count: fewest occurrences of an entry.
        once_per_text: count an n-gram once per document; the sequence's own counts cover repetitions.
    """

    order: int = 4
    max_entries: int | None = 1_000_000
    min_count: int = 1
    once_per_text: bool = True


def learn(config: TrainConfig, documents: Sequence[NDArray[Any]], target: HFModel, out: Path) -> None:
    """Train the table from token ids [n] of documents, and save it for `create`."""
    if config.order < 1 or config.min_count < 1:
        raise ForedraftError(f"order and min_count must be at least 1, got {config.order} and {config.min_count}")
    ids = [document.astype(np.int64) for document in documents]
    model = train(ids, config.order, target.vocab_size, config.min_count, config.max_entries, config.once_per_text)
    model.quantise_probs().save(out)
