"""Lookahead decoding: the window against a slow simulation of the paper, the pool's bounds, and the tree they make.

Guards against a window whose mask is not the paper's, n-grams put together from the wrong columns, argmaxes of another
tree or another step used by mistake, and budgets that starve the window.
"""

import random

import pytest

from foredraft import Sampling
from foredraft.drafters.lookahead import method as lookahead
from foredraft.drafters.lookahead.drafter import LookaheadWindow, NgramPool
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.tree import Commit, TargetArgmax, TokenTree
from foredraft.verification.rules import BLOCK
from tests.support import engine_fakes, tiny_models
from tests.support.engine_fakes import TableLM
from tests.support.requests import change_options, make_request

VOCAB = 23
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def make_drafter(num_tokens=8, **options):
    return lookahead.create(
        lookahead.Config(**options), DrafterContext(vocab_size=VOCAB, num_speculative_tokens=num_tokens)
    )


def request(output, slot=0, prompt=PROMPT, **more):
    made = make_request(slot, prompt, Sampling(max_tokens=more.pop("max_tokens", 1000)), seed=1, **more)
    made.output = list(output)
    made.num_computed = made.num_tokens - 1
    return made


def one(r, budget):
    return Batch((r,), (1,), (budget,))


def said(text):
    """Compute the next token of a toy target from the last three tokens and the length of the sequence."""
    return (7 * text[-1] + 3 * text[-2] + text[-3] * text[-1] + len(text) % 2) % VOCAB


def compute_argmax(tree, texts):
    """Compute the next token of the toy target after every node, which sees its ancestors alone."""
    tokens = [
        said(text + tree.get_draft_path(b, node)) for b, text in enumerate(texts) for node in range(tree.sizes[b])
    ]
    return TargetArgmax(tree, tokens)


def verify_greedily(tree, b, text):
    """Verify greedily: (nodes of the path, tokens after them)."""
    node, nodes, tokens = 0, [], []
    while True:
        nodes.append(node)
        tokens.append(said(text + tokens))
        below = [child for child in tree.children[b][node] if tree.tokens[b][child] == tokens[-1]]
        if not below:
            return nodes, tokens
        node = below[0]


def step(drafter, r, budget=None):
    """Run one pass of the toy target. Returns the tree and the number of new tokens."""
    batch = one(r, drafter.spec.max_nodes if budget is None else budget)
    tree = drafter.propose(batch)
    path, tokens = verify_greedily(tree, 0, r.tokens)
    drafter.observe(batch, Commit.from_lists([path], [tokens], target_argmax=compute_argmax(tree, [r.tokens])))
    r.output += tokens
    r.num_computed = r.num_tokens - 1
    return tree, len(tokens)


class Paper:
    """The algorithm of 2402.02057 as it is written there: a 2-D window, an attention mask, a pool of n-grams.

    `build_context` is the paper's mask as a sequence: level 0 up to the token's own column, then its column. One thing
    differs from the paper: an n-gram whose later tokens come from the random start is left out.
    """

    def __init__(self, columns, guesses):
        self.levels = [list(level) for level in zip(*columns, strict=True)]  # N - 1 levels of W tokens
        self.guesses, self.pool, self.steps = guesses, {}, 0

    def build_context(self, text, column, level):
        spine = self.levels[0][1 : column + 1]
        return [*text, *spine, *(self.levels[i][column] for i in range(1, level + 1))]

    def step(self, text):
        width, top = len(self.levels[0]), len(self.levels) - 1
        new = [said(self.build_context(text, j, top)) for j in range(width)]
        candidates = [list(rest) for rest in reversed(self.pool.get(text[-1], []))]
        best = max((self.count_matches(text, rest) for rest in candidates), default=0)
        tokens = []
        for _ in range(best + 1):
            tokens.append(said(text + tokens))
        self.steps += 1
        if self.steps > top:
            for j in range(width):
                first = text[-1] if j == 0 else self.levels[0][j]
                self.add(first, (*(self.levels[i][j] for i in range(1, top + 1)), new[j]))
        self.levels = [*self.levels[1:], new]
        return tokens

    def count_matches(self, text, rest):
        count = 0
        while count < len(rest) and said(text + rest[:count]) == rest[count]:
            count += 1
        return count

    def add(self, first, rest):
        entries = self.pool.setdefault(first, [])
        if rest in entries:
            entries.remove(rest)
        entries.append(rest)
        del entries[: -self.guesses]


