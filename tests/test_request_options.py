"""Options of a request: every method of `LLM` that takes prompts takes them, and each request obeys its own."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest

from foredraft import LLM, Completion, ForedraftError, RequestOptions, Sampling, make_typical_rule
from foredraft.drafters.common.tree_builder import TreeOptions
from tests.support import tiny_models

PROMPTS = [[5, 6, 7, 8], [9, 8, 7]]
GREEDY = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
SEEDED = Sampling(max_tokens=24, temperature=0.9, seed=4, ignore_eos=True)
LOSSY, SILENT = RequestOptions(verify="typical"), RequestOptions(num_speculative_tokens=0)
Generate = Callable[[LLM, Sequence, Sampling, object], list[Completion]]


def collect(deltas) -> list[Completion]:
    done = {delta.index: delta.completion for delta in deltas if delta.completion}
    return [done[index] for index in sorted(done)]


def stream(llm, prompts, sampling, options) -> list[Completion]:
    return collect(llm.stream(prompts, sampling, options=options))


def astream(llm, prompts, sampling, options) -> list[Completion]:
    async def read() -> list[Completion]:
        async with aclosing(llm.astream(prompts, sampling, options=options)) as deltas:
            return collect([delta async for delta in deltas])

    return asyncio.run(read())


WAYS: dict[str, Generate] = {
    "generate": lambda llm, prompts, sampling, options: llm.generate(prompts, sampling, options=options),
    "stream": stream,
    "agenerate": lambda llm, prompts, sampling, options: asyncio.run(llm.agenerate(prompts, sampling, options=options)),
    "astream": astream,
}


def make_llm(length: int = 4, **options) -> LLM:
    return tiny_models.plain().with_drafter(tiny_models.draft_model(length, **options))


@pytest.fixture(scope="module")
def texting() -> LLM:
    """A model as large as the tokenizer's vocabulary, so that it takes and gives text."""
    tokenizer = copy.deepcopy(tiny_models.tokenizer())  # another test reads that it has no template
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return LLM(tiny_models.llama(len(tokenizer), seed=5), None, tokenizer=tokenizer, is_debug=True)


@pytest.mark.parametrize("name", WAYS)
def test_one_for_all_prompts_or_one_each(name: str) -> None:
    llm, generate = make_llm(), WAYS[name]
    plain = llm.generate(PROMPTS, GREEDY)
    assert all(c.stats.num_drafted and c.verification == "match" for c in plain)
    both = generate(llm, PROMPTS, GREEDY, SILENT)
    assert [c.stats.num_drafted for c in both] == [0, 0]
    assert [c.token_ids for c in both] == [c.token_ids for c in plain]
    first, second = generate(llm, PROMPTS, GREEDY, [SILENT, LOSSY])
    assert (first.stats.num_drafted, first.verification) == (0, "match")
    assert second.stats.num_drafted > 0
    assert second.verification == "typical"
    with pytest.raises(ForedraftError, match="2 prompts and 3 RequestOptions; give one RequestOptions or one each"):
        generate(llm, PROMPTS, GREEDY, [SILENT] * 3)
    with pytest.raises(ForedraftError, match="'typical' is no RequestOptions"):
        generate(llm, PROMPTS, GREEDY, "typical")


def test_a_chat_takes_them(texting: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("the end", "then")]
    named = texting.chat(conversations, GREEDY, options=[LOSSY, RequestOptions(verify="block")])
    assert [c.verification for c in named] == ["typical", "block"]
    assert texting.chat(conversations[0], GREEDY, options=LOSSY)[0].verification == "typical"


