"""The built-in n-gram table: what the standard library's own text says of the next token."""

from dataclasses import dataclass
from pathlib import Path

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
    return NgramModel.train(files, ORDER, VOCAB_SIZE, max_entries=MAX_ENTRIES, once_per_sequence=True).quantise_probs()


@dataclass(frozen=True)
class TableMetrics:
    """Next-token prediction on held-out text, by the table alone."""

    top_1: float
    perplexity: float
    num_tokens: int


def measure_table(model: NgramModel, ids: np.ndarray, count: int = 4000) -> TableMetrics:
    """Over `count` evenly spaced positions of held-out ids [T]."""
    places = np.linspace(model.order, len(ids) - 1, count).astype(int)
    hits, loss = 0, 0.0
    for place in places:
        q = model.compute_q(ids[place - model.order : place].tolist())
        hits += int(q.argmax() == ids[place])
        loss -= float(np.log(q[ids[place]]))
    return TableMetrics(hits / count, float(np.exp(loss / count)), count)


def render_card(figures: TableMetrics, data: str) -> str:
    """The model card, as Markdown."""
    return "\n".join(
        [
            "# Foredraft built-in n-gram table",
            "",
            f"Interpolated modified Kneser-Ney of order {ORDER}, pruned to {MAX_ENTRIES:,} entries; what `ngram_lm`",
            "drafts with beside the built-in target, below what the running text itself has shown.",
            "",
            f"- Data: {data}, every n-gram counted once per file.",
            f"- Held-out text, the table alone: {figures.top_1:.1%} of next tokens right, perplexity "
            f"{figures.perplexity:.1f} ({figures.num_tokens:,} tokens).",
            "",
        ]
    )


def build_table(train_ids: np.ndarray, held_ids: np.ndarray, folder: Path, data: str) -> None:
    """Train, save and describe the table; `data` is what the card says that it learnt from."""
    model = train_builtin(train_ids)
    model.save(folder)
    (folder / "README.md").write_text(render_card(measure_table(model, held_ids), data))
