"""Accepted grammars, the tokens that may follow a path, and the validity of finished texts under every drafter.

Guards against masks of another position, a matcher that drafts have moved, siblings that disturb each other, ids that
end a text in the middle of a value, rows after impossible drafts that fail their request, and hostile schemas.
"""

import builtins
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from foredraft import LLM, Completion, ForedraftError, Sampling
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.engine.transcript import Transcript
from foredraft.llm import MemoryLimits
from foredraft.request import Batch
from foredraft.sampling import grammar as grammar_module
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.grammar import Grammar, GrammarCompiler
from foredraft.sampling.grammar_checks import MAX_DEPTH
from foredraft.sampling.grammar_cursor import GrammarCursor
from foredraft.sampling.grammar_matcher import GrammarMatcher
from foredraft.sampling.grammar_tokens import GrammarTokens
from foredraft.tree import TokenTree
from foredraft.verification.registry import RULES
from tests.support import tiny_models
from tests.support.engine_fakes import ScriptedDrafter, TableLM, make_drafter, make_engine, make_transcript, run
from tests.support.grammar_cases import (
    END,
    NINE_TOKENS,
    TIGHT,
    is_valid,
    make_ascii_llm,
    make_grammars,
    make_nine_token_tokenizer,
    make_schema,
)
from tests.support.method_cases import METHOD_CASES, pair_cases_with_rules
from tests.support.tiny_vision import make_tokenizer

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [44, 45, 46], [70] * 6, [(7 * i) % 31 + 4 for i in range(40)]]
LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless]
FIXED = {
    "json": Grammar.json_schema(
        TIGHT
        | {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "grey"]}, "minItems": 1, "maxItems": 4},
                "n": {"type": "integer", "minimum": 0, "maximum": 5000},
            },
            "required": ["name", "tags", "n"],
            "additionalProperties": False,
        }
    ),
    "regex": Grammar.regex("(ab|abc|[0-9]{2,5}-)+x"),
    "choice": Grammar.choice(["yes", "yesterday", "no", "none"]),
}
LETTERS = str.maketrans("01", "ab")
GREEDY = Sampling(max_tokens=60, temperature=0)
SEEDED = Sampling(max_tokens=60, temperature=0.8, top_p=0.95, seed=4, repetition_penalty=1.1)


def find_allowed(matcher: GrammarMatcher, output: Sequence[int] = (), drafted: Sequence[int] = ()) -> set[str] | None:
    mask = matcher.find_allowed(output, drafted).mask
    return None if mask is None else {NINE_TOKENS[i] for i in mask.nonzero().flatten().tolist()}


def matcher_of(
    pattern: str, eos: Sequence[int] = (END,), stops: Sequence[int] = (), vocab_size: int = 9
) -> GrammarMatcher:
    return make_grammars(vocab_size).create_matcher(Grammar.regex(pattern), eos, stops)


# what a grammar may be


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def _endless() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["not"] = schema
    return schema