def test_the_rule_of_a_request_goes_before_that_of_the_llm() -> None:
    llm = make_llm().with_drafter(None, verify="typical")
    rule = make_typical_rule(0.5, 0.5)
    choices = [None, "auto", "auto", "reject", rule]
    sampling = [SEEDED, SEEDED, Sampling(max_tokens=2), SEEDED, SEEDED]
    options = [RequestOptions(verify=verify) for verify in choices]
    done = llm.generate([PROMPTS[0]] * 5, sampling, options=options)
    assert [c.verification for c in done] == ["typical", "match", "reject", "reject", "typical"]
    assert llm.prepare(PROMPTS[0], SEEDED, options[-1])[0].request.spec.rule is rule


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_a_batch_of_all_rules_and_two_thresholds_gives_each_request_its_own_output(sampling: Sampling) -> None:
    """Guards a rule or threshold of one request that reaches another one in its batch."""
    verify = ["match", "reject", "block", "typical", make_typical_rule(1e-6, 1e-6), make_typical_rule(0.95, 2.0)]
    llm = make_llm(6, options=TreeOptions(branching=(2, 2, 1)))
    options = [RequestOptions(verify=rule) for rule in verify]
    together = llm.generate([PROMPTS[0]] * len(verify), sampling, options=options)
    alone = [llm.generate(PROMPTS[0], sampling, options=one)[0] for one in options]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.verification for c in together] == ["match", "reject", "block", "typical", "typical", "typical"]
    if sampling is SEEDED:
        default, low, high = (c.stats for c in together[3:])
        assert low.target_passes < high.target_passes
        assert len({tuple(c.token_ids) for c in together}) >= 4, "too few outputs differ"
        assert default.num_drafted > 0


def test_none_in_a_list_stands_for_the_defaults() -> None:
    """Fault: None was no object of the class, and was let through unchecked: a None in a list of Sampling crashed."""
    llm = make_llm()
    one, two = llm.generate(PROMPTS, [None, GREEDY], options=[SILENT, None])
    assert one.stats.num_drafted == 0
    assert two.stats.num_drafted > 0
    assert (one.verification, two.verification) == ("block", "match")


def test_a_prediction_is_text_or_token_ids(texting: LLM) -> None:
    prompt = "the end of the"
    sampling = Sampling(max_tokens=40, temperature=0, ignore_eos=True)
    (plain,) = texting.generate(prompt, sampling)
    text = "the end of the then the end " + "these there " * 3
    ids = texting.tokenizer(text, add_special_tokens=False).input_ids
    as_text, as_list, as_tuple, empty = (
        texting.generate(prompt, sampling, options=RequestOptions(prediction=prediction, num_speculative_tokens=8))[0]
        for prediction in (text, ids, tuple(ids), "")
    )
    assert as_text.stats.num_predicted == as_list.stats.num_predicted == as_tuple.stats.num_predicted > 0
    assert empty.stats.num_predicted == 0
    assert {tuple(c.token_ids) for c in (as_text, as_list, as_tuple, empty)} == {tuple(plain.token_ids)}
    right = texting.generate(prompt, sampling, options=RequestOptions(0, 8, plain.token_ids))[0]
    assert right.stats.target_passes < plain.stats.target_passes / 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens takes a number, a range such as 2-6, .*; got -1"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens takes a number"),
        ({"num_speculative_tokens": "4:1"}, "the first batch size has to be 1"),
        ({"priority": "high"}, "priority must be of type int, got 'high'"),
        ({"salt": "tenant"}, "salt must be of type bytes, got 'tenant'"),
        ({"verify": "typicl"}, "unknown verification rule 'typicl'"),
        ({"prediction": [1, 97]}, "prediction holds 97, which is outside the vocabulary of 97 tokens"),
        ({"prediction": [1, "x"]}, "prediction must be text or token ids"),
        ({"prediction": [1.5, 2]}, "prediction must be text or token ids"),  # was the token 1
        ({"prediction": b"def"}, "prediction must be text or token ids"),  # was the tokens 100, 101, 102
        ({"num_speculative_tokens": True}, "num_speculative_tokens takes a number"),
        ({"priority": True}, "priority must be of type int, got True"),
        ({"is_traced": "no"}, "is_traced must be of type bool, got 'no'"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(fields: dict, words: str) -> None:
    with pytest.raises(ForedraftError, match=words) as error:
        tiny_models.plain().generate(PROMPTS, GREEDY, options=RequestOptions(**fields))
    assert "\n" not in str(error.value)
