"""N-gram table: the distribution of the next token after a context, stored in a few numpy arrays.

It is independent of requests. For contexts h of length n, from the longest stored one down, with h' = h without its
first token:

    q(w | h) = probs[h, w] + (1 - sum of probs[h, .]) * q(w | h')        q(w | empty) = base[w]

Only the explicit shares `probs` are stored. The rest of the probability goes to the shorter context, so q still sums to
one after an entry is dropped or rounded down.

On disk: a folder with config.json and model.safetensors. Contexts of one length form a level of a suffix trie (a
context's parent is the context without its first token); level n = 1 .. order - 1 holds

    n.children  number of contexts below each context of level n - 1 (level 0 is the empty context)
    n.first     first token of every context, grouped by parent, ascending within a parent
    n.sizes     number of entries of every context
    n.tokens    tokens of the entries, grouped by context
    n.probs     float64 shares, or uint8 indices into `levels` (float64, at most 256 values) if that tensor exists

and `base` [V] is float64. Counts and ids use the smallest unsigned type that holds them.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from foredraft.drafters.ngram_lm.counts import (
    EMPTY_HASH,
    HASH_SHIFT,
    PRIME,
    Floats,
    SequenceCounts,
    SparseCounts,
    hash_suffixes,
)
from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors, replace_files

Ints = NDArray[np.int64]

FORMAT = "foredraft-ngram-1"
MAX_CODES = 256  # distinct shares that one byte per entry can index
SUM_TOLERANCE = 1e-6  # allowed error of the sum of a stored distribution
SHARE_TOLERANCE = 1e-9  # allowed excess over 1 of the sum of a context's shares


def _extend_hashes(states: NDArray[np.uint64], tokens: Ints) -> NDArray[np.uint64]:
    """Extend context hashes by one token each, as one step of `hash_suffixes` does."""
    states = (states ^ (tokens + 1).astype(np.uint64)) * np.uint64(PRIME)
    return states ^ (states >> np.uint64(HASH_SHIFT))


def is_table(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether config.json declares an n-gram table."""
    return config.get("format") == FORMAT


@dataclass(frozen=True)
class NgramLevel:
    """C contexts of one length, and E entries: tokens with explicit probabilities after these contexts."""

    parents: Ints  # [C] index in the level before of the context without its first token, ascending
    first_tokens: Ints  # [C] first token, ascending within a parent
    sizes: Ints  # [C] entries per context, may be 0
    tokens: Ints  # [E] grouped by context
    probs: Floats  # [E] explicit shares, whose sum per context is less than one

    def sum_by_context(self, values: Floats) -> Floats:
        """Sum the values [E] of the entries by context, [C]."""
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.bincount(owner, weights=values, minlength=len(self.sizes)).astype(np.float64)


@dataclass(frozen=True)
class _ContextLookup:
    """Contexts of all lengths, sorted by hash."""

    hashes: NDArray[np.uint64]  # [C]
    starts: Ints  # [C] index of the first entry
    stops: Ints  # [C] index after the last entry
    backoffs: Floats  # [C] probability that is left to the shorter context
    tokens: Ints  # [E]
    probs: Floats  # [E]


