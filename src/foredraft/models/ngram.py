"""An n-gram table: the distribution of the next token after a context, from a few numpy arrays. Knows nothing of
requests.

For contexts h of length n, from the longest stored one down, with h' = h without its first token:

    q(w | h) = probs[h, w] + (1 - sum of probs[h, .]) * q(w | h')        q(w | empty) = base[w]

Only the explicit shares `probs` are stored. What they leave goes to the shorter context, so an entry can be dropped
or rounded down and q still sums to one.

On disk: a folder with config.json and model.safetensors. Contexts of one length form a level of a suffix trie (a
context's parent is the context without its first token); level n = 1 .. order - 1 holds

    n.children  number of contexts below each context of level n - 1 (level 0 is the empty context)
    n.first     the first token of every context, grouped by parent, rising within a parent
    n.sizes     number of entries of every context
    n.tokens    tokens of the entries, grouped by context
    n.probs     float64 shares, or uint8 indices into `levels` (float64, at most 256 values) where that exists

and `base` [V] is float64. Counts and ids use the smallest unsigned type that holds them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from foredraft.checkpoints.disk import convert_write_errors, replace_files
from foredraft.errors import ForedraftError
from foredraft.models.ngram_counts import EMPTY_HASH, PRIME, Floats, SequenceCounts, SparseCounts, hash_suffixes

Ints = NDArray[np.int64]

FORMAT = "foredraft-ngram-1"


def _extend_hashes(states: NDArray[np.uint64], tokens: Ints) -> NDArray[np.uint64]:
    """The vectorised step of `suffix_hashes`."""
    states = (states ^ (tokens + 1).astype(np.uint64)) * np.uint64(PRIME)
    return states ^ (states >> np.uint64(29))


@dataclass(frozen=True)
class NgramLevel:
    """The contexts of one length and the tokens seen after them."""

    parents: Ints  # [C] index of the context without its first token in the level above, rising
    first_tokens: Ints  # [C] first token, rising within a parent
    sizes: Ints  # [C] entries per context, possibly none
    tokens: Ints  # [E] grouped by context
    probs: Floats  # [E] explicit shares; a context's sum to less than one

    def sum_by_context(self, values: Floats) -> Floats:
        """[C] sums of [E] values over every context."""
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.bincount(owner, weights=values, minlength=len(self.sizes)).astype(np.float64)


@dataclass(frozen=True)
class _ContextLookup:
    """All contexts of all lengths, by rising hash."""

    hashes: NDArray[np.uint64]  # [C]
    starts: Ints  # [C] first entry
    stops: Ints  # [C]
    backoffs: Floats  # [C] share of the shorter context
    tokens: Ints  # [E]
    probs: Floats  # [E]


@dataclass(frozen=True)
class NgramModel:
    """q over V tokens after a context of up to order - 1 tokens."""

    base: Floats  # [V] distribution after the empty context; positive, sums to one
    levels: tuple[NgramLevel, ...] = ()  # contexts of length 1, 2, ..., order - 1

    @classmethod
    def make_uniform(cls, vocab_size: int) -> "NgramModel":
        """Knows nothing."""
        return cls(np.full(vocab_size, 1 / vocab_size))

    @classmethod
    def train(
        cls,
        ids: Sequence[int] | Ints | Sequence[Sequence[int] | Ints],
        order: int,
        vocab_size: int,
        min_count: int = 1,
        max_entries: int | None = None,
        once_per_sequence: bool = False,
    ) -> "NgramModel":
        """Interpolated modified Kneser-Ney, pruned to `max_entries`; see `foredraft.models.kneser_ney.train`."""
        from foredraft.models import kneser_ney

        return kneser_ney.train(ids, order, vocab_size, min_count, max_entries, once_per_sequence)

    @property
    def order(self) -> int:
        return len(self.levels) + 1

    @property
    def vocab_size(self) -> int:
        return len(self.base)

    @property
    def num_entries(self) -> int:
        return sum(len(level.tokens) for level in self.levels)

    def compute_q(self, context: Sequence[int], counts: SequenceCounts | None = None) -> Floats:
        """Distribution [V], float64, of the token after `context`, of which the last order - 1 tokens matter.

        With `counts`, what the text itself has shown after a context comes before the table's entries for contexts of
        that length, and takes its share before them.
        """
        longest = max(len(self.levels), counts.order - 1 if counts else 0)
        hashes = hash_suffixes(context, longest)
        stored = self._find_contexts(hashes)
        share = 1.0
        pieces: list[tuple[int, int, float]] = []  # (start, stop) of the table's entries, and the context's share
        own = SparseCounts()
        for n in range(len(hashes) - 1, 0, -1):
            after = counts.get_followers(hashes[n]) if counts else None
            if after and counts:
                total = sum(after.values())
                own.add(after, share / total)
                share *= counts.discount * len(after) / total
            spot = stored[n] if n < len(stored) else -1
            if spot >= 0:
                pieces.append((int(self._lookup.starts[spot]), int(self._lookup.stops[spot]), share))
                share *= float(self._lookup.backoffs[spot])
        q = (counts.interpolate_base(self.base) if counts else self.base) * share
        for start, stop, weight in pieces:
            q[self._lookup.tokens[start:stop]] += self._lookup.probs[start:stop] * weight
        if counts:
            own.add_to(q, counts.discount)
        return q

    def _find_contexts(self, hashes: Sequence[int]) -> list[int]:
        """[n]: place of the context of n tokens among the stored ones, -1 = not there."""
        index = self._lookup.hashes
        wanted = np.array(hashes[: len(self.levels) + 1], dtype=np.uint64)
        if not len(index):
            return [-1] * len(wanted)
        spots = np.searchsorted(index, wanted)
        return np.where(index.take(spots, mode="clip") == wanted, spots, -1).tolist()  # type: ignore[no-any-return]

    @cached_property
    def _lookup(self) -> _ContextLookup:
        hashes, backoffs = [np.full(1, EMPTY_HASH, dtype=np.uint64)], []
        for level in self.levels:
            hashes.append(_extend_hashes(hashes[-1][level.parents], level.first_tokens))
            backoffs.append(1 - level.sum_by_context(level.probs))
        empty = [np.zeros(0)]
        every = np.concatenate([np.zeros(0, dtype=np.uint64), *hashes[1:]])
        order = np.argsort(every, kind="stable")
        every = every[order]
        if (every[1:] == every[:-1]).any():
            raise ForedraftError("two contexts of the n-gram table share a hash; prune it differently")
        stops = np.cumsum(np.concatenate([np.zeros(0, dtype=np.int64), *[level.sizes for level in self.levels]]))
        sizes = np.diff(stops, prepend=0)
        return _ContextLookup(
            every,
            (stops - sizes)[order],
            stops[order],
            np.concatenate(empty + backoffs)[order],
            np.concatenate([np.zeros(0, dtype=np.int64), *[level.tokens for level in self.levels]]),
            np.concatenate(empty + [level.probs for level in self.levels]),
        )

    def quantise_probs(self, num_levels: int = 256) -> "NgramModel":
        """Shares rounded down to `num_levels` (at most 256) values in geometric steps, for one byte per entry."""
        probs = np.concatenate([level.probs for level in self.levels]) if self.levels else np.zeros(0)
        if not len(probs):
            return self
        grid = np.geomspace(probs.min(), probs.max(), num_levels)
        grid[0] = probs.min()  # geomspace may end a rounding error above what must still be rounded down

        def round_level(level: NgramLevel) -> NgramLevel:
            spots = np.searchsorted(grid, level.probs, side="right") - 1
            return replace(level, probs=grid[spots])

        return replace(self, levels=tuple(map(round_level, self.levels)))

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        tensors: dict[str, NDArray[Any]] = {"base": self.base}
        distinct = np.unique(np.concatenate([level.probs for level in self.levels])) if self.levels else np.zeros(0)
        if 0 < len(distinct) <= 256:
            tensors["levels"] = distinct
        above = 1
        for n, level in enumerate(self.levels, 1):
            tensors[f"{n}.children"] = _shrink_dtype(np.bincount(level.parents, minlength=above))
            tensors[f"{n}.first"] = _shrink_dtype(level.first_tokens)
            tensors[f"{n}.sizes"] = _shrink_dtype(level.sizes)
            tensors[f"{n}.tokens"] = _shrink_dtype(level.tokens)
            codes = np.searchsorted(distinct, level.probs).astype(np.uint8)
            tensors[f"{n}.probs"] = codes if "levels" in tensors else level.probs
            above = len(level.first_tokens)
        config = {"format": FORMAT, "vocab_size": self.vocab_size, "order": self.order, "num_entries": self.num_entries}

        def write(place: Path) -> None:
            save_file(tensors, place / "model.safetensors")
            (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")

        with convert_write_errors(folder, "make room and try again"):
            replace_files(folder, write)

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int | None = None) -> "NgramModel":
        """Read what `save` wrote. Raises ForedraftError if it is damaged, of another kind, or of another vocabulary."""
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
            if config.get("format") != FORMAT:  # before the tensors: a model's may be of types numpy does not know
                found = config.get("format") or config.get("model_type")
                raise ForedraftError(f"{folder} is no n-gram table: its format is {found!r}, not {FORMAT!r}")
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
            model._find_contexts([EMPTY_HASH])  # builds the lookup now, not under the first request
        except (KeyError, TypeError, ValueError) as error:
            raise ForedraftError(f"the n-gram table {folder} is damaged: {error}") from None
        return model


def _shrink_dtype(values: Ints) -> NDArray[Any]:
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _assemble(config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> NgramModel:
    """Raises KeyError or ValueError naming the first tensor that cannot be right."""
    base = tensors["base"]
    size = int(config["vocab_size"])
    _check(base.shape == (size,) and base.dtype == np.float64, f"base is not {size} float64 numbers")
    _check(bool((base > 0).all()) and abs(base.sum() - 1) < 1e-6, "base is not a distribution")
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
    in_range = bool((probs > 0).all()) and bool((level.sum_by_context(probs) < 1 + 1e-9).all())
    _check(in_range, f"{n}.probs are not parts of a distribution")
    return level


_TENSOR_SUFFIXES = ("children", "first", "sizes", "tokens", "probs")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
