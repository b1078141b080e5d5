"""The n-gram table against a dictionary that is slow and plain; pruning, rounding, saving, counts of a running text."""

import json
from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from foredraft import zoo
from foredraft.drafters.ngram_lm import kneser_ney
from foredraft.drafters.ngram_lm.counts import SequenceCounts
from foredraft.drafters.ngram_lm.table import NgramModel
from foredraft.errors import ForedraftError


class Reference:
    """Interpolated modified Kneser-Ney by the book; an n-gram rarer than min_count hands down its whole count."""

    def __init__(self, sequences, order, vocab_size, min_count=1, once=False):
        self.order, self.vocab_size = order, vocab_size
        raw = [Counter() for _ in range(order + 1)]
        for sequence in sequences:
            for n in range(1, order + 1):
                grams = [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
                raw[n].update(set(grams) if once else grams)
        self.kept = [{g for g, c in counts.items() if n == 1 or c >= min_count} for n, counts in enumerate(raw)]
        self.counts = [Counter() for _ in range(order)] + [raw[order]]
        for n in range(order, 1, -1):
            for gram, count in self.counts[n].items():
                self.counts[n - 1][gram[1:]] += 1 if gram in self.kept[n] else count
        self.discounts = [self._discounts(Counter(c.values())) for c in self.counts]
        self.after = defaultdict(dict)
        for n in range(1, order + 1):
            for gram, count in self.counts[n].items():
                self.after[gram[:-1]][gram[-1]] = count

    @staticmethod
    def _discounts(n):
        if not all(n[k] for k in (1, 2, 3, 4)):
            return [0, 0.5, 1.0, 1.5]
        y = n[1] / (n[1] + 2 * n[2])
        return [0, *(min(max(k - (k + 1) * y * n[k + 1] / n[k], 0), k) for k in (1, 2, 3))]

    def q(self, context):
        if context is None:
            return [1 / self.vocab_size] * self.vocab_size
        shorter = self.q(context[1:] if context else None)
        after = self.after.get(context, {})
        total = sum(after.values())
        if not total:
            return shorter
        n, share = len(context) + 1, {}
        for token, count in after.items():
            if (*context, token) in self.kept[n]:
                share[token] = max(count - self.discounts[n][min(count, 3)], 0) / total
        rest = 1 - sum(share.values())
        return [share.get(token, 0) + rest * shorter[token] for token in range(self.vocab_size)]


def text(size, vocab_size, seed):
    """Ids with structure: a random walk that repeats itself."""
    rng = np.random.default_rng(seed)
    ids = list(rng.zipf(1.5, size) % vocab_size)
    for _ in range(size // 20):
        start, to = rng.integers(0, size - 8, 2)
        ids[to : to + 8] = ids[start : start + 8]
    return [int(i) for i in ids[:size]]


def contexts(vocab_size, longest):
    for n in range(longest + 1):
        yield from product(range(vocab_size), repeat=n)


CORPORA = {
    "one sequence": [text(400, 6, 0)],
    "several sequences": [text(150, 6, 1), text(40, 6, 2), [3], [], [1, 2]],
    "one token": [[4]],
    "the same token": [[2] * 30],
    "too short for the order": [[1, 2, 3]],
}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(("min_count", "once"), [(1, False), (2, False), (1, True), (3, True)])
def test_a_table_equals_kneser_ney_by_dictionaries(name, order, min_count, once):
    ids = CORPORA[name]
    model = kneser_ney.train(ids, order, 6, min_count=min_count, once_per_sequence=once)
    reference = Reference(ids, order, 6, min_count, once)
    for context in contexts(6, min(order, 3)):
        q = model.compute_q(context)
        np.testing.assert_allclose(q, reference.q(context[-(order - 1) :] if order > 1 else ()), atol=1e-12)
        assert abs(q.sum() - 1) < 1e-12


def test_one_long_sequence_may_be_given_bare():
    ids = text(300, 6, 4)
    a, b = kneser_ney.train(np.array(ids), 3, 6), kneser_ney.train([ids], 3, 6)
    assert all(np.array_equal(a.compute_q(c), b.compute_q(c)) for c in contexts(6, 2))


@pytest.mark.parametrize("max_entries", [0, 1, 7, 40, 10**6])
def test_a_pruned_and_rounded_table_is_still_a_distribution(max_entries):
    full = kneser_ney.train(text(3000, 12, 5), 4, 12)
    pruned = kneser_ney.train(text(3000, 12, 5), 4, 12, max_entries=max_entries)
    assert pruned.num_entries == min(max_entries, full.num_entries)
    for model in (pruned, pruned.quantise_probs(16)):
        for context in contexts(12, 3):
            q = model.compute_q(context)
            assert abs(q.sum() - 1) < 1e-12
            assert (q > 0).all()


def markov(size, vocab_size, seed):
    """Ids of a chain of order two in which a few successors are common."""
    rng = np.random.default_rng(seed)
    distributions = rng.dirichlet([0.05] * vocab_size, (vocab_size, vocab_size)).cumsum(-1)
    ids = [0, 1]
    for u in rng.random(size - 2):
        ids.append(min(int(np.searchsorted(distributions[ids[-2], ids[-1]], u)), vocab_size - 1))
    return ids


def test_pruning_keeps_what_tells_most():
    ids = markov(20000, 30, 6)
    train, held = ids[:15000], ids[15000:]

    def loss(model):
        return -np.mean([np.log(model.compute_q(held[i - 3 : i])[held[i]]) for i in range(3, len(held))])

    full = kneser_ney.train(train, 4, 30)
    half = kneser_ney.train(train, 4, 30, max_entries=full.num_entries // 2)
    bare = kneser_ney.train(train, 4, 30, max_entries=0)
    # half of the entries have much less than half of the information
    assert loss(half) - loss(full) < 0.1 * (loss(bare) - loss(full))


def test_rounding_moves_no_share_up():
    model = kneser_ney.train(text(3000, 12, 5), 3, 12)
    for fine, coarse in zip(model.levels, model.quantise_probs(8).levels, strict=True):
        assert (coarse.probs <= fine.probs).all()
        assert len(np.unique(coarse.probs)) <= 8


@pytest.mark.parametrize("bad", [[], [[]], [-1, 2], [5, 6]])
def test_training_refuses_ids_it_cannot_learn_from(bad):
    with pytest.raises(ForedraftError, match=r"at least one token|outside the vocabulary"):
        kneser_ney.train(bad, 3, 6)


@pytest.fixture
def folder(tmp_path):
    kneser_ney.train(text(2000, 300, 7), 4, 300, max_entries=800).quantise_probs().save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["exact", "rounded", "empty", "uniform"])
def test_a_saved_table_comes_back_as_it_was(tmp_path, kind):
    model = kneser_ney.train(text(2000, 300, 7), 4, 300, max_entries=0 if kind == "empty" else 800)
    model = {"rounded": model.quantise_probs(), "uniform": NgramModel.make_uniform(300)}.get(kind, model)
    model.save(tmp_path)
    loaded = NgramModel.load(tmp_path, 300)
    assert loaded.num_entries == model.num_entries
    ids = text(300, 300, 8)
    for i in range(4, 300):
        assert np.array_equal(loaded.compute_q(ids[i - 4 : i]), model.compute_q(ids[i - 4 : i]))


def test_a_table_of_another_vocabulary_is_refused(folder):
    with pytest.raises(ForedraftError, match="is for 300 tokens and the target has 301"):
        NgramModel.load(folder, 301)


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(ForedraftError, match="no n-gram table can be read"):
        NgramModel.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ForedraftError, match="is no n-gram table"):
        NgramModel.load(tmp_path)


DAMAGE = {
    "a tensor is missing": lambda t: t.pop("2.first"),
    "base is short": lambda t: t.update(base=t["base"][:-1]),
    "base does not sum to one": lambda t: t.update(base=t["base"] * 2),
    "base has a zero": lambda t: t["base"].__setitem__(0, 0.0),
    "a level is short": lambda t: t.update({"1.first": t["1.first"][:-1]}),
    "children without a parent": lambda t: t.update({"2.children": t["2.children"][:-1]}),
    "entries cut off": lambda t: t.update({"3.tokens": t["3.tokens"][:-1]}),
    "signed sizes": lambda t: t.update({"1.sizes": -t["1.sizes"].astype(np.int64)}),
    "a token too large": lambda t: t["1.tokens"].__setitem__(0, 300),
    "shares above one": lambda t: t.update(levels=t["levels"] * 300),
    "a share that is no number": lambda t: t.update(levels=np.full_like(t["levels"], np.nan)),
    "codes past the levels": lambda t: t.update(levels=t["levels"][:2]),
    "a context twice": lambda t: t["1.first"].__setitem__(1, t["1.first"][0]),
    "a matrix": lambda t: t.update({"1.sizes": t["1.sizes"][None]}),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_table_is_refused_when_it_is_loaded(folder, what):
    tensors = {name: np.array(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    DAMAGE[what](tensors)
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ForedraftError, match=r"damaged|share a hash"):
        NgramModel.load(folder, 300)


def test_counts_learnt_piece_by_piece_equal_counts_learnt_at_once():
    ids = text(500, 8, 9)
    once, pieces = SequenceCounts(8, 5, 0.6, 100.0), SequenceCounts(8, 5, 0.6, 100.0)
    once.extend(ids)
    for i in range(0, 500, 7):
        pieces.extend(ids[i : i + 7])
    assert once._followers == pieces._followers
    assert np.array_equal(once._unigram_counts, pieces._unigram_counts)


@pytest.mark.parametrize("order", [1, 2, 5])
@pytest.mark.parametrize("with_table", [False, True])
def test_the_blend_with_a_running_text_is_a_distribution_and_equals_a_plain_recursion(order, with_table):
    model = kneser_ney.train(text(2000, 8, 10), 4, 8, max_entries=150) if with_table else NgramModel.make_uniform(8)
    counts = SequenceCounts(8, order, 0.6, 20.0)
    ids = text(120, 8, 11)
    counts.extend(ids)
    seen = count_with_exclusion(ids, order)
    for i in range(5, 120):
        q = model.compute_q(ids[i - 5 : i], counts)
        assert abs(q.sum() - 1) < 1e-12
        np.testing.assert_allclose(q, plain_blend(model, seen, tuple(ids[i - 5 : i]), 0.6, 20.0), atol=1e-12)


def count_with_exclusion(ids, order):
    """Count by context what follows; a token seen after a context is not counted in the shorter ones."""
    seen = defaultdict(Counter)
    for i, token in enumerate(ids):
        for n in range(min(order - 1, i), -1, -1):
            after = seen[tuple(ids[i - n : i])]
            is_known = n > 0 and token in after
            after[token] += 1
            if is_known:
                break
    return seen


def plain_blend(model, seen, context, discount, base_weight):
    if not context:
        after = seen.get((), Counter())
        counted = np.array([after[token] for token in range(model.vocab_size)])
        return (base_weight * model.base + counted) / (base_weight + counted.sum())
    q = plain_blend(model, seen, context[1:], discount, base_weight)
    if len(context) < model.order:
        # the table's own level is linear in the distribution of the shorter context: share + rest * distribution
        below, here = model.compute_q(context[1:]), model.compute_q(context)
        share, rest = table_entry(model, context)
        np.testing.assert_allclose(here, share + rest * below, atol=1e-12)
        q = share + rest * q
    if after := seen.get(context):
        counted = np.array([after[token] for token in range(model.vocab_size)], float)
        total, kinds = counted.sum(), (counted > 0).sum()
        q = (counted - discount * (counted > 0)) / total + discount * kinds / total * q
    return q


def table_entry(model, context):
    """Read the entry of a context from the table, by a walk of its trie from the empty context."""
    node = 0
    for level, token in zip(model.levels, context[::-1], strict=False):
        found = np.flatnonzero((level.parents == node) & (level.first_tokens == token))
        if not len(found):
            return np.zeros(model.vocab_size), 1.0
        node = int(found[0])
    if len(context) > len(model.levels):
        return np.zeros(model.vocab_size), 1.0
    level = model.levels[len(context) - 1]
    start = int(level.sizes[:node].sum())
    share = np.zeros(model.vocab_size)
    share[level.tokens[start : start + level.sizes[node]]] = level.probs[start : start + level.sizes[node]]
    return share, 1 - share.sum()


def test_a_model_is_no_table():
    """Guards the message: numpy would trip over bfloat16 tensors before the format is looked at."""
    with pytest.raises(ForedraftError, match="is no n-gram table: its format is 'llama'"):
        NgramModel.load(zoo.find_folder("draft"))
