"""Laws made when they are asked for: a verification visits few of the nodes it is given, and pays for those alone.

`Laws` are the rows of `distribution` over the scored nodes of a step; `Table` is the same over rows made already.
Both give a row as it is needed: the token drawn by keyed noise, a `Law` to calculate with, or the dense row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft import noise
from foredraft.filters import likeliest
from foredraft.sampling import History, Sampling, distribution, shaped

Floats = NDArray[np.float64]
Key = Callable[[int], int | None]  # row -> the noise key of its draw; None where every law is one-hot
NO_LAW = -1  # in place of a token
SMALL = 1 << 16  # logits on the CPU: to look at all of them for the largest takes less than to ask twice


class NotALawError(Exception):
    """A row of p was not finite: this request fails, alone."""


@dataclass(frozen=True)
class Law:
    """Masses in float64, normalised or not, of the tokens that have any."""

    mass: Floats
    size: int  # V
    ids: NDArray[np.intp] | None = None  # rising, as many as masses; None = the whole vocabulary

    @classmethod
    def of(cls, p: Tensor) -> "Law":
        """A row [V], scaled to one. Raises NotALawError."""
        row = p.cpu().numpy() if p.dtype != torch.bfloat16 else p.cpu().float().numpy()
        total = float(row.sum(dtype=np.float64))
        if not 0 < total < np.inf:
            raise NotALawError
        if np.count_nonzero(row) * 4 < len(row):
            ids = np.flatnonzero(row)
            return cls(row[ids] / np.float64(total), len(row), ids)
        return cls(row / np.float64(total), len(row))

    @classmethod
    def one_hot(cls, token: int, size: int) -> "Law":
        return cls(np.ones(1), size, np.array([token]))

    def __getitem__(self, token: int) -> float:
        if self.ids is None:
            return float(self.mass[token])
        place = int(self.ids.searchsorted(token))
        return float(self.mass[place]) if place < len(self.ids) and self.ids[place] == token else 0.0

    @property
    def total(self) -> float:
        return float(self.mass.sum())

    @property
    def entropy(self) -> float:
        some = self.mass[self.mass > 0]
        return -float((some * np.log(some)).sum())

    @property
    def likeliest(self) -> int:
        """The token of the largest mass; of equal ones the lowest id."""
        place = int(self.mass.argmax())
        return place if self.ids is None else int(self.ids[place])

    def over(self, ids: NDArray[np.intp] | None) -> Floats:
        """Its masses of other tokens; None = the whole vocabulary."""
        if self.ids is None:
            return self.mass if ids is None else self.mass[ids]
        if ids is None:
            every = np.zeros(self.size)
            every[self.ids] = self.mass
            return every
        places = self.ids.searchsorted(ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.mass[places], 0.0)

    def residual(self, q: "Law", weight: float = 1.0) -> "Law":
        """What is left of its weighted masses where q takes its own: max(0, weight p - q)."""
        left = self.mass * weight
        left -= q.over(self.ids)
        return Law(np.maximum(left, 0, out=left), self.size, self.ids)

    def scaled(self, fallback: "Law") -> "Law":
        """To one. A residual of no mass arises from rounding where p and q agree; p itself is then the law."""
        total = self.total
        return Law(self.mass / total, self.size, self.ids) if total > 0 else fallback

    def without(self, token: int) -> "Law":
        """Of a law over the whole vocabulary."""
        mass = self.mass.copy()
        mass[token] = 0
        return Law(mass, self.size)

    def draw(self, u: float) -> int:
        """The first token whose cumulative probability exceeds u; never one of probability zero."""
        mass = self.mass.cumsum()
        index = int(mass.searchsorted(u * mass[-1], side="right"))
        if index >= len(mass) or not self.mass[index] > 0:
            index = int(self.mass.nonzero()[0][-1])
        return index if self.ids is None else int(self.ids[index])


class Rows(Protocol):
    """R laws over V tokens."""

    def tokens(self, rows: Sequence[int], key: Key) -> list[int]:
        """The draw of every row by keyed noise; NO_LAW where nothing can be drawn."""

    @property
    def drawn(self) -> Tensor:
        """[R] int64 the draws made so far, NO_LAW for other rows."""

    def law(self, row: int) -> Law:
        """Raises NotALawError."""

    def select(self, rows: Sequence[int]) -> "Rows":
        """Some of the rows, in that order."""


class Laws:
    """The laws `distribution` makes of logits, row by row."""

    def __init__(
        self, logits: Tensor, samplings: Sequence[Sampling], history: Callable[[int], History] | None = None
    ) -> None:
        self.logits = logits  # [R, V]
        self.samplings = samplings  # R
        self._history = history  # of a row; None where no logits are shaped
        # a device would have to be waited for at every level of a tree
        is_small = all(s.is_greedy for s in samplings) and history is None and logits.numel() <= SMALL
        self._at_once = is_small or logits.device.type != "cpu"
        self._ahead = 1  # rows looked at together: those after one that was asked for are likely to be asked for next
        self._p: dict[int, Tensor] = {}  # [V] each
        self._tokens: dict[int, int] = {}

    def tokens(self, rows: Sequence[int], key: Key) -> list[int]:
        known = self._tokens
        missing = [row for row in rows if row not in known]
        if missing:
            every = range(len(self.samplings)) if self._at_once else self._with_next(missing)
            greedy = [row for row in every if self.samplings[row].is_greedy]
            if greedy:
                self._choose(greedy)
            if len(greedy) < len(every):
                self._draw([row for row in every if not self.samplings[row].is_greedy], key)
        return [known[row] for row in rows]

    def _with_next(self, missing: list[int]) -> list[int]:
        """Twice as many at every call: at most half are looked at in vain, and a long draft takes few calls."""
        if self._history is not None:
            return missing
        ahead, self._ahead = self._ahead, 2 * self._ahead
        last = len(self.samplings)
        near = dict.fromkeys(i for row in missing for i in range(row, min(row + ahead, last)) if i not in self._tokens)
        return [i for i in near if self.samplings[i].is_greedy or i in missing]

    @property
    def drawn(self) -> Tensor:
        return torch.tensor([self._tokens.get(row, NO_LAW) for row in range(len(self.samplings))], dtype=torch.int64)

    def law(self, row: int) -> Law:
        if not self.samplings[row].is_greedy:
            return Law.of(self.p(row))
        self._choose([row])
        if self._tokens[row] == NO_LAW:
            raise NotALawError
        return Law.one_hot(self._tokens[row], self.logits.shape[-1])

    def p(self, row: int) -> Tensor:
        """[V] the whole row, as `distribution` gives it."""
        if row not in self._p:
            self._make([row])
        return self._p[row]

    def select(self, rows: Sequence[int]) -> "Laws":
        mine, history = list(rows), self._history
        moved = None if history is None else lambda i: history(mine[i])
        return Laws(self.logits[mine], [self.samplings[row] for row in mine], moved)

    def _choose(self, rows: Sequence[int]) -> None:
        """The tokens of greedy rows, whose laws are one-hot: nothing but the token is needed."""
        some, history = [self.samplings[row] for row in rows], self._histories(rows)
        self._tokens |= zip(rows, likeliest(shaped(self._logits(rows), some, history)), strict=True)

    def _draw(self, rows: Sequence[int], key: Key) -> None:
        self._make([row for row in rows if row not in self._p])
        keys = [key(row) or 0 for row in rows]
        if self.logits.device.type == "cpu":
            for row, k in zip(rows, keys, strict=True):
                mass = self._p[row].numpy()
                self._tokens[row] = noise.winner(mass, k) if mass[0] == mass[0] else NO_LAW  # NaN throughout
            return
        p = torch.stack([self._p[row] for row in rows])
        tokens = noise.race(p, torch.tensor(keys, device=p.device)).argmax(-1)
        self._tokens |= zip(rows, tokens.masked_fill_(p[:, 0].isnan(), NO_LAW).tolist(), strict=True)

    def _make(self, rows: Sequence[int]) -> None:
        if rows:
            some = [self.samplings[row] for row in rows]
            self._p |= zip(rows, distribution(self._logits(rows), some, self._histories(rows)), strict=True)

    def _logits(self, rows: Sequence[int]) -> Tensor:
        first, size = rows[0], len(rows)
        if rows[-1] == first + size - 1 and list(rows) == list(range(first, first + size)):
            return self.logits[first : first + size]
        return self.logits[list(rows)]

    def _histories(self, rows: Sequence[int]) -> list[History] | None:
        return None if self._history is None else [self._history(row) for row in rows]


class Table:
    """Laws that are there already, [R, V]."""

    def __init__(self, p: Tensor) -> None:
        self._p = p
        self._choice = p.new_zeros(0, dtype=torch.int64)  # [R] once drawn
        self._tokens: list[int] = []

    @classmethod
    def of(cls, p: "Tensor | Rows") -> "Rows":
        """Whatever a rule is given."""
        return cls(p) if isinstance(p, Tensor) else p

    def tokens(self, rows: Sequence[int], key: Key) -> list[int]:
        if not self._tokens:
            self._draw([key(row) for row in range(len(self._p))])
        return [self._tokens[row] for row in rows]

    @property
    def drawn(self) -> Tensor:
        return self._choice

    def law(self, row: int) -> Law:
        return Law.of(self._p[row])

    def select(self, rows: Sequence[int]) -> "Table":
        return Table(self._p[list(rows)])

    def _draw(self, keys: Sequence[int | None]) -> None:
        known = [k for k in keys if k is not None]
        scores = noise.race(self._p, torch.tensor(known, device=self._p.device)) if len(known) == len(keys) else self._p
        self._choice, total = scores.argmax(-1), self._p.sum(-1)
        self._tokens = torch.where(total.isfinite() & (total > 0), self._choice, NO_LAW).tolist()
