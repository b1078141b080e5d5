"""Small tokenizers of encoder-decoder models, folders of such models, and files of pairs to train on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from foredraft import LLM
from foredraft.train.data import DocumentReader
from foredraft.train.seq2seq_records import Seq2SeqEncoding
from tests.support import tiny_seq2seq

BOS, PAD, END = 0, 1, 2
PIECES = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -1.0), ("▁end", -1.0), ("▁", -2.0)]
LETTERS = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
TEMPLATES = {"plain": "$A", "end": "$A </s>", "begin and end": "<s> $A </s>"}


@dataclass(frozen=True)
class Setup:
    """How a family is published: the model, what its tokenizer puts around a text, and the tokens it begins with."""

    family: str
    tokenizer: str
    start: str
    forced: str | None = None


SETUPS = {
    "t5": Setup("t5", "end", "<pad>"),
    "t5, the tokenizer adds no end": Setup("t5", "plain", "<pad>"),
    "bart": Setup("bart", "begin and end", "</s>"),
    "bart, forced": Setup("bart", "begin and end", "</s>", "<s>"),
    "marian, forced": Setup("marian", "end", "<pad>", "<s>"),
    "mbart": Setup("mbart", "mbart", "ro_RO"),
    "mbart50": Setup("mbart", "mbart50", "</s>"),
    "mbart50, forced": Setup("mbart", "mbart50", "</s>", "ro_RO"),
    "mbart50, another language forced": Setup("mbart", "mbart50", "</s>", "de_DE"),
}


@cache
def make_tokenizer(kind: str) -> Any:
    if kind in ("mbart", "mbart50"):
        made = hf.MBartTokenizer if kind == "mbart" else hf.MBart50Tokenizer
        return made(vocab=[*PIECES, *LETTERS], src_lang="en_XX", tgt_lang="ro_RO")
    backend = Tokenizer(models.Unigram([*PIECES, *LETTERS], unk_id=3))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        TEMPLATES[kind], special_tokens=[("<s>", BOS), ("</s>", END)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def make_pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Make the model of a setup, in float64, and its tokenizer."""
    setup = SETUPS[name]
    tokenizer = make_tokenizer(setup.tokenizer)
    start = tokenizer.convert_tokens_to_ids(setup.start)
    ids = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": start}
    model = tiny_seq2seq.make_model(setup.family, vocab=len(tokenizer), ids=ids, **options)
    if setup.forced is not None:
        model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(setup.forced)
    return model, tokenizer


def make_reader(llm: LLM) -> DocumentReader:
    encoding = Seq2SeqEncoding.from_model(llm.target, llm.tokenizer)
    return DocumentReader(llm.tokenizer, llm.target.vocab_size, llm.end_ids, encoding)


def save_pair(folder: Path, name: str, **options: Any) -> Path:
    """Save a model in float64 with its tokenizer, and pairs of texts beside it as pairs.jsonl."""
    model, tokenizer = make_pair(name, **options)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_lines(folder / "pairs.jsonl", make_pairs())
    return folder


def make_pairs(count: int = 12) -> list[dict[str, str]]:
    return [{"source": f"teh end {i} " * (1 + i % 3), "text": "the end " * (1 + i % 4) + str(i)} for i in range(count)]


def write_lines(file: Path, records: Sequence[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)