def _bushy() -> dict[str, Any]:
    """2^40 values that are forty objects."""
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"a": schema, "b": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar("xml", "<a/>"), "unknown kind"),
        (lambda: Grammar.json_schema("{"), "must be JSON"),
        (lambda: Grammar.json_schema("[]"), "is an object, got list"),
        (lambda: Grammar.json_schema([]), "is an object, got list"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "no JSON"),
        (lambda: Grammar.json_schema(_deep(70)), "nested"),
        (lambda: Grammar.json_schema("[" * 60_000), "nested"),
        (lambda: Grammar.json_schema(json.dumps(_deep(300))), "nested"),
        (lambda: Grammar.json_schema(json.dumps(_deep(MAX_DEPTH))), "nested"),
        (lambda: Grammar("choice", "[" * 65 + "]" * 65), "nested"),
        (lambda: Grammar.json_schema('"' + '\\"' * 60_000 + "\\"), "must be JSON"),
        (lambda: Grammar.json_schema(_endless()), "nested"),
        (lambda: Grammar.json_schema(_bushy()), "more than 65,536 values"),
        (lambda: Grammar.json_schema({"const": "x" * 200_000}), "bytes"),
        (lambda: Grammar.regex("a" * 200_000), "bytes"),
        (lambda: Grammar.regex(""), "is empty"),
        (lambda: Grammar("json_object", "{}"), "takes no source"),
        (lambda: Grammar.lark(b"start: "), "is a string"),
        (lambda: Grammar.choice([]), "one string or more"),
        (lambda: Grammar.choice("yes"), "got one string"),
        (lambda: Grammar.choice(["a", 1]), "one string or more"),
        (lambda: Grammar.choice(["a", ""]), "empty string"),
        (lambda: Grammar.choice([f"{i}" for i in range(5000)]), "at most 4,096"),
        (lambda: Grammar.choice(["a", "\ud800"]), "surrogate"),
        (lambda: Grammar.json_schema({}, whitespace="none"), "unknown whitespace"),
        (lambda: Grammar.regex("a{100000}"), "100,000 times.*at most 16,384"),
        (lambda: Grammar.regex("(a{1000}){1000}"), "1,000,000 times"),
        (lambda: Grammar.regex("((a{100})?b{2,9}){300}"), "30,000 times"),
        (lambda: Grammar.regex("a{99999999999999999999}"), "times"),
        (lambda: Grammar.lark('start: (("a" ~ 1..300){300})'), "90,000 times"),
        (lambda: Grammar.lark("start: T\nT: /(a{1000}){1000}/"), "1,000,000 times"),
        (lambda: Grammar.json_schema({"items": {"pattern": "(a{1000}){1000}"}}), "pattern repeats.*1,000,000"),
        (lambda: Grammar.json_schema({"patternProperties": {"a{20000}": {}}}), "pattern repeats.*20,000"),
        (lambda: Grammar.json_schema({"type": "integer", "multipleOf": 9_999_991}), "multipleOf 9999991"),
        (lambda: Sampling(grammar="[0-9]+"), "must be a Grammar"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_the_depth_of_a_schema_is_counted_without_the_brackets_of_its_strings():
    deepest, inside = _deep(MAX_DEPTH - 1), {"const": '\\"' + "[{" * 100}
    for schema in (deepest, inside):
        assert json.loads(Grammar.json_schema(json.dumps(schema)).source) == schema


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"type": "objekt"}), "objekt"),
        (Grammar.json_schema({"type": "object", "contains": {}}), "contains"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (Grammar.json_schema({"$ref": "#"}), "no text follows"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex("(" * 20_000 + "a" + ")" * 20_000), "cannot be used"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.lark("start: nowhere"), "nowhere"),
        (Grammar.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (Grammar.choice(["é"]), "no text follows the choice grammar"),
        (Grammar.lark("start: " + " | ".join(f'"c{i:012b}"' for i in range(2500)).translate(LETTERS)), "max is 2000"),
    ],
)
def test_what_the_compiler_refuses_is_said_before_anything_runs(grammar, said):
    """`choice`: the vocabulary of nine tokens has no bytes of it."""
    with pytest.raises(ForedraftError, match=said):
        make_grammars().create_matcher(grammar, (END,))


def test_without_llguidance_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **more):
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ForedraftError, match=r"pip install 'foredraft\[grammar\]'"):
        GrammarCompiler(make_nine_token_tokenizer(), 9).create_matcher(Grammar.json_object(), (END,))


def test_a_model_without_a_readable_tokenizer_takes_no_grammar():
    with pytest.raises(ForedraftError, match="needs a tokenizer"):
        tiny_models.plain().generate([[5]], Sampling(grammar=Grammar.json_object()))
    with pytest.raises(ForedraftError, match="fast tokenizer"):
        GrammarCompiler(object(), 9).create_matcher(Grammar.json_object(), ())
    words = make_tokenizer("<image>")  # has no decoder
    with pytest.raises(ForedraftError, match="llguidance does not read this tokenizer"):
        GrammarCompiler(words, len(words)).create_matcher(Grammar.json_object(), ())


