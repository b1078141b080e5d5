"""Aggressive decoding: which source a request is copied from, and how an output close to it is followed.

Guards against copying from the wrong position or the wrong request, reading an output twice or from its middle, options
that no code reads, and drafts for `block` that are no chains.
"""

import random
from types import SimpleNamespace

import pytest

from foredraft import LLM, Sampling
from foredraft.drafters.aggressive import method as aggressive
from foredraft.drafters.aggressive.method import METHOD
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.source import EncoderSource
from foredraft.verification.rules import BLOCK, MATCH
from tests.support import tiny_models
from tests.support.requests import change_spec, make_request

SOURCE = tuple(random.Random(0).sample(range(1000), 300))  # no token twice
PROMPT = [1, 2, 3]


class Letters:
    """A token is a character."""

    def decode(self, ids):
        return "".join(map(chr, ids))

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens, "the part of a text is no text"
        return SimpleNamespace(input_ids=list(map(ord, text)))


def make_drafter(num_tokens=8, tokenizer=None, **options):
    context = DrafterContext(vocab_size=10_000, num_speculative_tokens=num_tokens, tokenizer=tokenizer)
    return aggressive.create(aggressive.Config(**options), context)


def request(output=(), slot=0, prompt=PROMPT, max_tokens=1000, prediction=(), **more):
    sampling = Sampling(max_tokens=max_tokens)
    r = make_request(slot, prompt, sampling, seed=1, output=output, prediction=prediction, **more)
    r.num_computed = r.num_tokens - 1
    return r


def propose_tree(drafter, r, budget=None):
    tree = drafter.propose(Batch((r,), (1,), (drafter.spec.max_nodes if budget is None else budget,)))
    assert tree.q is None
    return tree


def chain(drafter, r, budget=None):
    tree = propose_tree(drafter, r, budget)
    assert tree.is_chain
    return tree.tokens[0][1:]


def text(letters):
    return list(map(ord, letters))


def spell(tokens):
    return "".join(map(chr, tokens))


# sources


def test_the_encoders_input_is_copied_from_its_beginning():
    r = request(source=EncoderSource(SOURCE), prediction=(5, 6), prompt=[0])
    assert chain(make_drafter(), r) == list(SOURCE[:8])
    r.output = list(SOURCE[:9])
    assert chain(make_drafter(31), r) == list(SOURCE[9:40])


def test_auto_takes_what_there_is():
    prompt = [*SOURCE[:50], 2000]
    assert chain(make_drafter(), request(prediction=(5, 6), prompt=prompt)) == [5, 6]
    assert chain(make_drafter(), request(SOURCE[10:14], prompt=prompt)) == list(SOURCE[14:22])
    assert chain(make_drafter(), request(SOURCE[10:14], prompt=prompt, source=EncoderSource())) == list(SOURCE[14:22])


@pytest.mark.parametrize(
    ("source", "expected"), [("encoder", (7, 8)), ("prediction", (5, 6)), ("prompt", SOURCE[14:18])]
)
def test_a_source_that_is_named_is_the_one(source, expected):
    r = request(
        SOURCE[10:14] if source == "prompt" else (), prompt=SOURCE[:18], prediction=(5, 6), source=EncoderSource((7, 8))
    )
    assert chain(make_drafter(source=source), r) == list(expected)


@pytest.mark.parametrize("source", ["encoder", "prediction"])
def test_without_the_source_that_is_named_nothing_is_drafted(source):
    assert chain(make_drafter(source=source), request(SOURCE[10:14], prompt=SOURCE[:50])) == []


def test_the_last_tokens_of_the_prompt_find_the_beginning():
    prompt = text("<<a = 1>> again: <<")
    assert spell(chain(make_drafter(tokens_per_match=4), request(prompt=prompt))) == "a = 1>> "


BLOCKS = "Old:\n```python\nx = 0\n```\nNew:\n```py\ny = 1\nz = 2\n```\nMake it so:\n```py\n"


def test_the_last_fenced_block_that_is_closed_is_found_in_the_text():
    r = request(prompt=text(BLOCKS))
    assert spell(chain(make_drafter(40, Letters(), source="fenced"), r)) == "y = 1\nz = 2\n"


def test_a_prompt_without_a_block_is_copied_whole():
    r = request(text("bcde"), prompt=text("abcdefgh"))
    assert spell(chain(make_drafter(40, Letters(), source="fenced"), r)) == "fgh"