@pytest.mark.parametrize(("window", "size", "guesses"), [(5, 4, 5), (1, 3, 2), (4, 2, 3), (3, 5, 1), (7, 3, 7)])
def test_the_window_and_the_pool_are_those_of_the_paper(window, size, guesses):
    """Pass by pass over a toy target. A trajectory that is accepted by itself (the paper does not try them) is the only
    way to be ahead of it, and is taken back here so that both stay at the same text."""
    drafter = make_drafter(20, window=window, ngram_size=size, guesses=guesses, from_text=False)
    r = request([7])
    drafter.propose(one(r, drafter.spec.max_nodes))
    sight = drafter._states[0]
    sight.pending_columns = ()
    paper = Paper(sight.window._columns, guesses)
    num_guessed = 0
    for _ in range(60):
        text = r.tokens
        batch = one(r, drafter.spec.max_nodes)
        tree = drafter.propose(batch)
        pool = [tuple(path) for path in sight.pool.get_continuations(text[-1])]
        assert pool == list(reversed(paper.pool.get(text[-1], [])))
        for path in pool:
            assert compute_argmax(tree, [text]).look_up(0, path) == said([*text, *path]), "a guess is not in the tree"
        columns = [paper.build_context(text, j, size - 2)[len(text) :] for j in range(window)]
        for path in columns:
            assert compute_argmax(tree, [text]).look_up(0, path) == said([*text, *path]), "a column is not in the tree"
        assert tree.sizes[0] - 1 == len({tuple(p[:n]) for p in [*pool, *columns] for n in range(1, len(p) + 1)})
        drafter.observe(batch, Commit.from_lists([[0]], [[said(text)]], target_argmax=compute_argmax(tree, [text])))
        tokens = paper.step(text)
        num_guessed += len(tokens) - 1
        r.output += tokens
        r.num_computed = r.num_tokens - 1
        assert [list(column) for column in zip(*paper.levels, strict=True)] == sight.window._columns
    assert len(sight.pool) == sum(map(len, paper.pool.values()))
    assert num_guessed > 0, "no n-gram ever fitted"


def test_a_token_of_the_window_sees_what_the_mask_of_the_paper_shows_it():
    """Level by level: ancestors of (column j, level l) are the root, level 0 up to j, and column j up to l."""
    window = LookaheadWindow(4, 3, range(100, 200))
    columns = window._columns
    tree = TokenTree.from_lists(*_build_lists(window.list_paths(99)))
    for j, column in enumerate(columns):
        spine = [c[0] for c in columns[1 : j + 1]]
        for level in range(1, 3):
            node = tree.tokens[0].index(column[level])
            assert tree.get_draft_path(0, node) == [*spine, *column[1 : level + 1]]
            assert tree.depths[0][node] == j + level, "its place in the text"
    assert tree.sizes[0] == 1 + 3 + 4 * 2


def _build_lists(paths):
    from foredraft.drafters.draft import Draft

    draft = Draft.from_paths(paths, 99)
    return [[0, *draft.tokens]], [[-1, *draft.parents]]


def test_n_grams_with_tokens_of_chance_are_not_kept():
    window = LookaheadWindow(2, 3, [50])
    assert window.push(9, [1, 2]) == []
    assert window.push(8, [3, 4]) == []
    assert window.push(7, [5, 6]) == [(7, 1, 3, 5), (50, 2, 4, 6)]
    assert window.push(6, [None, 8]) == [(2, 4, 6, 8)], "a column that was not answered stays"
    assert window.push(5, [9]) == [(5, 3, 5, 9)]
    assert window.list_paths(99) == [(5, 9), (4, 6, 8)]


def test_the_pool_keeps_the_newest_of_each_token_and_no_more_than_it_may():
    pool = NgramPool(max_per_token=2, max_ngrams=5)
    for gram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]:
        pool.add(gram)
    assert pool.get_continuations(1) == [(6, 7), (2, 3)]
    for first in (2, 3):
        pool.add((first, 0, 0))
        pool.add((first, 1, 1))
    assert len(pool) == 5
    assert pool.get_continuations(1) == [(6, 7)], "the oldest goes first"
    pool.add((4, 0, 0))
    assert pool.get_continuations(2) == [(1, 1)], "a token that was looked up is newer than one that was not"
    assert pool.get_continuations(1) == [(6, 7)]
    assert pool.get_continuations(99) == []