@dataclass(frozen=True)
class NgramModel:
    """Distribution of the next token over V tokens, after a context of up to order - 1 tokens."""

    base: Floats  # [V] distribution after the empty context; positive, sums to one
    levels: tuple[NgramLevel, ...] = ()  # contexts of length 1, 2, ..., order - 1

    @classmethod
    def make_uniform(cls, vocab_size: int) -> "NgramModel":
        """Make a model of order 1 with a uniform distribution."""
        return cls(np.full(vocab_size, 1 / vocab_size))

    @property
    def order(self) -> int:
        """Maximum number of tokens of an n-gram: the longest context and the next token."""
        return len(self.levels) + 1

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return len(self.base)

    @property
    def num_entries(self) -> int:
        """Number of stored n-grams of two or more tokens."""
        return sum(len(level.tokens) for level in self.levels)

    def compute_q(self, context: Sequence[int], counts: SequenceCounts | None = None) -> Floats:
        """Compute the distribution q of the next token.

        Args:
            context: tokens before it, of which the last order - 1 are used.
            counts: successor counts of the request's own sequence. For contexts of one length they take their share
                of the probability before the table's entries do. Default None = the table alone.

        Returns:
            [V] float64.
        """
        longest = max(len(self.levels), counts.order - 1 if counts else 0)
        hashes = hash_suffixes(context, longest)
        stored = self._find_contexts(hashes)
        share = 1.0
        pieces: list[tuple[int, int, float]] = []  # (start, stop) of a context's entries, and the context's share
        sequence_counts = SparseCounts()
        for n in range(len(hashes) - 1, 0, -1):
            followers = counts.get_followers(hashes[n]) if counts else None
            if followers and counts:
                total = sum(followers.values())
                sequence_counts.add(followers, share / total)
                share *= counts.discount * len(followers) / total
            index = stored[n] if n < len(stored) else -1
            if index >= 0:
                pieces.append((int(self._lookup.starts[index]), int(self._lookup.stops[index]), share))
                share *= float(self._lookup.backoffs[index])
        q = (counts.interpolate_base(self.base) if counts else self.base) * share
        for start, stop, weight in pieces:
            q[self._lookup.tokens[start:stop]] += self._lookup.probs[start:stop] * weight
        if counts:
            sequence_counts.add_to(q, counts.discount)
        return q

    def _find_contexts(self, hashes: Sequence[int]) -> list[int]:
        """Find the contexts of n tokens by their hashes: element n is the index in `_lookup`, -1 = not stored."""
        table = self._lookup.hashes
        query = np.array(hashes[: len(self.levels) + 1], dtype=np.uint64)
        if not len(table):
            return [-1] * len(query)
        indices = np.searchsorted(table, query)
        return np.where(table.take(indices, mode="clip") == query, indices, -1).tolist()  # type: ignore[no-any-return]

    @cached_property
    def _lookup(self) -> _ContextLookup:
        hashes, backoffs = [np.full(1, EMPTY_HASH, dtype=np.uint64)], []
        for level in self.levels:
            hashes.append(_extend_hashes(hashes[-1][level.parents], level.first_tokens))
            backoffs.append(1 - level.sum_by_context(level.probs))
        empty = [np.zeros(0)]
        all_hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *hashes[1:]])
        order = np.argsort(all_hashes, kind="stable")
        all_hashes = all_hashes[order]
        if (all_hashes[1:] == all_hashes[:-1]).any():
            raise ForedraftError("two contexts of the n-gram table share a hash; prune it differently")
        stops = np.cumsum(np.concatenate([np.zeros(0, dtype=np.int64), *[level.sizes for level in self.levels]]))
        sizes = np.diff(stops, prepend=0)
        return _ContextLookup(
            all_hashes,
            (stops - sizes)[order],
            stops[order],
            np.concatenate(empty + backoffs)[order],
            np.concatenate([np.zeros(0, dtype=np.int64), *[level.tokens for level in self.levels]]),
            np.concatenate(empty + [level.probs for level in self.levels]),
        )

    def quantise_probs(self, num_levels: int = MAX_CODES) -> "NgramModel":
        """Return a copy with shares rounded down to a geometric grid of values, so an entry is stored in one byte.

        Args:
            num_levels: number of values, at most 256. Default 256.
        """
        probs = np.concatenate([level.probs for level in self.levels]) if self.levels else np.zeros(0)
        if not len(probs):
            return self
        grid = np.geomspace(probs.min(), probs.max(), num_levels)
        grid[0] = probs.min()  # geomspace may exceed the minimum by a rounding error, and shares are rounded down

        def round_level(level: NgramLevel) -> NgramLevel:
            indices = np.searchsorted(grid, level.probs, side="right") - 1
            return replace(level, probs=grid[indices])

        return replace(self, levels=tuple(map(round_level, self.levels)))

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors to a folder."""
        folder = Path(folder)
        tensors: dict[str, NDArray[Any]] = {"base": self.base}
        distinct = np.unique(np.concatenate([level.probs for level in self.levels])) if self.levels else np.zeros(0)
        if 0 < len(distinct) <= MAX_CODES:
            tensors["levels"] = distinct
        num_parents = 1
        for n, level in enumerate(self.levels, 1):
            tensors[f"{n}.children"] = _shrink_dtype(np.bincount(level.parents, minlength=num_parents))
            tensors[f"{n}.first"] = _shrink_dtype(level.first_tokens)
            tensors[f"{n}.sizes"] = _shrink_dtype(level.sizes)
            tensors[f"{n}.tokens"] = _shrink_dtype(level.tokens)
            codes = np.searchsorted(distinct, level.probs).astype(np.uint8)
            tensors[f"{n}.probs"] = codes if "levels" in tensors else level.probs
            num_parents = len(level.first_tokens)
        config = {"format": FORMAT, "vocab_size": self.vocab_size, "order": self.order, "num_entries": self.num_entries}

        def write(path: Path) -> None:
            save_file(tensors, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")

        with convert_write_errors(folder, "make room and try again"):
            replace_files(folder, write)

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int | None = None) -> "NgramModel":
        """Read a table that `save` wrote.

        Args:
            folder: folder of the table.
            vocab_size: vocabulary size of the target. Default None = not compared.

        Raises:
            ForedraftError: the folder is no table or damaged, or the vocabulary sizes differ.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            if config.get("format") != FORMAT:  # checked first: tensors of a model may have dtypes that numpy lacks
                name = config.get("format") or config.get("model_type")
                raise ForedraftError(f"{folder} is no n-gram table: its format is {name!r}, not {FORMAT!r}")
            tensors = load_file(folder / "model.safetensors")
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
            raise ForedraftError(f"no n-gram table can be read from {folder}: {error}") from None
        if vocab_size is not None and config.get("vocab_size") != vocab_size:
            raise ForedraftError(
                f"the n-gram table {folder} is for {config.get('vocab_size')} tokens and the target has {vocab_size}; "
                "train one on the target's own token ids"
            )
        try:
            model = _assemble(config, tensors)
            model._find_contexts([EMPTY_HASH])  # builds the lookup now instead of during the first request
        except (KeyError, TypeError, ValueError) as error:
            raise ForedraftError(f"the n-gram table {folder} is damaged: {error}") from None
        return model


