"""Readers of training data: plain text, JSON Lines, folders of them, Hugging Face datasets, arrays of token ids."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.errors import ForedraftError, format_install_command
from foredraft.train.dataset_records import parse_document, parse_prompt
from foredraft.train.documents import Document

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
                records = _read_records(path, is_held_out)
                documents += [parse_document(record, self.tokenizer, location) for record, location in records]
        documents = [document for document in documents if len(document.ids) > 1]
        if not documents:
            raise ForedraftError(f"{', '.join(paths)}: no text in it to learn from")
        self._check_ids(documents, paths)
        return documents

    def read_prompts(self, paths: Sequence[str], length: int) -> list[list[int]]:
        """Read prompts for the target.

        Args:
            paths: Files, folders, or BUILTIN.
            length: Tokens of a plain text that become its prompt.

        Returns:
            Token ids of every prompt.

        Raises:
            ForedraftError: for the first record that cannot be used.
        """
        prompts: list[list[int]] = []
        for path in paths:
            if path.endswith(".npy"):
                prompts += [document.make_prompt(length) for document in self._read_ids(Path(path))]
            else:
                prompts += [
                    parse_prompt(record, self.tokenizer, location, length) for record, location in _read_records(path)
                ]
        prompts = [prompt for prompt in prompts if prompt]
        if not prompts:
            raise ForedraftError(f"{', '.join(paths)}: no prompt in it to continue")
        return prompts

    def _read_ids(self, path: Path) -> list[Document]:
        """Read an array of ids. Every end-of-text id begins a new document."""
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


def _read_builtin(is_held_out: bool) -> Iterator[LocatedRecord]:
    from foredraft.zoo import corpus

    for source in corpus.split()[is_held_out]:
        yield {"text": source.text}, source.name