@pytest.mark.parametrize(
    "made",
    [
        Grammar.regex("[ab]{0,100000}c"),
        Grammar.regex(r"[^\]a\\]{50000}"),
        Grammar.regex(r"(\(a\){300}){300}|a[{9999999}]b"),
        Grammar.lark('start: "a{99999999}" // "a"{99999999}'),
    ],
)
def test_repeats_that_cost_nothing_or_are_none_are_taken(made):
    """A class is counted by the lexer; strings, comments and escapes repeat nothing."""
    assert made.source


@pytest.mark.parametrize("source", ["[" * 60_000, "{1" + " " * 60_000, "\\p{" * 20_000, "(" * 60_000, "/" * 60_000])
def test_no_source_is_read_more_than_once(source):
    """Guards patterns that take quadratic time: minutes, of sources this long."""
    for kind in ("regex", "lark"):
        Grammar(kind, source)


HARD_WORDS = [
    "yes",
    "yesterday",
    "a b\n\tc",
    "\\d+",
    "[x]",
    "é",
    "日本",
    "\x00z",
    "/*",
    "<|end|>",
    "a{3}",
    "#c",
    "&&",
    "^$",
]


@cache
def llama_grammars() -> GrammarCompiler:
    return GrammarCompiler(make_ascii_llm().tokenizer, make_ascii_llm().target.vocab_size)


def encode(text: str) -> list[int]:
    return list(make_ascii_llm().tokenizer(text, add_special_tokens=False).input_ids)


def test_choices_are_taken_letter_by_letter():
    """The choices have characters that are special in regular expressions, and some are prefixes of others."""
    words = HARD_WORDS + [chr(i) + "Z" for i in range(32, 127)]
    sayable = [word for word in words if make_ascii_llm().tokenizer.decode(encode(word)) == word]
    assert len(sayable) > 90
    grammar = Grammar.choice(sayable)
    for word in sayable:
        matcher, ids = (
            llama_grammars().create_matcher(grammar, (make_ascii_llm().tokenizer.eos_token_id,)),
            encode(word),
        )
        for i, token in enumerate(ids):
            mask = matcher.find_allowed(ids[:i]).mask
            assert mask is not None
            assert mask[token], word
        mask = matcher.find_allowed(ids).mask
        assert mask is not None
        assert mask[make_ascii_llm().tokenizer.eos_token_id]
        assert not mask[encode("Q")[0]]


def test_as_many_choices_as_are_promised_work_with_and_without_drafts():
    """An alternation of 2,000 is too much for llguidance: such lists were taken and failed at their first token."""
    chosen = [f"c{i}" for i in range(4096)]
    params = [replace(s, grammar=Grammar.choice(chosen)) for s in (GREEDY, SEEDED, replace(SEEDED, seed=5))]
    plain = make_ascii_llm().generate([PROMPTS[0]] * 3, params)
    drafted = make_ascii_llm().with_drafter(tiny_models.draft_model(4)).generate([PROMPTS[0]] * 3, params)
    assert list_results(plain) == list_results(drafted)
    assert all(c.finish_reason == "stop" and c.text in chosen for c in plain)


# what may follow a path


def test_what_may_follow_is_said_after_the_output_and_the_path():
    matcher = matcher_of("abc+|b{2}")
    assert find_allowed(matcher) == {"a", "ab", "b"}
    assert find_allowed(matcher, (), [0]) == {"b", "bc"}
    assert find_allowed(matcher, (), [3]) == {"c", "cc"}
    assert find_allowed(matcher, (), [0, 4]) == {"c", "cc", "<end>"}
    assert find_allowed(matcher, (), [1]) == {"b"}
    assert find_allowed(matcher, [3]) == {"c", "cc"}
    assert find_allowed(matcher, [3], [2, 5]) == {"c", "cc", "<end>"}
    assert find_allowed(matcher, [3, 5]) == {"c", "cc", "<end>"}


