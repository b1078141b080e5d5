"""Build of the built-in n-gram table, which predicts the next token from counts in the standard library."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foredraft.drafters.ngram_lm import kneser_ney
from foredraft.drafters.ngram_lm.table import NgramModel
from foredraft.zoo_training.recipe import VOCAB_SIZE

ORDER = 4  # longest context of an entry, in tokens
MAX_ENTRIES = 470_000  # entries after pruning, about 2.5 MB on disk
END_OF_TEXT_ID = 0


def train_builtin(ids: np.ndarray) -> NgramModel:
    """Return the n-gram table of token ids [T] in which the end-of-text id begins every file.

    An n-gram counts once per file. On held-out files, with their own counts added, order 4 predicts as well as order 5
    and needs fewer contexts for the same number of entries.
    """
    files = np.split(ids.astype(np.int64), np.flatnonzero(ids == END_OF_TEXT_ID)[1:])
    files = [file for file in files if len(file)]
    return kneser_ney.train(files, ORDER, VOCAB_SIZE, max_entries=MAX_ENTRIES, once_per_sequence=True).quantise_probs()


@dataclass(frozen=True)
class TableMetrics:
    """Figures of next-token prediction on held-out text, by the table only."""

    top_1: float  # share of positions at which the likeliest token is right
    perplexity: float
    num_tokens: int  # measured positions


def measure_table(model: NgramModel, ids: np.ndarray, count: int = 4000) -> TableMetrics:
    """Measure a table at `count` evenly spaced positions of held-out token ids [T]."""
    positions = np.linspace(model.order, len(ids) - 1, count).astype(int)
    hits, loss = 0, 0.0
    for position in positions:
        q = model.compute_q(ids[position - model.order : position].tolist())
        hits += int(q.argmax() == ids[position])
        loss -= float(np.log(q[ids[position]]))
    return TableMetrics(hits / count, float(np.exp(loss / count)), count)


def render_card(figures: TableMetrics, data: str) -> str:
    """Return the model card as Markdown; `data` is the description of the training data."""
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
    """Train the table, save it in `folder` and write its model card.

    Args:
        train_ids: training token ids, [T].
        held_ids: held-out token ids for the figures of the card, [T].
        folder: folder of the table.
        data: description of the training data for the card.
    """
    model = train_builtin(train_ids)
    model.save(folder)
    (folder / "README.md").write_text(render_card(measure_table(model, held_ids), data))
