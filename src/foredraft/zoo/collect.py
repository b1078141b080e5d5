"""The corpus of a training run as token ids, gathered once and kept beside the models.

The standard library first, then the packages; near-duplicates left out, no package above a quarter of all characters. A
run that goes on reads what was kept: a package installed meanwhile changes nothing.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from foredraft.errors import ForedraftError
from foredraft.zoo import corpus, tokens
from foredraft.zoo.corpus import Source
from foredraft.zoo.duplicates import Sieve
from foredraft.zoo.packages import Package, capped, packages

LARGEST_SHARE = 0.25  # of all characters that one package may have
TRAIN, HELD, HELD_PACKAGES, ABOUT = "train.npy", "held.npy", "held-packages.npy", "corpus.json"

Facts = dict[str, str | int]


@dataclass(frozen=True)
class About:
    """What a model card says of the corpus."""

    python: str
    library: str  # digest of the standard library's training files, or of the tree's that stood in for it
    library_tokens: int  # the first ones of the training ids
    train_tokens: int
    train_chars: int
    held_tokens: int
    held_bytes: int  # of the same text
    packages: tuple[Facts, ...]
    held_packages: tuple[Facts, ...]
    digests: dict[str, str]  # of the arrays, by file

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out modules: a loss per token over this is a loss per byte."""
        return self.held_bytes / self.held_tokens

    @property
    def of_library(self) -> str:
        """The standard library alone, for what learns from no more."""
        return (
            f"the standard library of CPython {self.python}, {self.library_tokens:,} training tokens "
            f"(digest {self.library})"
        )


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray  # [T] uint16
    held: np.ndarray  # of the held-out modules
    held_packages: np.ndarray  # of the held-out packages; empty if there are none
    about: About

    @property
    def library(self) -> np.ndarray:
        return self.train[: self.about.library_tokens]


def collect(out: Path, root: Path | None = None, found: Sequence[Package] | None = None) -> Corpus:
    """Read the corpus kept in `out`, or gather it there with its tokenizer.

    `root` is another tree of Python files than the standard library's; packages are left out then unless `found` gives
    them. Raises ForedraftError if an array is not the one that was kept.
    """
    if not (out / ABOUT).exists():
        _gather(out, root, found if found is not None or root is not None else list(packages()))
    about = _about(json.loads((out / ABOUT).read_text()))
    arrays = {name: np.load(out / name) for name in (TRAIN, HELD, HELD_PACKAGES)}
    for name, array in arrays.items():
        if _digest(array) != about.digests[name]:
            raise ForedraftError(
                f"{out / name} has changed since {ABOUT} was written; remove {ABOUT} to gather it anew"
            )
    return Corpus(arrays[TRAIN], arrays[HELD], arrays[HELD_PACKAGES], about)


def _gather(out: Path, root: Path | None, found: Sequence[Package] | None) -> None:
    train_files, held_files = corpus.split(root)
    if not (out / "tokenizer.json").exists():
        tokens.train_tokenizer(train_files).save(str(out / "tokenizer.json"))
    tokenizer = tokens.load_tokenizer(out)
    held_out = [package for package in found or () if package.is_held_out]
    learnt = chosen([p for p in found or () if not p.is_held_out], held_out, train_files, held_files)
    library = tokens.encode(tokenizer, train_files)
    arrays = {
        TRAIN: np.concatenate([library, tokens.encode(tokenizer, _files(learnt))]),
        HELD: tokens.encode(tokenizer, held_files),
        HELD_PACKAGES: tokens.encode(tokenizer, _files(held_out)),
    }
    for name, array in arrays.items():
        np.save(out / name, array)
    about = About(
        python=platform.python_version(),
        library=corpus.digest(train_files),
        library_tokens=len(library),
        train_tokens=len(arrays[TRAIN]),
        train_chars=sum(len(file.text) for file in [*train_files, *_files(learnt)]),
        held_tokens=len(arrays[HELD]),
        held_bytes=sum(len(file.text.encode()) for file in held_files),
        packages=tuple(package.facts() for package in learnt),
        held_packages=tuple(package.facts() for package in held_out),
        digests={name: _digest(array) for name, array in arrays.items()},
    )
    partial = out / f"{ABOUT}.tmp"
    partial.write_text(json.dumps(asdict(about), indent=1) + "\n")
    partial.replace(out / ABOUT)


def chosen(
    found: Sequence[Package], held_out: Sequence[Package], library: Sequence[Source], held_files: Sequence[Source]
) -> list[Package]:
    """The packages to learn from, with those of their files that are new, at most LARGEST_SHARE of all for each."""
    sieve = Sieve([*held_files, *_files(held_out)])
    sieve.note(library)
    new = [replace(package, files=tuple(sieve.keep(package.files))) for package in found]
    others = sum(len(file.text) for file in library)
    return [package for package in capped(new, others, LARGEST_SHARE) if package.files]


def _files(found: Sequence[Package]) -> list[Source]:
    return [file for package in found for file in package.files]


def _about(kept: dict) -> About:  # type: ignore[type-arg]
    return About(**{**kept, "packages": tuple(kept["packages"]), "held_packages": tuple(kept["held_packages"])})


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
