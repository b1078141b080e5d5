"""Training data of the drafters for the built-in encoder-decoder target: its corrections of passages with errors."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from foredraft import zoo
from foredraft.llm import LLM
from foredraft.train.config import DataConfig
from foredraft.train.data import DocumentReader
from foredraft.train.generate import AnswerWriter
from foredraft.train.prompts import TrainPrompt
from foredraft.train.seq2seq_records import Seq2SeqEncoding
from foredraft.zoo.typos import add_typos
from foredraft.zoo_training.heads import HeadsPlan, HeadsTarget, LogLine, list_recipes
from foredraft.zoo_training.seq2seq import MAX_PASSAGE_TOKENS

TEXTS_FOLDER = "seq2seq_texts"
NUM_DOCUMENTS = 6000  # passages that the target corrects
TEMPERATURES = (0.0, 1.0)  # of successive documents, in turn
BATCH_TOKENS = 4096  # tokens per step, padding of short passages included


def make_plan() -> HeadsPlan:
    """Return the plan of the drafters for the encoder-decoder target."""
    return HeadsPlan(list_recipes(zoo.SEQ2SEQ_TARGET), documents=NUM_DOCUMENTS)


def prepare_seq2seq_target(
    out: Path,
    llm: LLM,
    folder: str,
    passages: Sequence[str],
    held_out: Sequence[str],
    log_line: LogLine,
    heads: HeadsPlan,
) -> HeadsTarget:
    """Let the target correct passages, half of them greedily and half at temperature 1.

    Args:
        out: folder of the build.
        llm: trained target.
        folder: name of the target's folder.
        passages: clean passages to train on.
        held_out: clean passages to measure on.
        log_line: called with lines for the user.
        heads: sizes of the data.
    """
    texts = out / TEXTS_FOLDER
    texts.mkdir(exist_ok=True)
    sources, held_file = texts / "sources.jsonl", texts / "held.jsonl"
    _write_pairs(sources, passages, heads.documents, seed=2)
    _write_pairs(held_file, held_out, len(held_out), seed=3)
    writer = AnswerWriter(llm, texts, MAX_PASSAGE_TOKENS, TEMPERATURES, 0, log_line)
    writer.write(_read_prompts(llm, sources))
    return HeadsTarget(
        name=zoo.SEQ2SEQ_TARGET,
        folder=folder,
        data=DataConfig((str(writer.file),), (str(held_file),), context=MAX_PASSAGE_TOKENS, generate=False),
        batch_tokens=BATCH_TOKENS,
        prompts=_read_prompts(llm, held_file)[: heads.prompts],
        generate=f"foredraft generate --model {zoo.SEQ2SEQ_TARGET} --spec-method",
        data_description=f"corrections of {heads.documents:,} passages by the target, half of them greedy and half "
        "sampled at temperature 1; no passage of the held-out modules.",
        prompts_description="held-out passages with typing errors",
    )


def _write_pairs(file: Path, passages: Sequence[str], count: int, seed: int) -> None:
    """Write (source, text) records of random passages."""
    rng = random.Random(seed)
    chosen = rng.sample(list(passages), min(count, len(passages)))
    file.write_text("".join(json.dumps({"source": add_typos(text, rng), "text": text}) + "\n" for text in chosen))


def _read_prompts(llm: LLM, file: Path) -> list[TrainPrompt]:
    encoding = Seq2SeqEncoding.from_model(llm.target, llm.tokenizer)
    reader = DocumentReader(llm.tokenizer, llm.target.vocab_size, llm.end_ids, encoding)
    return reader.read_prompts([str(file)], 0)