def test_marks_in_the_prompt_say_where_a_source_begins_and_ends():
    r = request(prompt=text("<a>one</a> and <a>two</a> fix it"))
    assert spell(chain(make_drafter(40, Letters(), start="<a>", end="</a>"), r)) == "two"
    assert spell(chain(make_drafter(40, Letters(), start="and ", end="!"), r)) == "<a>two</a> fix it"
    r = request(text("bcde"), prompt=text("abcdefgh"))
    assert spell(chain(make_drafter(40, Letters(), start="<a>"), r)) == "fgh"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "input"}, "unknown source 'input'; use one of auto, encoder"),
        ({"branches": 0}, "branches must be at least 1, got 0"),
        ({"tokens_per_match": 0}, "tokens_per_match must be at least 1"),
        ({"end": "</a>"}, "give both"),
        ({"start": ""}, "give both"),
        ({"start": "<a>", "source": "encoder"}, "the source is 'encoder'; leave one out"),
        ({"start": "<a>"}, "there is no tokenizer; use source='prompt'"),
        ({"source": "fenced"}, "there is no tokenizer; use source='prompt'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, message):
    with pytest.raises(ForedraftError, match=message):
        make_drafter(**options)


# following


def passes(output, source, length=31, **options):
    """Under a greedy distribution, and the most nodes of one draft."""
    drafter, r, count, most = (
        make_drafter(length, **options),
        request(source=EncoderSource(tuple(source)), prompt=[0]),
        0,
        0,
    )
    while len(r.output) < len(output):
        tree = propose_tree(drafter, r)
        node, at = 0, len(r.output)
        for token in output[at:]:
            r.output.append(token)
            below = [child for child in tree.children[0][node] if tree.tokens[0][child] == token]
            if not below:
                break
            node = below[0]
        r.num_computed = r.num_tokens - 1
        count, most = count + 1, max(most, tree.sizes[0] - 1)
    assert r.output == list(output)
    return count, most


EDITS = {
    "none": (list(SOURCE), 0),
    "exchanged": ([*SOURCE[:150], 5000, *SOURCE[151:]], 1),
    "one put in": ([*SOURCE[:150], 5000, *SOURCE[150:]], 1),
    "many put in": ([*SOURCE[:150], *range(5000, 5020), *SOURCE[150:]], 20),
    "one left out": ([*SOURCE[:150], *SOURCE[151:]], 0),
    "many left out": ([*SOURCE[:150], *SOURCE[190:]], 0),
    "two for one": ([*SOURCE[:150], 5000, *SOURCE[152:]], 1),
    "one for two": ([*SOURCE[:150], 5000, 5001, *SOURCE[151:]], 2),
    "moved": ([*SOURCE[:100], *SOURCE[150:], *SOURCE[100:150]], 0),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("branches", [1, 3])
def test_an_edit_costs_its_own_tokens_and_a_few_passes(name, branches):
    output, new = EDITS[name]
    count, most = passes(output, SOURCE, branches=branches)
    assert count <= -(-len(output) // 32) + new + (6 if name != "moved" else 12)
    assert most <= 31 * branches


def test_branches_need_fewer_passes_where_edits_differ_in_kind():
    chance = random.Random(2)
    source, output = [], []
    for token in chance.sample(range(3000), 900):
        kind = chance.random()
        source += [token] if kind > 0.04 else [] if kind < 0.02 else [5000 + token, 9000 - token]
        output.append(token)
    alone, _ = passes(output, source)
    three, _ = passes(output, source, branches=3)
    assert three < alone < len(output) / 4


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
def test_budget_room_and_draft_length_bound_a_draft(budget):
    drafter = make_drafter(31, branches=3)
    r = request(source=EncoderSource(SOURCE))
    assert len(chain(drafter, r, budget)) == budget
    r = request([5000], slot=1, source=EncoderSource(SOURCE))
    tree = propose_tree(drafter, r, budget)
    assert tree.sizes[0] - 1 == budget, "branches fill it"
    r = request(SOURCE[:3], slot=2, source=EncoderSource(SOURCE), max_tokens=6)
    assert chain(drafter, r) == list(SOURCE[3:5])
    assert chain(drafter, request(SOURCE[:5], slot=3, source=EncoderSource(SOURCE), max_tokens=6)) == []


def test_block_verification_gets_a_chain():
    drafter, r = make_drafter(branches=3), request([5000], source=EncoderSource(SOURCE), rule=BLOCK)
    assert len(chain(drafter, r)) == 4
    change_spec(r, rule=MATCH)
    assert not propose_tree(drafter, r).is_chain


def test_missed_steps_are_read_later():
    drafter, r = make_drafter(), request(source=EncoderSource(SOURCE))
    chain(drafter, r)
    r.output += SOURCE[:20]
    assert chain(drafter, r, 0) == []
    r.output += [5000, *SOURCE[21:30]]
    assert chain(drafter, r) == list(SOURCE[30:38])


def test_a_slot_begins_anew_with_another_request():
    drafter = make_drafter()
    assert chain(drafter, request(SOURCE[:9], source=EncoderSource(SOURCE))) == list(SOURCE[9:17])
    drafter.forget([0, 5])
    assert chain(drafter, request(source=EncoderSource((4, 5, 6)))) == [4, 5, 6]


# texts


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
def test_an_edited_text_takes_few_passes(verify):
    """The output of a real target, with edits in what it is copied from."""
    sampling = Sampling(max_tokens=100, temperature=0, ignore_eos=True)
    [plain] = tiny_models.plain().generate([PROMPT], sampling)
    right = plain.token_ids
    source = EncoderSource((*right[:40], 96, *right[41:70], *right[75:]))
    llm = tiny_models.plain().with_drafter("aggressive", num_speculative_tokens=31, verify=verify)
    transcripts = llm._prepare_requests([PROMPT], sampling)
    change_spec(transcripts[0].request, source=source)
    [done] = [delta.completion for delta in llm._shared.read(transcripts) if delta.completion is not None]
    assert done.token_ids == right
    assert done.stats.target_passes < 25
    assert llm.engine.drafter.num_failures == 0


def test_a_length_found_by_measurement_may_be_longer_than_that_of_other_methods() -> None:
    def longest(llm: LLM) -> int:
        return llm.drafter.spec.max_nodes  # type: ignore[union-attr]

    plain = tiny_models.plain()
    assert longest(plain.with_drafter("aggressive")) == METHOD.auto_tokens
    assert longest(plain.with_drafter({"method": "aggressive"})) == METHOD.auto_tokens
    assert longest(plain.with_drafter("ngram")) < METHOD.auto_tokens
    assert longest(plain.with_drafter("aggressive", num_speculative_tokens=5)) == 5
