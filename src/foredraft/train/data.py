"""Readers of training data: plain text, JSON Lines, folders of them, Hugging Face datasets, arrays of token ids."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.errors import ForedraftError, format_install_command
from foredraft.train.dataset_records import parse_document, parse_prompt
from foredraft.train.documents import Document
from foredraft.train.prompts import TrainPrompt, get_ids
from foredraft.train.seq2seq_records import SEQ2SEQ_FORMATS, Seq2SeqEncoding

BUILTIN = "builtin"  # name of the corpus of the built-in models
LINE_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
LocatedRecord = tuple[Mapping[str, Any], str]  # a record and its location, for messages


@dataclass(frozen=True)
class DocumentReader:
    """Reader of files as documents of the target's tokens."""

    tokenizer: Any  # None = only arrays of ids can be read
    vocab_size: int
    end_ids: frozenset[int]
    seq2seq: Seq2SeqEncoding | None = None  # of an encoder-decoder model, whose records have a source

    def read_documents(self, paths: Sequence[str], is_held_out: bool = False) -> list[Document]:
        """Read documents in the order of the files.

        Args:
            paths: Files, folders, or BUILTIN.
            is_held_out: Whether to read the held-out part of the built-in corpus instead of the training part.

        Raises:
            ForedraftError: for the first document that cannot be used.
        """
        documents: list[Document] = []
        for path in paths:
            if path.endswith(".npy"):
                documents += self._read_ids(Path(path))
            else:
                records = self._read_records(path, is_held_out)
                documents += [self._parse_document(record, location) for record, location in records]
        documents = [document for document in documents if len(document.ids) > 1]
        if not documents:
            raise ForedraftError(f"{', '.join(paths)}: no text in it to learn from")
        self._check_ids(documents, paths)
        return documents

    def read_prompts(self, paths: Sequence[str], length: int) -> list[TrainPrompt]:
        """Read prompts for the target.

        Args:
            paths: Files, folders, or BUILTIN.
            length: Tokens of a plain text that become its prompt.

        Returns:
            Every prompt, in token ids.

        Raises:
            ForedraftError: for the first record that cannot be used.
        """
        prompts: list[TrainPrompt] = []
        for path in paths:
            if path.endswith(".npy"):
                prompts += [document.make_prompt(length) for document in self._read_ids(Path(path))]
            else:
                records = self._read_records(path, is_held_out=False)
                prompts += [self._parse_prompt(record, location, length) for record, location in records]
        prompts = [prompt for prompt in prompts if get_ids(prompt)]
        if not prompts:
            raise ForedraftError(f"{', '.join(paths)}: no prompt in it to continue")
        return prompts

    def _read_records(self, name: str, is_held_out: bool) -> Iterator[LocatedRecord]:
        if name == BUILTIN and self.seq2seq is not None:
            return _read_builtin_pairs(is_held_out)
        return _read_records(name, is_held_out)

    def _parse_document(self, record: Mapping[str, Any], location: str) -> Document:
        if self.seq2seq is not None:
            return self.seq2seq.parse_document(record, location)
        return parse_document(record, self.tokenizer, location)

    def _parse_prompt(self, record: Mapping[str, Any], location: str, length: int) -> TrainPrompt:
        if self.seq2seq is not None:
            return self.seq2seq.parse_prompt(record, location)
        return parse_prompt(record, self.tokenizer, location, length)

    def _read_ids(self, path: Path) -> list[Document]:
        """Read an array of ids. Every end-of-text id begins a new document."""
        if self.seq2seq is not None:
            raise ForedraftError(
                f"{path} has no sources, and {self.seq2seq.name} is an encoder-decoder model; give JSON Lines with "
                f"{SEQ2SEQ_FORMATS}"
            )
        try:
            ids = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise ForedraftError(f"{path} cannot be read as an array of token ids: {error}") from None
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ForedraftError(f"{path} is not a one-dimensional array of whole numbers")
        ends = np.flatnonzero(np.isin(ids, sorted(self.end_ids or {0})))
        return [Document(part) for part in np.split(np.asarray(ids), ends) if len(part) > 1]

    def _check_ids(self, documents: Iterable[Document], paths: Sequence[str]) -> None:
        for document in documents:
            low, high = int(document.ids.min()), int(document.ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ForedraftError(
                    f"{', '.join(paths)}: token {low if low < 0 else high} is outside the target's vocabulary of "
                    f"{self.vocab_size}; the ids are of another tokenizer"
                )


def _read_records(name: str, is_held_out: bool = False) -> Iterator[LocatedRecord]:
    if name == BUILTIN:
        yield from _read_builtin(is_held_out)
        return
    path = Path(name).expanduser()
    if not path.exists():
        raise ForedraftError(f"{name} does not exist; --data takes text, .jsonl, .npy or a dataset folder")
    if path.is_dir():
        yield from _read_folder(path)
    elif path.suffix in LINE_SUFFIXES:
        yield from _read_lines(path)
    elif path.suffix in TABLE_SUFFIXES:
        yield from _read_table(path)
    else:
        yield {"text": _read_text(path)}, name


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForedraftError(f"{path} is not UTF-8 (at byte {error.start}); save it as UTF-8 first") from None


def _read_lines(path: Path) -> Iterator[LocatedRecord]:
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ForedraftError(f"{path}:{number} is not JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise ForedraftError(f"{path}:{number} is not a JSON object")
        yield record, f"{path}:{number}"


def _read_folder(path: Path) -> Iterator[LocatedRecord]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        yield from _read_dataset(path)
        return
    files = sorted(
        file for file in path.rglob("*") if file.suffix in (*LINE_SUFFIXES, *TABLE_SUFFIXES, ".txt", ".md", ".py")
    )
    if not files:
        raise ForedraftError(f"{path} holds no dataset and no .jsonl, .parquet, .arrow or text files")
    for file in files:
        yield from _read_records(str(file))


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ForedraftError(
            f"reading datasets, parquet and arrow needs the datasets library: {format_install_command('data')}"
        ) from None
    return datasets


def _read_dataset(path: Path) -> Iterator[LocatedRecord]:
    try:
        dataset = _import_datasets().load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ForedraftError(f"{path} cannot be read as a dataset: {error}") from None
    if hasattr(dataset, "column_names") and isinstance(dataset.column_names, dict):  # a dataset with several splits
        dataset = dataset["train"] if "train" in dataset else dataset[next(iter(dataset))]
    yield from _read_rows(dataset, path)


def _read_table(path: Path) -> Iterator[LocatedRecord]:
    dataset_class = _import_datasets().Dataset
    try:
        dataset = (
            dataset_class.from_file(str(path)) if path.suffix == ".arrow" else dataset_class.from_parquet(str(path))
        )
    except Exception as error:  # pyarrow raises its own types
        raise ForedraftError(f"{path} cannot be read as a table: {error}") from None
    yield from _read_rows(dataset, path)


def _read_rows(loaded: Any, path: Path) -> Iterator[LocatedRecord]:
    for number, record in enumerate(loaded, 1):
        yield {key: value for key, value in record.items() if value is not None}, f"{path}, row {number}"


def _read_builtin_pairs(is_held_out: bool) -> Iterator[LocatedRecord]:
    """Read the passages of the built-in encoder-decoder pair, with typing errors as the source."""
    from foredraft.zoo import corpus, prose, typos

    rng = random.Random(is_held_out)
    for number, passage in enumerate(prose.extract_passages(corpus.split()[is_held_out]), 1):
        yield {"source": typos.add_typos(passage, rng), "text": passage}, f"passage {number}"


def _read_builtin(is_held_out: bool) -> Iterator[LocatedRecord]:
    from foredraft.zoo import corpus

    for source in corpus.split()[is_held_out]:
        yield {"text": source.text}, source.name
