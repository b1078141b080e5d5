"""Build of the built-in encoder-decoder pair from the prose of the standard library: target, draft model, cards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import T5ForConditionalGeneration

from foredraft.train.precision import choose_training_dtype
from foredraft.zoo.corpus import SourceFile
from foredraft.zoo.prose import extract_passages
from foredraft.zoo.typos import CLEAN_SHARE, WORD_ERROR_RATE
from foredraft.zoo_training import tokens
from foredraft.zoo_training.heads import HeadsPlan, LogLine, PartProgressCallback, load_target, train_heads
from foredraft.zoo_training.seq2seq import (
    SEQ2SEQ_DRAFT_RECIPE,
    SEQ2SEQ_RECIPE,
    Seq2SeqJob,
    Seq2SeqLoss,
    Seq2SeqRecipe,
    append_end_token,
    compute_clean_loss,
    make_distillation_loss,
    train,
)
from foredraft.zoo_training.seq2seq_heads import make_plan, prepare_seq2seq_target

TARGET_NAME, DRAFT_NAME = "seq2seq", "seq2seq_draft"


@dataclass(frozen=True)
class Seq2SeqPairRecipe:
    """Recipes of the target, the draft model and the heads."""

    target: Seq2SeqRecipe = SEQ2SEQ_RECIPE
    draft: Seq2SeqRecipe = SEQ2SEQ_DRAFT_RECIPE
    heads: HeadsPlan | None = None  # None = those of all methods


PAIR_RECIPE = Seq2SeqPairRecipe()


def build_pair(
    out: Path,
    device: str,
    tokenizer: Tokenizer,
    train_files: Sequence[SourceFile],
    held_files: Sequence[SourceFile],
    report: PartProgressCallback,
    log_line: LogLine,
    pair: Seq2SeqPairRecipe = PAIR_RECIPE,
) -> None:
    """Train both models and the heads into subfolders of `out`; what is finished is kept, the rest is resumed.

    Args:
        out: folder of the models.
        device: device of training.
        tokenizer: built-in tokenizer.
        train_files: files whose prose is trained on.
        held_files: files whose prose is measured on.
        report: called with model name, step, steps and loss.
        log_line: called with lines for the user.
        pair: recipes of the two models and the heads.
    """
    passages, held_out = extract_passages(train_files), extract_passages(held_files)
    end_tokenizer, dtype = append_end_token(tokenizer), choose_training_dtype(device)
    for name, recipe in ((TARGET_NAME, pair.target), (DRAFT_NAME, pair.draft)):
        folder = out / name
        if (folder / "README.md").exists():
            continue
        loss: Seq2SeqLoss = compute_clean_loss
        if name == DRAFT_NAME:
            teacher = T5ForConditionalGeneration.from_pretrained(out / TARGET_NAME, dtype=dtype)
            loss = make_distillation_loss(teacher.eval().to(device))

        def progress(step: int, steps: int, value: float, part: str = name) -> None:
            report(part, step, steps, value)

        train(Seq2SeqJob(recipe, end_tokenizer, passages, held_out, folder, loss, device, progress, dtype))
        tokens.save_tokenizer(end_tokenizer, folder)
        (folder / "README.md").write_text(render_card(name, recipe, _read_last_evaluation(folder), len(passages)))
    heads, llm = pair.heads or make_plan(), load_target(out / TARGET_NAME, device)
    target = prepare_seq2seq_target(out, llm, TARGET_NAME, passages, held_out, log_line, heads)
    train_heads(target, out, device, report, log_line, heads)


def _read_last_evaluation(folder: Path) -> dict[str, float]:
    """Return the last entry of the log that has figures of the held-out passages."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return next(row for row in reversed(rows) if "held_loss" in row)


def render_card(name: str, recipe: Seq2SeqRecipe, figures: dict[str, float], count: int) -> str:
    """Return the model card as Markdown.

    Args:
        name: `TARGET_NAME` or `DRAFT_NAME`.
        recipe: recipe that the model was trained with.
        figures: figures of `seq2seq.evaluate`.
        count: number of training passages.
    """
    objective = "the clean passage" if name == TARGET_NAME else "the target's distribution, KL(p || q)"
    use = (
        '`foredraft generate --model builtin-seq2seq --spec-method aggressive "teh qiuck ..."`.'
        if name == TARGET_NAME
        else "Drafts for the other: `foredraft generate --model builtin-seq2seq --spec-method draft_model`."
    )
    lines = [
        f"# Foredraft built-in {name}",
        "",
        "A small T5 that undoes typing errors in English prose about code, for trying speculative decoding on an",
        f"encoder-decoder. It was trained on little text and handles few words. {use}",
        "",
        f"- Data: {count:,} passages of docstrings and comments of the standard library (`foredraft.zoo.prose`), none "
        f"of the held-out modules; about {WORD_ERROR_RATE:.0%} of the words get a new error in each epoch "
        "(`foredraft.zoo.typos`), "
        f"{CLEAN_SHARE:.0%} of the passages stay clean.",
        f"- Recipe: T5 with {recipe.encoder_layers} layers of encoder and {recipe.decoder_layers} of decoder, width "
        f"{recipe.hidden}; trained on {objective}; {recipe.steps} steps of about {recipe.batch_tokens} tokens; Muon "
        f"for matrices, AdamW for the rest, learning rate {recipe.learning_rate}, linear decay over the last "
        f"{recipe.decay:.0%}; seed {recipe.seed}. `foredraft zoo train` repeats it.",
        f"- Held-out passages, with the clean text before each position as the prefix: {figures['held_loss']:.3f} "
        f"nats per token, {figures['held_right']:.1%} top-1 accuracy.",
        "",
    ]
    return "\n".join(lines)
