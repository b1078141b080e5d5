"""Files of text as records: plain text, JSON Lines, folders of them or of a Hugging Face dataset, arrays of ids."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.errors import ForedraftError, how_to_install
from foredraft.train.documents import Document
from foredraft.train.records import document, question

BUILTIN = "builtin"  # the corpus of the built-in models
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow")
Record = tuple[Mapping[str, Any], str]  # and where it stands


@dataclass(frozen=True)
class Reader:
    """Turns files into documents of the target's tokens."""

    tokenizer: Any  # or None
    vocab_size: int
    end_ids: frozenset[int]

    def documents(self, paths: Sequence[str], is_held_out: bool = False) -> list[Document]:
        """In the order of the files; of the built-in corpus those to learn from, or those held out. Raises
        ForedraftError for the first that cannot be used."""
        found: list[Document] = []
        for path in paths:
            if path.endswith(".npy"):
                found += self._ids(Path(path))
            else:
                records = _records(path, is_held_out)
                found += [document(record, self.tokenizer, where) for record, where in records]
        found = [one for one in found if len(one.ids) > 1]
        if not found:
            raise ForedraftError(f"{', '.join(paths)}: no text in it to learn from")
        self._check(found, paths)
        return found

    def questions(self, paths: Sequence[str], length: int) -> list[list[int]]:
        """Prompts for the target; plain text gives its first `length` tokens."""
        found: list[list[int]] = []
        for path in paths:
            if path.endswith(".npy"):
                found += [one.opening(length) for one in self._ids(Path(path))]
            else:
                found += [question(record, self.tokenizer, where, length) for record, where in _records(path)]
        found = [prompt for prompt in found if prompt]
        if not found:
            raise ForedraftError(f"{', '.join(paths)}: no prompt in it to go on from")
        return found

    def _ids(self, path: Path) -> list[Document]:
        """One array of ids; a document begins with every id that ends a text."""
        try:
            ids = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise ForedraftError(f"{path} cannot be read as an array of token ids: {error}") from None
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ForedraftError(f"{path} is not a one-dimensional array of whole numbers")
        ends = np.flatnonzero(np.isin(ids, sorted(self.end_ids or {0})))
        return [Document(part) for part in np.split(np.asarray(ids), ends) if len(part) > 1]

    def _check(self, documents: Iterable[Document], paths: Sequence[str]) -> None:
        for one in documents:
            low, high = int(one.ids.min()), int(one.ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ForedraftError(
                    f"{', '.join(paths)}: token {low if low < 0 else high} is outside the target's vocabulary of "
                    f"{self.vocab_size}; the ids are another tokenizer's"
                )


def _records(name: str, is_held_out: bool = False) -> Iterator[Record]:
    if name == BUILTIN:
        yield from _builtin(is_held_out)
        return
    path = Path(name).expanduser()
    if not path.exists():
        raise ForedraftError(f"{name} does not exist; --data takes text, .jsonl, .npy or a dataset folder")
    if path.is_dir():
        yield from _folder(path)
    elif path.suffix in LINES:
        yield from _lines(path)
    elif path.suffix in TABLES:
        yield from _table(path)
    else:
        yield {"text": _text(path)}, name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForedraftError(f"{path} is not UTF-8 (at byte {error.start}); save it as UTF-8 first") from None


def _lines(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ForedraftError(f"{path}:{number} is not JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise ForedraftError(f"{path}:{number} is not a JSON object")
        yield record, f"{path}:{number}"


def _folder(path: Path) -> Iterator[Record]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        yield from _dataset(path)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix in (*LINES, *TABLES, ".txt", ".md", ".py"))
    if not files:
        raise ForedraftError(f"{path} holds no dataset and no .jsonl, .parquet, .arrow or text files")
    for file in files:
        yield from _records(str(file))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ForedraftError(
            f"reading datasets, parquet and arrow needs the datasets library: {how_to_install('data')}"
        ) from None
    return datasets


def _dataset(path: Path) -> Iterator[Record]:
    try:
        loaded = _datasets().load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ForedraftError(f"{path} cannot be read as a dataset: {error}") from None
    if hasattr(loaded, "column_names") and isinstance(loaded.column_names, dict):  # of several splits
        loaded = loaded["train"] if "train" in loaded else loaded[next(iter(loaded))]
    yield from _rows(loaded, path)


def _table(path: Path) -> Iterator[Record]:
    kind = _datasets().Dataset
    try:
        loaded = kind.from_file(str(path)) if path.suffix == ".arrow" else kind.from_parquet(str(path))
    except Exception as error:  # pyarrow has kinds of its own
        raise ForedraftError(f"{path} cannot be read as a table: {error}") from None
    yield from _rows(loaded, path)


def _rows(loaded: Any, path: Path) -> Iterator[Record]:
    for number, record in enumerate(loaded, 1):
        yield {key: value for key, value in record.items() if value is not None}, f"{path}, row {number}"


def _builtin(is_held_out: bool) -> Iterator[Record]:
    from foredraft.zoo import corpus

    for source in corpus.split()[is_held_out]:
        yield {"text": source.text}, source.name
