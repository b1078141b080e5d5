"""Lookahead decoding (2402.02057): a Jacobi window that makes n-grams, and the n-grams as guesses, in one tree.

No model beside the target and no training: rows of the target's pass that would be idle try tokens further ahead.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from foredraft.drafters.base import Context, Draft, TextDrafter
from foredraft.errors import ForedraftError
from foredraft.request import Batch, Request
from foredraft.tree import Answers, Commit

METHOD = "lookahead"
READS_MODEL = False
Path = tuple[int, ...]  # tokens below the root, in a line


@dataclass(frozen=True)
class Config:
    """`window` columns (W) of `ngram_size` - 1 levels, and up to `guesses` (G) n-grams that begin with the last token.

    The whole tree has W (N - 1) - 1 + G (N - 1) nodes; with fewer, columns and guesses are left out in turn.
    `pool` n-grams are kept per request, those not looked at for longest go first. `from_text`: n-grams of the prompt
    and of the output are put there too (what the authors call POOL_FROM_PROMPT, and the output beside it).
    """

    window: int = 5
    ngram_size: int = 4
    guesses: int = 5
    pool: int = 10_000
    from_text: bool = True


class Pool:
    """N-grams by their first token, the newest `guesses` of each; all together bounded."""

    def __init__(self, guesses: int, most: int) -> None:
        self._guesses, self._most = guesses, most
        self._by_first: OrderedDict[int, OrderedDict[Path, None]] = OrderedDict()  # both: the newest last
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, gram: Path) -> None:
        first, rest = gram[0], gram[1:]
        rests = self._by_first.setdefault(first, OrderedDict())
        self._by_first.move_to_end(first)
        self._count += rest not in rests
        rests[rest] = None
        rests.move_to_end(rest)
        if len(rests) > self._guesses:
            rests.popitem(last=False)
            self._count -= 1
        while self._count > self._most:
            self._drop()

    def after(self, token: int) -> list[Path]:
        """What may follow a token, the newest first."""
        rests = self._by_first.get(token)
        if rests is None:
            return []
        self._by_first.move_to_end(token)
        return list(reversed(rests))

    def _drop(self) -> None:
        first, rests = next(iter(self._by_first.items()))
        rests.popitem(last=False)
        self._count -= 1
        if not rests:
            del self._by_first[first]


class Window:
    """W columns of N - 1 tokens each: guesses at what is to come, better by one Jacobi iteration with every pass.

    Level l of column j stands j + l places after the root. Level 0 of column 0 is the root itself; level 0 of the
    other columns is a chain below it. A token sees the root, level 0 up to its own column, and its own column up to
    its own level: those are its ancestors where every column hangs from its place in level 0. So the mask of the paper
    is that of a tree, all of it.
    """

    def __init__(self, num_columns: int, num_levels: int, vocabulary: Sequence[int]) -> None:
        """vocabulary: tokens to begin with by chance."""
        chance = random.Random(len(vocabulary))  # knows none of the request's coins
        self._columns = [chance.choices(vocabulary, k=num_levels) for _ in range(num_columns)]
        self._ages = [0] * num_columns  # how many answers each column has taken up

    def paths(self, depth: int) -> list[Path]:
        """From below the root to the last level of every column, but of none that is deeper than `depth`."""
        chain: Path = ()
        found: list[Path] = []
        for j, column in enumerate(self._columns):
            chain += tuple(column[:1]) if j else ()
            path = chain + tuple(column[1:])
            if len(path) > depth:
                break
            found.append(path)
        return found

    def push(self, root: int, answers: Sequence[int | None]) -> list[Path]:
        """Take up what the target says after the columns, and give the n-grams that end with it.

        A column without an answer (there was no room for it) stays as it is. Level 0 goes, and as the root has moved on
        too, what was level 1 is as near to it as level 0 was. An n-gram counts once none but its first token came by
        chance.
        """
        grams: list[Path] = []
        for j, answer in enumerate(answers):
            if answer is None:
                continue
            column = self._columns[j]
            self._ages[j] += 1
            if self._ages[j] >= len(column):
                grams.append((column[0] if j else root, *column[1:], answer))
            self._columns[j] = [*column[1:], answer]
        return grams


@dataclass
class Sight:
    """What is kept of one request."""

    pool: Pool
    size: int  # N
    from_text: bool
    tokens: list[int] = field(default_factory=list)
    window: Window | None = None
    asked: tuple[Path, ...] = ()  # the columns of the tree under verification, below the last of the tokens

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            if self.from_text and len(self.tokens) >= self.size:
                self.pool.add(tuple(self.tokens[-self.size :]))

    def hear(self, b: int, answers: Answers | None) -> None:
        asked, self.asked = self.asked, ()
        if asked and answers is not None and self.window is not None:
            for gram in self.window.push(self.tokens[-1], [answers.after(b, path) for path in asked]):
                self.pool.add(gram)


class Lookahead(TextDrafter[Sight]):
    """Guesses, whose q is one-hot: no law depends on how they were found. A request under `block`, which takes chains,
    has no window, and of the guesses the first."""

    wants_answers = True

    def __init__(self, config: Config, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.config = config
        self._size = min(config.ngram_size, num_tokens + 1)

    @property
    def num_nodes(self) -> int:
        levels = self._size - 1
        columns = min(self.config.window, self.num_tokens - levels + 2)  # column j is j + levels - 1 deep
        return columns * levels - 1 + self.config.guesses * levels

    def start(self) -> Sight:
        return Sight(Pool(self.config.guesses, self.config.pool), self._size, self.config.from_text)

    def draft(self, learnt: Sight, request: Request, depth: int, budget: int) -> Draft:
        guesses = [path[:depth] for path in learnt.pool.after(learnt.tokens[-1])]
        if request.verify == "block":
            return Draft.merged(guesses[:1], budget)
        if learnt.window is None:
            learnt.window = Window(self.config.window, self._size - 1, _vocabulary(request))
        woven, learnt.asked = _woven(guesses, learnt.window.paths(depth), budget)
        return Draft.merged(woven, budget)

    def observe(self, batch: Batch, commit: Commit) -> None:
        for b, request in enumerate(batch.requests):
            learnt = self._learnt.get(request.slot)
            if learnt is not None:
                learnt.hear(b, commit.answers)


def _vocabulary(request: Request) -> Sequence[int]:
    """Tokens that this request is likely to be about."""
    return request.source.tokens if request.source is not None and request.source.tokens else request.prompt


def _woven(guesses: Sequence[Path], columns: Sequence[Path], budget: int) -> tuple[list[Path], tuple[Path, ...]]:
    """Guesses and columns in turn, and the columns among them.

    In turn, so that drafts of any size work for later ones too, and so that the estimate of what a node wins is that
    of a guess and a column together. A column is there from end to end or not at all: only its end is answered.
    """
    woven: list[Path] = []
    whole: list[Path] = []
    nodes: set[Path] = set()  # each by the path to it
    left = list(reversed(columns))
    for guess in [*guesses, *[()] * len(columns)]:
        nodes.update(_nodes(guess))
        woven.append(guess)
        if left:
            grown = nodes.union(_nodes(left[-1]))
            if len(grown) > budget:
                left = []
            else:
                nodes = grown
                whole.append(left.pop())
                woven.append(whole[-1])
    return woven, tuple(whole)


def _nodes(path: Path) -> Iterator[Path]:
    return (path[:n] for n in range(1, len(path) + 1))


def create(config: Config, context: Context) -> Lookahead:
    """Raises ForedraftError for numbers that make no window or no n-gram."""
    for name, least in (("window", 1), ("ngram_size", 2), ("guesses", 1), ("pool", 1)):
        if getattr(config, name) < least:
            raise ForedraftError(f"{name} must be at least {least}, got {getattr(config, name)}")
    return Lookahead(config, context.num_tokens)