def test_siblings_and_repeated_questions_leave_the_state_alone():
    """Random walks over the paths of a grammar, in any order, against a fresh matcher for every question."""
    rng = random.Random(0)
    for _ in range(12):
        pattern = "".join(rng.choice(["a", "b+", "(ab|c)", "(bc)?", "[ac]{1,3}"]) for _ in range(4))
        matcher, output = matcher_of(pattern), []
        while True:
            for _ in range(12):
                drafted: list[int] = []
                while rng.random() < 0.8:
                    options = find_allowed(matcher_of(pattern), output, drafted)
                    known = options is not None and rng.random() < 0.8
                    drafted.append(NINE_TOKENS.index(rng.choice(sorted(options))) if known else rng.randrange(9))
                assert find_allowed(matcher, output, drafted) == find_allowed(matcher_of(pattern), output, drafted)
            token = NINE_TOKENS.index(rng.choice(sorted(find_allowed(matcher, output))))
            if token == END:
                break
            output = [*output, token]


def test_every_node_of_a_step_costs_one_mask():
    matcher = matcher_of("[abc]+")
    made = matcher.num_masks
    for _ in range(3):
        for path in ([], [0], [0, 1], [0, 2], [1]):
            matcher.find_allowed([0], path)
    assert matcher.num_masks - made == 5


def test_no_row_after_an_impossible_draft_is_masked_or_fails():
    """Forbidden tokens, the end and what comes after it, and ids without a text, of a model with more ids."""
    matcher = matcher_of("ab", vocab_size=14)
    for path in ([2], [2, 0], [3, 8], [3, 8, 0], [13], [9], [0, 12, 1]):
        assert find_allowed(matcher, (), path) is None
    assert find_allowed(matcher, (), [3]) == {"<end>"}
    probs = distribution(
        torch.randn(2, 14), SEEDED_GRAMMAR, [TokenHistory(draft_path=p, matcher=matcher) for p in ([2], [13])]
    )
    assert probs.isfinite().all()
    assert (probs.sum(-1) - 1).abs().max() < 1e-5


SEEDED_GRAMMAR = Sampling(grammar=Grammar.regex("ab"))


def test_a_model_with_fewer_ids_than_the_tokenizer():
    matcher = matcher_of("(ab|c)+", vocab_size=3)
    assert find_allowed(matcher) == {"a", "c"}
    assert find_allowed(matcher, (), [0, 1]) == {"a", "c"}  # the end is no id of this model


def test_a_text_ends_only_where_the_grammar_is_satisfied():
    """This holds if the end is a token of the grammar, too, and for the ids of the request."""
    matcher = matcher_of("a[abc]b", eos=(2, END), stops=(6,))
    assert find_allowed(matcher, (), [0]) == {"a", "b", "ab", "bc"} - {"bc"}
    assert find_allowed(matcher, [0, 1], [1]) == {"c", "<end>", "{"}
    own = matcher_of("a[abc]b", eos=(), stops=(2,))
    assert "c" in find_allowed(own, (), [0])


def test_a_finished_grammar_leaves_the_end_and_nothing_else():
    """Holds under min_tokens, bad words and allowed ids. Without an end token everything is allowed: the engine ends
    the text there."""
    sampling = Sampling(grammar=Grammar.regex("ab"), min_tokens=5, allowed_token_ids=(0, 1), bad_words=((8,),))
    history = TokenHistory(output=[3], end_ids=(END,), bad_words=((8,),), matcher=matcher_of("ab"))
    assert distribution(torch.randn(1, 9), sampling, [history])[0].tolist() == [0.0] * 8 + [1.0]
    endless = matcher_of("ab", eos=())
    assert endless.find_allowed([3]).is_finished
    assert endless.find_allowed([3]).mask is None
    assert not matcher_of("ab", eos=()).find_allowed([0]).is_finished