def test_a_pool_of_many_random_grams_is_bounded_and_counts_right():
    chance, pool = random.Random(0), NgramPool(max_per_token=3, max_ngrams=40)
    for _ in range(2000):
        pool.add((chance.randrange(30), chance.randrange(4), chance.randrange(4)))
        assert len(pool) == sum(len(rests) for rests in pool._by_first.values()) <= 40
        assert max(len(rests) for rests in pool._by_first.values()) <= 3


# trees


@pytest.mark.parametrize("budget", range(1, 36))
def test_a_budget_is_shared_by_guesses_and_whole_columns(budget):
    drafter = make_drafter(guesses=5, from_text=False)
    r = request([7])
    drafter.propose(one(r, 1))
    sight = drafter._states[0]
    sight.window._columns = [[30 + 3 * j + i for i in range(3)] for j in range(5)]
    for k in range(5):
        sight.pool.add((7, 10 + k, 11, 12))
    tree = drafter.propose(one(r, budget))
    size = tree.sizes[0] - 1
    assert size == min(budget, drafter.spec.max_nodes) or size + 3 > budget, "room for a column was left"
    assert size <= budget
    assert tree.tokens[0][1] == 14, "the newest guess comes first"
    for path in sight.pending_columns:
        assert compute_argmax(tree, [r.tokens]).look_up(0, path) is not None
    assert abs(3 * len(sight.pending_columns) - size / 2) <= 4 or budget > 28, "columns and guesses in equal parts"


def test_no_node_is_deeper_than_the_draft_length_or_the_room():
    for num_tokens in range(1, 9):
        drafter, r = make_drafter(num_tokens), request([7])
        for _ in range(30):
            tree, _ = step(drafter, r)
            assert max(tree.depths[0]) <= num_tokens
            assert tree.sizes[0] - 1 <= drafter.spec.max_nodes
    drafter, r = make_drafter(8), request([7], max_tokens=4)
    tree = drafter.propose(one(r, 40))
    assert max(tree.depths[0]) == r.max_draft_depth == 2
    assert drafter.propose(one(request([7], slot=1, max_tokens=2), 40)).sizes == [1]


def test_num_nodes_is_what_a_full_tree_has():
    for options in ({}, {"window": 2, "guesses": 1}, {"ngram_size": 2, "window": 9}, {"window": 40}):
        for num_tokens in (1, 2, 5, 12):
            drafter, r = make_drafter(num_tokens, from_text=False, **options), request([7])
            drafter.propose(one(r, 1))
            sight, size = drafter._states[0], drafter._ngram_size
            for k in range(drafter.config.guesses):
                sight.pool.add((7, *range(1000 + 10 * k, 1000 + 10 * k + size - 1)))
            sight.window._columns = [[200 + 10 * j + i for i in range(size - 1)] for j in range(drafter.config.window)]
            assert drafter.propose(one(r, 10_000)).sizes == [1 + drafter.spec.max_nodes]


def test_block_verification_gets_a_chain():
    drafter, r = make_drafter(), request([7, 8, 9, 10, 7, 8, 9, 11, 7], rule=BLOCK)
    assert drafter.propose(one(r, 30)).is_chain
    assert drafter.propose(one(r, 30)).tokens == [[7, 8, 9, 11]]


# answers


def test_answers_are_found_by_path_whatever_stands_beside_it():
    tree = TokenTree.from_lists([[5, 1, 2, 1, 3], [6]], [[-1, 0, 0, 0, 3], [-1]]).prepend_committed(
        [[9, 9], [7]], [[9, 5], [6]]
    )
    tokens = list(range(100, 106))
    answers = TargetArgmax(tree, tokens)
    assert answers.look_up(0, ()) == 100
    assert answers.look_up(0, (2,)) == 102
    assert answers.look_up(0, (1, 3)) == 104, "below the second of equal siblings"
    assert answers.look_up(0, (3,)) is None
    assert answers.look_up(1, ()) == 105
    assert TargetArgmax(tree, [-1] * 6).look_up(0, ()) is None, "a row that is no distribution"
    unscored = TokenTree.from_lists([[5]], [[-1]]).prepend_committed([[]], [[6]])
    assert TargetArgmax(unscored, []).look_up(0, ()) is None


