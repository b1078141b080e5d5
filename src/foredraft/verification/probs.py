"""Target probabilities by row, computed on demand.

A verification visits few of the scored nodes of a step, so `LazyTargetProbs` turns logits into probabilities only for
the rows that are read. `DenseProbs` has the same interface over a tensor [R, V]. A row can be read in two forms: a
token sampled with keyed noise, or `Probs` for arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.kernels.sampler import NativeSampler, find_sampler
from foredraft.sampling import rng
from foredraft.sampling.distribution import TokenHistory, distribution, process_logits
from foredraft.sampling.filters import argmax_tokens
from foredraft.sampling.params import Sampling
from foredraft.sampling.token_sampler import NO_TOKEN, sample_tokens, select_rows
from foredraft.verification.masses import divide_masses, sample_index, subtract_masses, sum_masses

Floats = NDArray[np.float64]
NoiseKeyFunction = Callable[[int], int | None]  # row -> noise key of its sample; None if every row is one-hot
SPARSE_FACTOR = 4  # a row is stored sparsely if fewer than one in this many tokens have mass
# Rows of one native call: as many as have this many masses, so that they stay in a cache, but enough for all threads.
MAX_MASSES_PER_CALL, MIN_ROWS_PER_CALL = 1 << 17, 8
EAGER_ARGMAX_SIZE = 1 << 16  # logits [R * V] on the CPU up to which one argmax over all rows is faster than two calls


class InvalidLogitsError(Exception):
    """Error for a row of logits that yields no distribution: NaN, +inf, or no token left. Only its request fails."""


@dataclass(frozen=True)
class Probs:
    """Masses over the vocabulary in float64, sparse or dense, normalised or not."""

    mass: Floats  # [number of ids], or [V] if ids is None
    vocab_size: int  # V
    ids: NDArray[np.intp] | None = None  # token ids of the masses, ascending; None = the whole vocabulary

    @classmethod
    def from_row(cls, p: Tensor) -> "Probs":
        """Normalise a row [V].

        Raises:
            InvalidLogitsError: if its sum is not positive and finite.
        """
        row = p.cpu().numpy() if p.dtype != torch.bfloat16 else p.cpu().float().numpy()
        masses = cls.from_masses(row)
        if not 0 < masses.total < np.inf:
            raise InvalidLogitsError
        return masses.normalise(fallback=masses)

    @classmethod
    def from_masses(cls, row: Floats) -> "Probs":
        """Return the masses of a row [V] as they are, sparse if few tokens have one.

        Equal rows of p and q thus have equal bits after `normalise`, and a draft from p itself is always accepted.
        """
        if np.count_nonzero(row) * SPARSE_FACTOR < len(row):
            ids = np.flatnonzero(row)
            return cls(row[ids], len(row), ids)
        return cls(row, len(row))

    @classmethod
    def from_token(cls, token: int, vocab_size: int) -> "Probs":
        """Return the one-hot distribution of a token."""
        return cls(np.ones(1), vocab_size, np.array([token]))

    def __getitem__(self, token: int) -> float:
        if self.ids is None:
            return float(self.mass[token])
        index = int(self.ids.searchsorted(token))
        return float(self.mass[index]) if index < len(self.ids) and self.ids[index] == token else 0.0

    @property
    def total(self) -> float:
        """Sum of the masses; 1 if normalised."""
        return sum_masses(self.mass)

    @property
    def entropy(self) -> float:
        """Entropy of a normalised distribution, in nats."""
        positive = self.mass[self.mass > 0]
        return -float((positive * np.log(positive)).sum())

    @property
    def argmax(self) -> int:
        """Token with the largest mass; the lowest id among equal masses."""
        index = int(self.mass.argmax())
        return index if self.ids is None else int(self.ids[index])

    def gather(self, ids: NDArray[np.intp] | None) -> Floats:
        """Return the masses of these token ids, 0 for ids without mass; ids = None is the whole vocabulary."""
        if self.ids is None:
            return self.mass if ids is None else self.mass[ids]
        if ids is None:
            dense = np.zeros(self.vocab_size)
            dense[self.ids] = self.mass
            return dense
        indices = self.ids.searchsorted(ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[indices] == ids, self.mass[indices], 0.0)

    def compute_residual(self, q: "Probs", weight: float = 1.0) -> "Probs":
        """Return the residual max(0, weight * p - q), not normalised. `weight` is the joint ratio of `block`."""
        return Probs(subtract_masses(self.mass, weight, q.gather(self.ids)), self.vocab_size, self.ids)

    def normalise(self, fallback: "Probs") -> "Probs":
        """Scale to a sum of 1; return `fallback` if there is no mass.

        A residual without mass arises from rounding if p and q agree. Callers then fall back to p.
        """
        total = self.total
        return Probs(divide_masses(self.mass, total), self.vocab_size, self.ids) if total > 0 else fallback

    def exclude(self, token: int) -> "Probs":
        """Return the masses with that of `token` set to 0."""
        mass = self.mass.copy()
        if self.ids is None:
            mass[token] = 0
        else:
            mass[self.ids == token] = 0
        return Probs(mass, self.vocab_size, self.ids)

    def sample(self, u: float) -> int:
        """Return the first token whose cumulative mass exceeds u * total, u in (0, 1); never a token without mass."""
        index = sample_index(self.mass, u)
        return index if self.ids is None else int(self.ids[index])


class TargetProbs(Protocol):
    """Target probabilities of R rows over V tokens."""

    def sample_tokens(self, rows: Sequence[int], key: NoiseKeyFunction) -> list[int]:
        """Sample a token in each of these rows with the noise of its key; NO_TOKEN for a row with invalid logits."""

    def get_probs(self, row: int) -> Probs:
        """Return p of a row. Raises InvalidLogitsError."""

    def select(self, rows: Sequence[int]) -> "TargetProbs":
        """Return the probabilities of these rows, in the given order."""


class LazyTargetProbs:
    """Target probabilities computed from logits by `distribution`, row by row on demand.

    Args:
        logits: [R, V], not modified.
        samplings: R sampling parameters, one per row.
        history_of_row: returns the token history of a row; None if no sampling parameter depends on the history.
        root_rows: rows that every verification reads; they are computed together.
    """

    def __init__(
        self,
        logits: Tensor,
        samplings: Sequence[Sampling],
        history_of_row: Callable[[int], TokenHistory] | None = None,
        root_rows: Sequence[int] = (),
    ) -> None:
        self.logits = logits
        self.samplings = samplings
        self._history_of_row = history_of_row
        is_small = (
            all(s.is_greedy for s in samplings) and history_of_row is None and logits.numel() <= EAGER_ARGMAX_SIZE
        )
        # On a device, computing on demand would synchronise at every level of a tree.
        self._computes_all_rows = is_small or logits.device.type != "cpu"
        # Rows computed from a requested row on: a walk down a chain requests the following rows next.
        self._num_lookahead = 1
        self._root_rows = root_rows  # () once they are computed
        self._root_probs: dict[int, Probs | None] = {}  # by row; None = invalid logits
        self._dense_rows: dict[int, Tensor] = {}  # row -> p [V]
        self._token_by_row: dict[int, int] = {}

    def sample_tokens(self, rows: Sequence[int], key: NoiseKeyFunction) -> list[int]:
        """Sample a token in each of these rows with the noise of its key; NO_TOKEN for a row with invalid logits."""
        token_by_row = self._token_by_row
        missing = [row for row in rows if row not in token_by_row]
        if missing:
            to_compute = range(len(self.samplings)) if self._computes_all_rows else self._add_lookahead_rows(missing)
            greedy = [row for row in to_compute if self.samplings[row].is_greedy]
            if greedy:
                self._argmax_rows(greedy)
            if len(greedy) < len(to_compute):
                self._sample_rows([row for row in to_compute if not self.samplings[row].is_greedy], key)
        return [token_by_row[row] for row in rows]

    def _add_lookahead_rows(self, missing: list[int]) -> list[int]:
        """Add greedy rows after the missing ones, twice as many at every call.

        At most half of the rows are computed in vain, and a long draft takes few calls.
        """
        if self._history_of_row is not None:
            return missing
        num_ahead, self._num_lookahead = self._num_lookahead, 2 * self._num_lookahead
        num_rows = len(self.samplings)
        nearby = dict.fromkeys(
            i for row in missing for i in range(row, min(row + num_ahead, num_rows)) if i not in self._token_by_row
        )
        return [i for i in nearby if self.samplings[i].is_greedy or i in missing]

    def get_probs(self, row: int) -> Probs:
        """Return p of a row: one-hot if greedy. Raises InvalidLogitsError."""
        if not self.samplings[row].is_greedy:
            return self._compute_probs(row)
        self._argmax_rows([row])
        if self._token_by_row[row] == NO_TOKEN:
            raise InvalidLogitsError
        return Probs.from_token(self._token_by_row[row], self.logits.shape[-1])

    def _compute_probs(self, row: int) -> Probs:
        """Return `Probs.from_row` of the dense row, natively without the dense row if it is not there yet."""
        sampler = find_sampler(self.logits)
        if sampler is None or row in self._dense_rows:
            return Probs.from_row(self.get_dense_row(row))
        sampling = self.samplings[row]
        if self._root_rows:
            self._compute_roots(sampler)
        if row in self._root_probs:
            found = self._root_probs[row]
        elif sampling.shapes_logits:
            logits = process_logits(select_rows(self.logits, [row]), [sampling], self._build_histories([row]))
            [found] = _compute_masses(sampler, logits, [0], [sampling])
        else:
            [found] = _compute_masses(sampler, self.logits, [row], [sampling])
        if found is None:
            raise InvalidLogitsError
        return found

    def _compute_roots(self, sampler: NativeSampler) -> None:
        """Compute p of all sampled root rows whose logits no setting changes, some rows in one call. Runs once."""
        rows = [r for r in self._root_rows if not (self.samplings[r].is_greedy or self.samplings[r].shapes_logits)]
        self._root_rows = ()
        size = max(MIN_ROWS_PER_CALL, MAX_MASSES_PER_CALL // self.logits.shape[-1])
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            self._root_probs |= zip(
                part, _compute_masses(sampler, self.logits, part, [self.samplings[row] for row in part]), strict=True
            )

    def get_dense_row(self, row: int) -> Tensor:
        """Return p of a row as `distribution` computes it: [V], NaN if the logits are invalid."""
        if row not in self._dense_rows:
            self._compute_rows([row])
        return self._dense_rows[row]

    def select(self, rows: Sequence[int]) -> "LazyTargetProbs":
        """Return the probabilities of these rows, in the given order; nothing computed so far is passed on."""
        indices, history_of_row = list(rows), self._history_of_row
        selected_history = None if history_of_row is None else lambda i: history_of_row(indices[i])
        return LazyTargetProbs(self.logits[indices], [self.samplings[row] for row in indices], selected_history)

    def _argmax_rows(self, rows: Sequence[int]) -> None:
        """Compute the tokens of greedy rows; their one-hot distributions are not built."""
        samplings, histories = [self.samplings[row] for row in rows], self._build_histories(rows)
        if len(rows) * self.logits.shape[-1] > EAGER_ARGMAX_SIZE and find_sampler(self.logits) is not None:
            tokens = sample_tokens(self.logits, rows, samplings, [0] * len(rows), histories)  # copies no rows
        else:
            tokens = argmax_tokens(process_logits(select_rows(self.logits, rows), samplings, histories))
        self._token_by_row |= zip(rows, tokens, strict=True)

    def _sample_rows(self, rows: Sequence[int], key: NoiseKeyFunction) -> None:
        samplings, keys = [self.samplings[row] for row in rows], [key(row) or 0 for row in rows]
        self._token_by_row |= zip(
            rows, sample_tokens(self.logits, rows, samplings, keys, self._build_histories(rows)), strict=True
        )

    def _compute_rows(self, rows: Sequence[int]) -> None:
        if rows:
            samplings = [self.samplings[row] for row in rows]
            self._dense_rows |= zip(
                rows, distribution(select_rows(self.logits, rows), samplings, self._build_histories(rows)), strict=True
            )

    def _build_histories(self, rows: Sequence[int]) -> list[TokenHistory] | None:
        return None if self._history_of_row is None else [self._history_of_row(row) for row in rows]


def _compute_masses(
    sampler: NativeSampler, logits: Tensor, rows: Sequence[int], samplings: Sequence[Sampling]
) -> list[Probs | None]:
    """Return p of some rows of logits [N, V]; None for a row with invalid logits."""
    found = sampler.compute_masses(logits, rows, [sampling.filter_settings for sampling in samplings])
    return [None if row is None else Probs(row[1], logits.shape[-1], row[0]) for row in found]


class DenseProbs:
    """Target probabilities from a tensor p [R, V]. An invalid row holds NaN, or sums to 0 or infinity."""

    def __init__(self, p: Tensor) -> None:
        self._probs = p
        self._token_list: list[int] = []  # R sampled tokens, after the first `sample_tokens`

    def sample_tokens(self, rows: Sequence[int], key: NoiseKeyFunction) -> list[int]:
        """Sample every row at the first call, and return the tokens of these rows."""
        if not self._token_list:
            self._sample_rows([key(row) for row in range(len(self._probs))])
        return [self._token_list[row] for row in rows]

    def get_probs(self, row: int) -> Probs:
        """Return p of a row. Raises InvalidLogitsError."""
        return Probs.from_row(self._probs[row])

    def select(self, rows: Sequence[int]) -> "DenseProbs":
        """Return the probabilities of these rows, in the given order."""
        return DenseProbs(self._probs[list(rows)])

    def _sample_rows(self, keys: Sequence[int | None]) -> None:
        """Sample all rows by the exponential race, or by argmax if there are no keys (all rows are one-hot)."""
        noise_keys = [k for k in keys if k is not None]
        scores = (
            rng.exponential_race(self._probs, torch.tensor(noise_keys, device=self._probs.device))
            if len(noise_keys) == len(keys)
            else self._probs
        )
        total = self._probs.sum(-1)
        self._token_list = torch.where(total.isfinite() & (total > 0), scores.argmax(-1), NO_TOKEN).tolist()


def to_target_probs(p: Tensor | TargetProbs) -> TargetProbs:
    """Return p itself, or a DenseProbs of it if it is a tensor."""
    return DenseProbs(p) if isinstance(p, Tensor) else p