def test_an_output_that_was_cut_back_is_followed_again():
    matcher = matcher_of("(ab|c)+")
    assert find_allowed(matcher, [0, 1, 2]) == {"a", "ab", "c", "cc", "<end>"}
    assert find_allowed(matcher, [0]) == {"b"} | {"bc"}
    assert find_allowed(matcher, [0, 4]) == {"a", "ab", "c", "cc", "<end>"}


def test_a_grammar_without_a_matcher_is_refused():
    with pytest.raises(ValueError, match="matcher"):
        distribution(torch.randn(1, 9), SEEDED_GRAMMAR)


def test_forbidden_tokens_keep_a_nan():
    logits = torch.zeros(1, 9)
    logits[0, 5] = torch.nan
    assert distribution(logits, SEEDED_GRAMMAR, [TokenHistory(matcher=matcher_of("ab"))]).isnan().all()


# texts


def test_random_schemas_give_valid_texts():
    """240 of them, with and without drafts, over 320 tokens (and 20 ids without a text)."""
    model = tiny_models.llama(340)
    plain = LLM(model, None, tokenizer=tiny_models.tokenizer(), is_debug=True)
    drafted = plain.with_drafter(tiny_models.draft_model(4, model=tiny_models.perturb(model, 0.04)))
    rng = random.Random(1)
    found = [Grammar.json_schema(TIGHT | make_schema(rng)) for _ in range(240)]
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 9))] for _ in found]
    params = [
        Sampling(max_tokens=200, temperature=rng.choice([0.0, 0.7, 1.3]), seed=rng.choice([None, i]), grammar=g)
        for i, g in enumerate(found)
    ]
    num_accepted = 0
    for llm in (plain, drafted):
        done = llm.generate(prompts, params)
        ended = [i for i, c in enumerate(done) if c.finish_reason == "stop"]
        assert len(ended) > 230
        assert {c.finish_reason for c in done} <= {"stop", "length"}
        for i in ended:
            assert is_valid(done[i].text, found[i]), (done[i].text, found[i].source)
        num_accepted += sum(c.stats.num_accepted for c in done)
    assert num_accepted > 500
    assert drafted.engine.drafter.num_failures == 0


@pytest.mark.parametrize("name", FIXED)
def test_without_the_grammar_the_text_is_another_and_invalid(name):
    done = make_ascii_llm().generate(PROMPTS, SEEDED)
    under = make_ascii_llm().generate(PROMPTS, replace(SEEDED, grammar=FIXED[name]))
    assert [c.text for c in done] != [c.text for c in under]
    assert not any(is_valid(c.text, FIXED[name]) for c in done)
    assert any(is_valid(c.text, FIXED[name]) for c in under)


def make_batch(is_seeded: bool) -> tuple[list[list[int]], list[Sampling]]:
    """Make a batch of several grammars: greedy, or greedy and seeded ones of several samples."""
    modes = [GREEDY, replace(SEEDED, n=2)] if is_seeded else [GREEDY]
    params = [replace(s, grammar=g) for s in modes for g in FIXED.values()]
    return [prompt for prompt in PROMPTS for _ in params], params * len(PROMPTS)


def list_results(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.finish_reason) for c in completions]


@cache
def alone(is_seeded: bool) -> list[tuple[list[int], str]]:
    return list_results(make_ascii_llm().generate(*make_batch(is_seeded)))