def test_the_engine_makes_answers_for_drafters_that_want_them_and_no_others():
    target = TableLM.from_seed(VOCAB)
    for wants in (True, False):
        drafter = engine_fakes.ScriptedDrafter(lambda batch: engine_fakes.draft_greedily(target.perturb(2.0), batch))
        drafter.needs_target_argmax = wants
        engine_fakes.run(
            engine_fakes.make_engine(target, drafter),
            [engine_fakes.make_transcript([1, 2], Sampling(max_tokens=30, temperature=0))],
        )
        assert all((commit.target_argmax is not None) == wants for commit in drafter.observed)
        for commit in drafter.observed if wants else ():
            tree, path = commit.target_argmax.tree, commit.paths[0]
            if tree.roots[0] < tree.sizes[0]:
                tokens = commit.tokens[0][tree.roots[0] :]
                drafted = tokens[: len(path) - tree.roots[0] - 1]
                got = [commit.target_argmax.look_up(0, drafted[:n]) for n in range(len(drafted) + 1)]
                assert got == tokens[: len(got)], "where a node survived the answer is what was drawn"
                assert len(commit.target_argmax.tokens) == tree.row_offsets[-1]


def test_answers_that_never_come_leave_the_window_alone():
    """A step that raised, a tree of another drafter, or a host that makes no answers."""
    drafter, r = make_drafter(), request([7])
    drafter.propose(one(r, 40))
    sight = drafter._states[0]
    before = [list(column) for column in sight.window._columns]
    drafter.observe(one(r, 40), Commit.from_lists([[0]], [[5]]))
    assert sight.window._columns == before
    drafter.propose(one(r, 40))
    other = TokenTree.from_lists([[7, 1]], [[-1, 0]])
    drafter.observe(one(r, 40), Commit.from_lists([[0]], [[5]], target_argmax=TargetArgmax(other, [5, 6])))
    assert sight.window._columns == before
    drafter.observe(
        one(r, 0), Commit.from_lists([[0]], [[5]], target_argmax=TargetArgmax(drafter.propose(one(r, 40)), [5] * 99))
    )
    assert sight.pending_columns == ()


def test_a_slot_begins_anew_with_another_request():
    drafter, r = make_drafter(), request([7])
    for _ in range(10):
        step(drafter, r)
    first = step(drafter, request([7], slot=1))[0].tokens
    drafter.forget([0])
    assert step(drafter, request([7]))[0].tokens == first


# texts


def test_texts_are_guessed_by_the_window_alone():
    """Greedy text of a toy target that never repeats what it was given: only the trajectories can know it."""
    drafter, r = make_drafter(20, from_text=False), request([7])
    passes = 0
    while len(r.output) < 200:
        step(drafter, r)
        passes += 1
    text = [*r.spec.prompt, 7]
    while len(text) < r.num_tokens:
        text.append(said(text))
    assert r.tokens == text
    assert passes < 0.8 * len(r.output)


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_the_engine_keeps_the_window_through_preemption_and_steps_without_a_budget(verify):
    llm = tiny_models.plain().with_drafter(
        lookahead.create(
            lookahead.Config(from_text=False), DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=8)
        ),
        verify=verify,
    )
    sampling = Sampling(max_tokens=60, temperature=0, ignore_eos=True)
    expected = tiny_models.plain().generate([PROMPT, [9, 9]], sampling)
    transcripts = llm._prepare_requests([PROMPT, [9, 9]], sampling)
    for transcript in transcripts:
        llm.engine.add(transcript)
    count = 0
    while llm.engine.has_work:
        for transcript in transcripts:
            length = (None, 0, 1, 7, None, None)[count % 6]
            change_options(transcript.request, num_speculative_tokens=length)
        llm.engine.step()
        count += 1
    assert [t.request.output for t in transcripts] == [c.token_ids for c in expected]
    assert llm.engine.drafter.num_failures == 0
    assert sum(t.build_stats().num_accepted for t in transcripts) > 0


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("ngram_size", 1), ("guesses", 0), ("pool", 0)])
def test_numbers_that_make_no_window_are_refused(name, value):
    with pytest.raises(ForedraftError, match=f"{name} must be at least"):
        make_drafter(**{name: value})