def _shrink_dtype(values: Ints) -> NDArray[Any]:
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _assemble(config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> NgramModel:
    """Build a model from stored tensors.

    Raises:
        KeyError: a tensor or a key of the configuration is missing.
        ValueError: a tensor is inconsistent; the message names it.
    """
    base = tensors["base"]
    size = int(config["vocab_size"])
    _check(base.shape == (size,) and base.dtype == np.float64, f"base is not {size} float64 numbers")
    _check(bool((base > 0).all()) and abs(base.sum() - 1) < SUM_TOLERANCE, "base is not a distribution")
    levels: list[NgramLevel] = []
    for n in range(1, int(config["order"])):
        levels.append(_read_level(n, tensors, size, len(levels[-1].first_tokens) if levels else 1))
    return NgramModel(base, tuple(levels))


def _read_level(n: int, tensors: dict[str, NDArray[Any]], vocab_size: int, num_parents: int) -> NgramLevel:
    children, first, sizes, tokens, probs = (tensors[f"{n}.{part}"] for part in _TENSOR_SUFFIXES)
    for part in _TENSOR_SUFFIXES:
        _check(tensors[f"{n}.{part}"].ndim == 1, f"{n}.{part} is not a vector")
    for part in _TENSOR_SUFFIXES[:-1]:
        _check(tensors[f"{n}.{part}"].dtype.kind == "u", f"{n}.{part} does not hold unsigned integers")
    if "levels" in tensors:
        _check(int(probs.max(initial=0)) < len(tensors["levels"]), f"{n}.probs points past levels")
        probs = tensors["levels"][probs]
    _check(probs.dtype == np.float64, f"{n}.probs has type {probs.dtype}")
    _check(len(children) == num_parents, f"{n}.children has {len(children)} counts for {num_parents} contexts")
    _check(len(first) == int(children.sum()), f"{n}.first has {len(first)} contexts, {n}.children says otherwise")
    _check(len(sizes) == len(first), f"{n}.sizes has {len(sizes)} counts for {len(first)} contexts")
    total = int(sizes.sum())
    _check(len(tokens) == total == len(probs), f"{n}.tokens and {n}.probs do not have the {total} entries of {n}.sizes")
    for ids in (first, tokens):
        _check(int(ids.max(initial=0)) < vocab_size, f"level {n} has a token outside the vocabulary")
    parents = np.repeat(np.arange(num_parents), children)
    level = NgramLevel(parents, first.astype(np.int64), sizes.astype(np.int64), tokens.astype(np.int64), probs)
    in_range = bool((probs > 0).all()) and bool((level.sum_by_context(probs) < 1 + SHARE_TOLERANCE).all())
    _check(in_range, f"{n}.probs are not parts of a distribution")
    return level


_TENSOR_SUFFIXES = ("children", "first", "sizes", "tokens", "probs")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