@pytest.mark.parametrize(("name", "rule"), pair_cases_with_rules(LOSSLESS))
def test_text_is_the_same_with_and_without_a_drafter(name, rule):
    """Greedy under every rule, seeds under `match`."""
    accepted = rejected = 0
    for num_tokens in (1, 4) if rule == "match" else (4,):
        llm = make_ascii_llm().with_drafter(METHOD_CASES[name].make(num_tokens), verify=rule)
        done = llm.generate(*make_batch(rule == "match"))
        assert list_results(done) == alone(rule == "match")
        assert llm.engine.drafter.num_failures == 0
        accepted += sum(c.stats.num_accepted for c in done)
        rejected += sum(c.stats.num_drafted - c.stats.num_accepted for c in done)
    assert accepted > 0
    assert rejected > 0


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_sampled_texts_under_every_rule_are_valid(rule):
    llm = make_ascii_llm().with_drafter(tiny_models.draft_model(4), verify=rule)
    params = [Sampling(max_tokens=90, n=8, grammar=g) for g in FIXED.values()]
    done = llm.generate([PROMPTS[0]] * len(params), params)
    ended = [c for c in done if c.finish_reason == "stop"]
    assert len(ended) > len(done) // 2
    assert all(is_valid(c.text, list(FIXED.values())[i // 8]) for i, c in enumerate(done) if c in ended)
    assert len({c.text for c in done}) > 8
    assert sum(c.stats.num_accepted for c in done) > 0


def test_preemption_changes_no_text():
    limits = MemoryLimits(kv_tokens=76, page_size=4, max_batch=8, max_step_tokens=48)
    params = [replace(s, grammar=FIXED["json"]) for s in (GREEDY, replace(SEEDED, n=4))]
    alone = make_ascii_llm().generate([PROMPTS[0]] * len(params), params)
    llm = tiny_models.limit_memory(make_ascii_llm(), tiny_models.draft_model(4), limits, max_chunk=5)
    done = llm.generate([PROMPTS[0]] * len(params), params)
    assert llm.engine.scheduler.num_preempted > 0
    assert [c.token_ids for c in done] == [c.token_ids for c in alone]


def test_log_probabilities_are_those_of_the_distribution():
    """A choice that is forced has probability one."""
    sampling = replace(GREEDY, grammar=Grammar.choice(["zyx"]), logprobs=2)
    for llm in (make_ascii_llm(), make_ascii_llm().with_drafter(tiny_models.draft_model(4))):
        done = llm.generate([PROMPTS[0]], sampling)[0]
        assert done.text == "zyx"
        assert len(done.logprobs) == len(done.token_ids) == 4


@pytest.mark.parametrize("drafter", [None, "draft"])
def test_a_request_without_an_end_stops_where_its_grammar_does(drafter):
    llm = make_ascii_llm() if drafter is None else make_ascii_llm().with_drafter(tiny_models.draft_model(5))
    sampling = replace(SEEDED, ignore_eos=True, grammar=FIXED["json"], n=6, max_tokens=90)
    done = llm.generate([PROMPTS[0]], sampling)
    assert {c.finish_reason for c in done} == {"stop"}
    assert all(is_valid(c.text, FIXED["json"]) for c in done)
    assert {make_ascii_llm().tokenizer.decode(c.token_ids[-1]) for c in done} == {"}"}


def test_stop_strings_and_lengths_still_cut_a_text_short():
    sampling = replace(GREEDY, grammar=Grammar.choice(["zyxwv"]))
    assert make_ascii_llm().generate([PROMPTS[0]], replace(sampling, stop=("x",)))[0].text == "zy"
    short = make_ascii_llm().generate([PROMPTS[0]], replace(sampling, max_tokens=3))[0]
    assert (short.text, short.finish_reason) == ("zyx", "length")


# drafts that break the grammar


def _nonsense(seed: int) -> ScriptedDrafter:
    rng = random.Random(seed)

    def propose(batch: Batch) -> TokenTree:
        drafts = []
        for budget in batch.granted_nodes:
            tokens = [rng.randrange(9) for _ in range(budget)]
            drafts.append(Draft(tuple(tokens), tuple(rng.randint(0, i) for i in range(budget))))
        return to_token_tree(batch, dict(enumerate(drafts)))

    return ScriptedDrafter(propose, max_nodes=6)


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_guesses_that_the_grammar_forbids_never_survive(rule):
    """Random trees: most of them hold forbidden tokens, ends and tokens after ends."""
    lm = TableLM.from_seed(9, seed=3)
    kinds = make_grammars()
    grammar = Grammar.regex("(a(bc)+|c{2,4}|[{]b*[}])+")
    texts = {}
    for name, drafter in {"plain": None, "drafted": _nonsense(1)}.items():
        transcripts = []
        for i in range(40):
            sampling = Sampling(max_tokens=30, seed=i, temperature=0.8, grammar=grammar)
            made = make_transcript([i % 8], sampling, i, make_nine_token_tokenizer(), rule, (END,))
            made.request.matcher = kinds.create_matcher(grammar, (END,))
            transcripts.append(made)
        done = [c for c, _ in run(make_engine(lm, drafter), transcripts)]
        assert all(is_valid(c.text, grammar) for c in done if c.finish_reason == "stop")
        assert sum(c.finish_reason == "stop" for c in done) > 20
        assert not any(c.finish_reason == "error" for c in done)
        texts[name] = [c.token_ids for c in done]
        accepted = sum(c.stats.num_accepted for c in done)
    assert accepted > 0
    if rule == "match":
        assert texts["plain"] == texts["drafted"]


# errors


class GivesUp:
    """llguidance's matcher of (a|b|c|ab|bc|cc)*, too much for it after some tokens."""

    def __init__(self, most: int) -> None:
        self.most, self.num_tokens = most, 0

    def deep_copy(self) -> "GivesUp":
        return GivesUp(self.most)

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        self.num_tokens += len(tokens)
        return 0 if self.is_error() else len(tokens)

    def rollback(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    def compute_bitmask(self) -> bytes:
        return bytes([0b00111111, 0])

    def is_error(self) -> bool:
        return self.num_tokens > self.most

    def get_error(self) -> str:
        return f"too many states (limit {self.most})\nand more"


def make_failing_matcher(most: int) -> GrammarMatcher:
    return GrammarMatcher(GrammarCursor(GivesUp(most), GrammarTokens(9, 9, frozenset([END]), frozenset([END]))))


def gives_up(index: int, most: int) -> Transcript:
    grammar = Grammar.regex("([abc]|ab|bc|cc)*")
    made = make_transcript(
        [1], Sampling(max_tokens=20, seed=index, grammar=grammar), index, make_nine_token_tokenizer(), "match", (END,)
    )
    made.request.matcher = make_failing_matcher(most)
    return made


def test_a_matcher_that_fails_ends_its_own_request_alone():
    """The error repeats llguidance's message; it does not blame the text."""
    lm = TableLM.from_seed(9, seed=3)
    fine = make_transcript(
        [1],
        Sampling(max_tokens=60, seed=3, grammar=Grammar.regex("[abc]{9}")),
        1,
        make_nine_token_tokenizer(),
        "match",
        [END],
    )
    fine.request.matcher = make_grammars().create_matcher(Grammar.regex("[abc]{9}"), (END,))
    engine = make_engine(lm, make_drafter(lm.perturb(0.3), 3))
    (first, _), (second, _) = run(engine, [gives_up(0, 6), fine])
    assert first.finish_reason == "error"
    assert first.error == "the grammar cannot be followed any further: too many states (limit 6)"
    assert second.finish_reason == "stop"
    assert len(second.text) == 9
    assert engine.drafter.num_failures == 0


def test_a_grammar_that_fails_on_its_way_gives_the_same_text_with_and_without_drafts():
    """The draft looks ahead to the point where llguidance fails: the text before it is emitted all the same."""
    lm, found = TableLM.from_seed(9, seed=3), []
    for drafter in (None, make_drafter(lm.perturb(0.3), 3), _nonsense(2)):
        done = [c for c, _ in run(make_engine(lm, drafter), [gives_up(i, i) for i in range(12)])]
        found.append([(c.token_ids, c.finish_reason, c.error) for c in done])
    assert found[0] == found[1] == found[2]
    assert [len(tokens) for tokens, _, _ in found[0]] == list(range(1, 13))
    assert {reason for _, reason, _ in found[0]} == {"error"}


def test_the_limits_of_a_matcher_count_its_text_alone():
    """llguidance counts queries about earlier drafts, too; a text must not fail because of its drafts."""
    matcher = make_failing_matcher(6)
    matcher.find_allowed([])
    matcher.cursor._matcher.most = 1
    assert matcher.find_allowed([0, 1]).error is None
    assert matcher.find_allowed([0] * 7).error == "too many states (limit 6)"


def test_compiled_grammars_are_kept_within_limits(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 3)
    kinds = GrammarCompiler(make_nine_token_tokenizer(), 9)
    for i in range(1, 9):
        kinds.create_matcher(Grammar.regex(f"a{{{i}}}"), (END,))
    assert len(kinds._compiled) == 3


def test_compiled_grammars_are_kept_within_bytes():
    kinds = GrammarCompiler(make_nine_token_tokenizer(), 9)
    for i in range(9):
        kinds.create_matcher(Grammar.regex("|".join(["ab" * 50 + "c" * (i + 1)] * 900)), (END,))
    assert 1 < len(kinds._compiled) < 9
    assert sum(len(grammar.source) for grammar in kinds._compiled) <= grammar_module.MAX_COMPILED_BYTES


# white space

SCHEMAS = {
    "boolean": {"x": {"type": "boolean"}},
    "two": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"type": "string", "maxLength": 20}},
    "array": {"a": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}, "c": {"const": None}},
}


@cache
def builtin() -> LLM:
    return LLM(drafter=None)


def schema_with(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize("whitespace", ["bounded", "compact"])
def test_json_of_a_small_model_ends(whitespace):
    """Guards {"x": and then blanks up to max_tokens."""
    schemas = [schema_with(properties) for properties in SCHEMAS.values()]
    params = [Sampling(max_tokens=160, temperature=0, grammar=Grammar.json_schema(s, whitespace)) for s in schemas]
    for prompt in ("def f(x):\n    return ", "Answer in JSON:\n"):
        for schema, done in zip(schemas, builtin().generate([prompt] * len(params), params), strict=True):
            assert done.finish_reason == "stop", done.text
            value = json.loads(done.text)
            assert list(value) == schema["required"]
            if whitespace == "compact":
                assert done.text == json.dumps(value, separators=(",", ":"), ensure_ascii=False) or "\\" in done.text


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a":1,"b":[true]}', {"bounded", "compact", "flexible"}),
        ('{"a": 1, "b": [true, false]}', {"bounded", "flexible"}),
        (json.dumps({"a": 1, "b": [True, False]}, indent=2), {"bounded", "flexible"}),
        (json.dumps({"a": 1, "b": [True]}, indent="\t"), {"bounded", "flexible"}),
        ('{"a":  1,"b":[]}', {"flexible"}),
        ('{"a":1,\n\n"b":[]}', {"flexible"}),
    ],
)
def test_white_space_is_what_it_is_said_to_be(text, taken):
    inner = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}}
    kinds = GrammarCompiler(builtin().tokenizer, builtin().target.vocab_size)
    ids = builtin().tokenizer(text, add_special_tokens=False).input_ids
    for whitespace in ("bounded", "compact", "flexible"):
        matcher = kinds.create_matcher(Grammar.json_schema(schema_with(inner), whitespace), builtin().end_ids)
        masks = [matcher.find_allowed(ids[:i]).mask for i in range(len(ids))]
        follows = all(mask is not None and bool(mask[token]) for mask, token in zip(masks, ids, strict=True))
        assert follows == (whitespace in taken), (whitespace, text)


def test_a_schemas_own_white_space_goes_first():
    made = GrammarCompiler(make_nine_token_tokenizer(), 9)
    tight = made.create_matcher(Grammar.json_object(whitespace="compact"), (END,))
    assert find_allowed(tight, [6]) == {"}"}
