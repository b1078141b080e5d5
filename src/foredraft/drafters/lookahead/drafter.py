"""Lookahead decoding: a Jacobi window that makes n-grams, and n-grams from a pool as drafts, in one tree.

It needs no draft model and no training. Idle rows of the target's forward pass compute tokens further ahead.

Reference: 2402.02057.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foredraft.drafters.draft import Draft
from foredraft.drafters.token_drafter import TokenDrafter
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TargetArgmax

TokenPath = tuple[int, ...]  # tokens on a path below the root


@dataclass(frozen=True)
class Config:
    """Sizes of window and pool.

    The whole tree has W (N - 1) - 1 + G (N - 1) nodes. A smaller budget drops columns and n-grams alternately.

    Attributes:
        window: columns of the window (W), each of N - 1 levels.
        ngram_size: tokens of an n-gram (N).
        guesses: most n-grams per step that begin with the last token (G).
        pool: most n-grams per request; the least recently used are evicted.
        from_text: add n-grams of the prompt and the output to the pool. The authors' POOL_FROM_PROMPT adds the prompt.
    """

    window: int = 5
    ngram_size: int = 4
    guesses: int = 5
    pool: int = 10_000
    from_text: bool = True


class NgramPool:
    """Bounded pool of n-grams by first token. Each first token keeps its newest `max_per_token` n-grams."""

    def __init__(self, max_per_token: int, max_ngrams: int) -> None:
        self._max_per_token, self._max_ngrams = max_per_token, max_ngrams
        # both levels: the newest is last
        self._by_first: OrderedDict[int, OrderedDict[TokenPath, None]] = OrderedDict()
        self._num_ngrams = 0

    def __len__(self) -> int:
        return self._num_ngrams

    def add(self, ngram: TokenPath) -> None:
        first, rest = ngram[0], ngram[1:]
        rests = self._by_first.setdefault(first, OrderedDict())
        self._by_first.move_to_end(first)
        self._num_ngrams += rest not in rests
        rests[rest] = None
        rests.move_to_end(rest)
        if len(rests) > self._max_per_token:
            rests.popitem(last=False)
            self._num_ngrams -= 1
        while self._num_ngrams > self._max_ngrams:
            self._evict_oldest()

    def get_continuations(self, token: int) -> list[TokenPath]:
        """Return the n-grams after their first token, the newest first."""
        rests = self._by_first.get(token)
        if rests is None:
            return []
        self._by_first.move_to_end(token)
        return list(reversed(rests))

    def _evict_oldest(self) -> None:
        first, rests = next(iter(self._by_first.items()))
        rests.popitem(last=False)
        self._num_ngrams -= 1
        if not rests:
            del self._by_first[first]


class LookaheadWindow:
    """Window of W columns of N - 1 tokens: estimates of later tokens, improved by one Jacobi iteration per pass.

    Level l of column j is at position j + l after the root. Level 0 of column 0 is the root; level 0 of the other
    columns is a chain below the root. A token attends to the root, to level 0 up to its column, and to its column up
    to its level. These are its ancestors in a tree, so the paper's attention mask is a tree mask.
    """

    def __init__(self, num_columns: int, num_levels: int, initial_tokens: Sequence[int]) -> None:
        """Fill the window with random choices among `initial_tokens`."""
        generator = random.Random(len(initial_tokens))  # independent of the request's random numbers
        self._columns = [generator.choices(initial_tokens, k=num_levels) for _ in range(num_columns)]
        self._num_updates = [0] * num_columns  # target tokens pushed into each column

    def list_paths(self, depth: int) -> list[TokenPath]:
        """Return the path from below the root to the end of each column, up to the first deeper than `depth`."""
        chain: TokenPath = ()
        found: list[TokenPath] = []
        for j, column in enumerate(self._columns):
            chain += tuple(column[:1]) if j else ()
            path = chain + tuple(column[1:])
            if len(path) > depth:
                break
            found.append(path)
        return found

    def push(self, root: int, target_tokens: Sequence[int | None]) -> list[TokenPath]:
        """Push the target's token after each column, and return the new n-grams.

        A column drops its level 0; the root has advanced too, so the other levels keep their distance to it. A column
        without a target token was not in the tree and stays unchanged. An n-gram is returned once at most its first
        token is a random initial token.

        Args:
            root: last committed token before this step.
            target_tokens: the target's likeliest token after each column; None = not computed.
        """
        ngrams: list[TokenPath] = []
        for j, target_token in enumerate(target_tokens):
            if target_token is None:
                continue
            column = self._columns[j]
            self._num_updates[j] += 1
            if self._num_updates[j] >= len(column):
                ngrams.append((column[0] if j else root, *column[1:], target_token))
            self._columns[j] = [*column[1:], target_token]
        return ngrams


@dataclass
class LookaheadState:
    """Pool, window and committed tokens of one request."""

    pool: NgramPool
    ngram_size: int  # N
    from_text: bool
    tokens: list[int] = field(default_factory=list)
    window: LookaheadWindow | None = None
    pending_columns: tuple[TokenPath, ...] = ()  # columns in the tree under verification, below the last token

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            if self.from_text and len(self.tokens) >= self.ngram_size:
                self.pool.add(tuple(self.tokens[-self.ngram_size :]))

    def update_window(self, b: int, target_argmax: TargetArgmax | None) -> None:
        columns, self.pending_columns = self.pending_columns, ()
        if columns and target_argmax is not None and self.window is not None:
            for ngram in self.window.push(self.tokens[-1], [target_argmax.look_up(b, path) for path in columns]):
                self.pool.add(ngram)


class LookaheadDrafter(TokenDrafter[LookaheadState]):
    """Drafter of deterministic tokens, so verification is lossless for any pool and window.

    A request under `block` takes only chains: it has no window and one n-gram per step.
    """

    def __init__(self, config: Config, num_speculative_tokens: int) -> None:
        self.config = config
        self._ngram_size = min(config.ngram_size, num_speculative_tokens + 1)
        super().__init__(num_speculative_tokens, self._count_max_nodes(num_speculative_tokens))
        # Without a draft there is no column of the window in the tree.
        self.spec = replace(self.spec, needs_target_argmax=True, token_steps="drafted", reads_plain_commits=False)

    def _count_max_nodes(self, num_speculative_tokens: int) -> int:
        levels = self._ngram_size - 1
        columns = min(self.config.window, num_speculative_tokens - levels + 2)  # column j has depth j + levels - 1
        return columns * levels - 1 + self.config.guesses * levels

    def new_state(self) -> LookaheadState:
        return LookaheadState(NgramPool(self.config.guesses, self.config.pool), self._ngram_size, self.config.from_text)

    def draft_tokens(self, state: LookaheadState, request: Request, depth: int, budget: int) -> Draft:
        guesses = [path[:depth] for path in state.pool.get_continuations(state.tokens[-1])]
        if not request.spec.rule.takes_trees:
            return Draft.from_paths(guesses[:1], budget)
        if state.window is None:
            likely = request.spec.input_tokens  # tokens that are likely in the output
            state.window = LookaheadWindow(self.config.window, self._ngram_size - 1, likely)
        paths, state.pending_columns = _interleave(guesses, state.window.list_paths(depth), budget)
        return Draft.from_paths(paths, budget)

    def observe(self, batch: Batch, commit: Commit) -> None:
        for b, request in enumerate(batch.requests):
            state = self._states.get(request.slot)
            if state is not None:
                state.update_window(b, commit.target_argmax)


def _interleave(
    guesses: Sequence[TokenPath], columns: Sequence[TokenPath], budget: int
) -> tuple[list[TokenPath], tuple[TokenPath, ...]]:
    """Alternate n-grams and columns within a node budget.

    So drafts of any size fill the pool too, and the estimated gain of a node covers both kinds. A column is complete
    or absent, because only the target token after its end is used.

    Returns:
        All paths, and the columns among them.
    """
    paths: list[TokenPath] = []
    complete: list[TokenPath] = []
    nodes: set[TokenPath] = set()  # each node as its path
    remaining = list(reversed(columns))
    for ngram in [*guesses, *[()] * len(columns)]:
        nodes.update(_list_nodes(ngram))
        paths.append(ngram)
        if remaining:
            with_column = nodes.union(_list_nodes(remaining[-1]))
            if len(with_column) > budget:
                remaining = []
            else:
                nodes = with_column
                complete.append(remaining.pop())
                paths.append(complete[-1])
    return paths, tuple(complete)


def _list_nodes(path: TokenPath) -> Iterator[TokenPath]:
    return (path[:n] for n in range(1, len(path) + 1))
