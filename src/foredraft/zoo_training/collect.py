"""Corpus of a training run as token ids, collected once and stored beside the models.

The standard library comes first, then the packages, without near-duplicates. No package has more than a quarter of all
characters. A resumed run reads the stored corpus, so that newly installed packages do not change it.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from foredraft.errors import ForedraftError
from foredraft.zoo import corpus
from foredraft.zoo.corpus import SourceFile
from foredraft.zoo_training import tokens
from foredraft.zoo_training.duplicates import DuplicateFilter
from foredraft.zoo_training.packages import Package, cap_shares, find_packages

MAX_PACKAGE_SHARE = 0.25  # largest share of all characters that a package may have
TRAIN_FILE, HELD_OUT_FILE, HELD_OUT_PACKAGES_FILE, SUMMARY_FILE = (
    "train.npy",
    "held.npy",
    "held-packages.npy",
    "corpus.json",
)

PackageRecord = dict[str, str | int]


@dataclass(frozen=True)
class CorpusSummary:
    """Facts of the corpus for a model card."""

    python: str
    library: str  # digest of the training files of the standard library, or of the folder used instead
    library_tokens: int  # number of leading training ids that are from the library
    train_tokens: int
    train_chars: int
    held_tokens: int
    held_bytes: int  # UTF-8 bytes of the text of the `held_tokens`
    packages: tuple[PackageRecord, ...]
    held_packages: tuple[PackageRecord, ...]
    digests: dict[str, str]  # file name -> digest of its array

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the held-out modules; the loss per token over this is the loss per byte."""
        return self.held_bytes / self.held_tokens

    @property
    def library_description(self) -> str:
        """Description of the standard library, for cards of models that are trained on it only."""
        return (
            f"the standard library of CPython {self.python}, {self.library_tokens:,} training tokens "
            f"(digest {self.library})"
        )


@dataclass(frozen=True)
class Corpus:
    """Token ids for training and measurement."""

    train: np.ndarray  # [T] uint16
    held_out: np.ndarray  # of the held-out modules
    held_out_packages: np.ndarray  # of the held-out packages; empty if there are none
    summary: CorpusSummary

    @property
    def library(self) -> np.ndarray:
        return self.train[: self.summary.library_tokens]


def collect(out: Path, root: Path | None = None, candidates: Sequence[Package] | None = None) -> Corpus:
    """Read the corpus stored in `out`, or collect and store it there together with its tokenizer.

    Args:
        out: folder of the corpus.
        root: folder of Python files to use instead of the standard library. Default None.
        candidates: packages to use. Default None = the installed ones, or none if `root` is given.

    Raises:
        ForedraftError: an array has changed since it was stored.
    """
    if not (out / SUMMARY_FILE).exists():
        _gather(out, root, candidates if candidates is not None or root is not None else list(find_packages()))
    summary = _parse_summary(json.loads((out / SUMMARY_FILE).read_text()))
    arrays = {name: np.load(out / name) for name in (TRAIN_FILE, HELD_OUT_FILE, HELD_OUT_PACKAGES_FILE)}
    for name, array in arrays.items():
        if _digest(array) != summary.digests[name]:
            raise ForedraftError(
                f"{out / name} has changed since {SUMMARY_FILE} was written; remove {SUMMARY_FILE} to collect it again"
            )
    return Corpus(arrays[TRAIN_FILE], arrays[HELD_OUT_FILE], arrays[HELD_OUT_PACKAGES_FILE], summary)


def _gather(out: Path, root: Path | None, candidates: Sequence[Package] | None) -> None:
    train_files, held_files = corpus.split(root)
    if not (out / "tokenizer.json").exists():
        tokens.train_tokenizer(train_files).save(str(out / "tokenizer.json"))
    tokenizer = tokens.load_tokenizer(out)
    held_out = [package for package in candidates or () if package.is_held_out]
    selected = choose_packages([p for p in candidates or () if not p.is_held_out], held_out, train_files, held_files)
    library = tokens.encode(tokenizer, train_files)
    arrays = {
        TRAIN_FILE: np.concatenate([library, tokens.encode(tokenizer, _list_files(selected))]),
        HELD_OUT_FILE: tokens.encode(tokenizer, held_files),
        HELD_OUT_PACKAGES_FILE: tokens.encode(tokenizer, _list_files(held_out)),
    }
    for name, array in arrays.items():
        np.save(out / name, array)
    summary = CorpusSummary(
        python=platform.python_version(),
        library=corpus.digest(train_files),
        library_tokens=len(library),
        train_tokens=len(arrays[TRAIN_FILE]),
        train_chars=sum(len(file.text) for file in [*train_files, *_list_files(selected)]),
        held_tokens=len(arrays[HELD_OUT_FILE]),
        held_bytes=sum(len(file.text.encode()) for file in held_files),
        packages=tuple(package.describe() for package in selected),
        held_packages=tuple(package.describe() for package in held_out),
        digests={name: _digest(array) for name, array in arrays.items()},
    )
    partial = out / f"{SUMMARY_FILE}.tmp"
    partial.write_text(json.dumps(asdict(summary), indent=1) + "\n")
    partial.replace(out / SUMMARY_FILE)


def choose_packages(
    candidates: Sequence[Package],
    held_out: Sequence[Package],
    library: Sequence[SourceFile],
    held_files: Sequence[SourceFile],
) -> list[Package]:
    """Return the training packages without near-duplicates, each with at most `MAX_PACKAGE_SHARE` of all characters.

    Args:
        candidates: packages to choose from; earlier ones keep a file that several have.
        held_out: held-out packages, whose near-duplicates are removed.
        library: training files of the standard library, whose near-duplicates are removed.
        held_files: held-out files of the standard library, whose near-duplicates are removed.
    """
    duplicates = DuplicateFilter([*held_files, *_list_files(held_out)])
    duplicates.add(library)
    new = [replace(package, files=tuple(duplicates.select_new(package.files))) for package in candidates]
    library_chars = sum(len(file.text) for file in library)
    return [package for package in cap_shares(new, library_chars, MAX_PACKAGE_SHARE) if package.files]


def _list_files(packages: Sequence[Package]) -> list[SourceFile]:
    return [file for package in packages for file in package.files]


def _parse_summary(record: dict) -> CorpusSummary:  # type: ignore[type-arg]
    return CorpusSummary(
        **{**record, "packages": tuple(record["packages"]), "held_packages": tuple(record["held_packages"])}
    )


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
