"""Latency: order of the runs, what is counted, and the fields of a row; methods and costs from a command line."""

from dataclasses import dataclass, field

import pytest

from foredraft import Completion, ForedraftError, Sampling
from foredraft.bench import latency, methods, verify_cost
from foredraft.bench.grow import BUILT_IN_LABEL, ORIGIN_FIELD
from foredraft.bench.latency_report import build_category_table, build_speed_table
from foredraft.bench.pass_limits import PassLimits
from foredraft.bench.questions import Question
from foredraft.outputs import Stats
from tests.support import tiny_models

GREEDY = Sampling(max_tokens=4, temperature=0)
QUESTIONS = (Question(("the end",), "a"), Question(("and", "then"), "b"))
KNOWN = ("draft_model", "ngram")


@dataclass
class Clock:
    """Time passes only while a generator works."""

    now: float = 0.0
    log: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Timed:
    """Answers with fixed tokens, each of which takes `pace` seconds."""

    name: str
    clock: Clock
    pace: float
    tokens: tuple[int, ...] = (1, 2, 3, 4)
    error: str | None = None
    verification: str = "match"

    def generate(self, prompts, sampling):
        (prompt,) = prompts
        self.clock.log.append((self.name, tuple(prompt), sampling.max_tokens))
        self.clock.now += self.pace * len(self.tokens)
        stats = Stats(len(self.tokens), 2, 6, 3, (2, 1), 2, 0.5, 1.0)
        reason = "error" if self.error else "length"
        return [
            Completion("xy", list(self.tokens), reason, stats=stats, error=self.error, verification=self.verification)
        ]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(latency, "time", made)
    return made


def test_a_prompt_may_be_computed_before_its_time_counts(clock):
    """Fault: prompts of a large model took as long as its output, and hid half of every speed-up."""
    plain = Timed("plain", clock, 1.0)
    outcome = latency.measure(
        {"plain": plain}, QUESTIONS[:1], tiny_models.tokenizer(), 256, GREEDY, 2, lambda name: None, cached_after=3
    )
    assert [max_tokens for _, _, max_tokens in clock.log] == [4, 3, 4, 3, 4], (
        "warm-up, then each round after its prompt"
    )
    assert outcome.runs["plain"][0].times == (4.0, 4.0)
    assert len(outcome.runs["plain"][0].completions) == 2


def measure_rows(clock: Clock, *others: Timed, sampling=GREEDY, rounds=1, context=256, asked=QUESTIONS):
    generators = {"plain": Timed("plain", clock, 0.4)} | {other.name: other for other in others}
    outcome = latency.measure(
        generators, asked, tiny_models.tokenizer(), context, sampling, rounds, lambda name: None
    )  # fmt: skip
    return outcome, latency.build_rows(outcome, sampling)


def test_all_warm_up_and_every_prompt_goes_through_all_in_rotating_order(clock):
    measure_rows(clock, Timed("ngram", clock, 0.1))
    assert [name for name, _, _ in clock.log] == [
        "plain", "ngram",  # warm-up
        "plain", "ngram",
        "ngram", "plain",
        "plain", "ngram",  # the second turn of the second question
    ]  # fmt: skip


def test_the_figures_of_a_row(clock):
    _, (plain, fast) = measure_rows(clock, Timed("ngram", clock, 0.1))
    assert (plain.speed_up, fast.speed_up) == (1.0, pytest.approx(4.0))
    assert (plain.tokens_per_second, fast.tokens_per_second) == (pytest.approx(2.5), pytest.approx(10.0))
    assert (fast.acceptance_length, fast.acceptance_rate) == (2.0, 0.5)
    assert fast.per_position == (1.0, 0.5)
    assert fast.draft_share == pytest.approx(0.5 / 0.4)
    assert (fast.target_passes, fast.num_tokens, fast.prompts) == (6, 12, 3)
    assert (plain.agreement, fast.agreement) == ("3/3", "3/3")


def test_a_text_that_differs_is_counted_and_does_not_change_later_prompts(clock):
    _, (_, other) = measure_rows(clock, Timed("ngram", clock, 0.1, tokens=(1, 2, 9, 4)))
    assert other.agreement == "0/3"
    prompts = {name: [p for n, p, _ in clock.log if n == name] for name in ("plain", "ngram")}
    assert prompts["plain"] == prompts["ngram"]
    assert prompts["ngram"][-1][len(prompts["ngram"][-2]) :][:4] == (1, 2, 3, 4)


def test_texts_of_other_lengths_are_compared_by_the_token(clock):
    _, (_, short) = measure_rows(clock, Timed("ngram", clock, 0.4, tokens=(1,)))
    assert short.speed_up == pytest.approx(1.0)


def test_rounds_count_by_their_median(clock):
    slow_once = Timed("ngram", clock, 0.1)
    paces = iter([0.1, 0.1, 5.0, 0.1])  # the first is the warm-up
    slow_once.generate = lambda p, s, g=slow_once.generate: (setattr(slow_once, "pace", next(paces)), g(p, s))[1]
    _, (_, row) = measure_rows(clock, slow_once, rounds=3, asked=QUESTIONS[:1])
    assert row.speed_up == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("sampling", "rule", "agreement"),
    [
        (Sampling(max_tokens=4, temperature=1.0), "reject", "sampled"),
        (Sampling(max_tokens=4, temperature=1.0, seed=3), "match", "3/3"),
        (Sampling(max_tokens=4, temperature=1.0, seed=3), "reject", "sampled"),
        (GREEDY, "typical", "3/3"),
    ],
)
def test_texts_that_are_drawn_freely_are_not_called_different(clock, sampling, rule, agreement):
    _, (_, row) = measure_rows(clock, Timed("ngram", clock, 0.1, verification=rule), sampling=sampling)
    assert row.agreement == agreement


def test_questions_beyond_the_context_are_left_out_and_named(clock):
    long = Question(("the end " * 100,), "long")
    outcome, rows = measure_rows(clock, asked=(QUESTIONS[0], long), context=64)
    assert outcome.too_long == ["long"]
    assert rows[0].prompts == 1
    with pytest.raises(ForedraftError, match="no prompt fits"):
        measure_rows(clock, asked=(long,), context=64)


def test_a_method_that_fails_ends_the_run_by_name(clock):
    with pytest.raises(ForedraftError, match="ngram failed: not finite"):
        measure_rows(clock, Timed("ngram", clock, 0.1, error="not finite"))


def test_methods_are_read_with_their_settings():
    found = methods.parse_all(["ngram:8, draft_model:2:model=some/path", "ngram:branches=2:4,ngram:8"], KNOWN)
    assert [m.label for m in found] == ["ngram:8", "draft_model:2:model=some/path", "ngram:branches=2:4"]
    assert [m.spec for m in found] == [
        {"method": "ngram", "num_speculative_tokens": 8},
        {"method": "draft_model", "num_speculative_tokens": 2, "model": "some/path"},
        {"method": "ngram", "branches": 2, "num_speculative_tokens": 4},
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nope:3", "unknown method 'nope'; use one of: draft_model, ngram"),
        ("ngram:0", "'0' is no draft length"),
        ("ngram:many", "'many' is no draft length"),
        ("ngram:", "'' is no draft length"),
    ],
)
def test_a_method_that_makes_no_sense_is_refused(text, complaint):
    with pytest.raises(ForedraftError, match=complaint):
        methods.parse_all([text], KNOWN)


def test_what_drafts_for_the_built_in_target_drafts_for_what_was_grown_from_it():
    grown = type("Config", (), {ORIGIN_FIELD: f"{BUILT_IN_LABEL} (20.5M parameters)"})()
    other = type("Config", (), {ORIGIN_FIELD: "another model"})()
    (asked,) = methods.parse_all(["draft_model"], KNOWN)
    assert "model" in next(methods.attach_models([asked], grown, None)).spec
    assert "model" not in next(methods.attach_models([asked], other, None)).spec
    assert next(methods.attach_models([asked], grown, "mine")).spec["model"] == "mine"
    (own,) = methods.parse_all(["draft_model:model=its"], KNOWN)
    assert next(methods.attach_models([own], grown, "mine")).spec["model"] == "its"


def test_rows_to_time_always_hold_a_single_one():
    assert verify_cost.parse_rows("8,2, 4,2") == [1, 2, 4, 8]
    for text in ("", "a", "0", "-1,2", "1;2"):
        with pytest.raises(ForedraftError, match="--verify-cost takes numbers"):
            verify_cost.parse_rows(text)


def test_passes_of_the_sizes_asked_for_are_timed_after_the_context():
    llm = tiny_models.plain()
    costs = verify_cost.measure_costs(llm, [1, 3], 40, repeats=2)
    assert [c.rows for c in costs] == [1, 3]
    assert costs[0].ratio == 1.0
    assert costs[1].ratio == pytest.approx(costs[1].seconds / costs[0].seconds)
    assert llm.generate([[5, 6]], GREEDY)  # the KV memory of this LLM is unchanged
    with pytest.raises(ForedraftError, match="do not fit the model's context of 256"):
        verify_cost.measure_costs(llm, [1, 3], 254)


def test_figures_by_category_count_its_questions_alone(clock):
    asked = [
        Question(("the end",), "a", "writing"),
        Question(("and", "then"), "b", "qa"),
        Question(("the end",), "c", "writing"),
        Question(("the",), "d"),
    ]
    outcome, rows = measure_rows(clock, Timed("ngram", clock, 0.1), asked=asked)
    found = latency.build_category_rows(outcome, GREEDY)
    assert {name: [row.prompts for row in part] for name, part in found.items()} == {"writing": [2, 2], "qa": [2, 2]}
    assert rows[1].prompts == 5
    table = build_category_table(found)
    assert table.header == ("category", "prompts", "ngram")
    assert table.rows[0] == ("writing", "2", "4.00x (2.00)")


def test_questions_without_categories_make_no_such_table(clock):
    outcome, _ = measure_rows(clock)
    assert build_category_table(latency.build_category_rows(outcome, GREEDY)).rows == ()


def test_rows_have_the_limit_of_their_passes(clock):
    generators = {"plain": Timed("plain", clock, 0.1), "fast": Timed("fast", clock, 0.05)}
    outcome = latency.measure(generators, QUESTIONS, tiny_models.tokenizer(), 64, GREEDY, 1, lambda _: None)
    assert all(row.limit_tokens_per_second is None for row in latency.build_rows(outcome, GREEDY))
    limits = PassLimits(weight_bytes=10**9, num_weights=10**6, gigabytes_per_second=10.0, gigaflops=100.0)
    rows = latency.build_rows(outcome, GREEDY, limits)
    assert [row.limit_tokens_per_second for row in rows] == [pytest.approx(2 / 0.1)] * 2  # 4 tokens in 2 passes
    assert [cells[2] for cells in build_speed_table(rows).rows] == ["20 (50 %)", "20 (100 %)"]


def test_the_machine_is_measured_before_and_after_the_prompts(clock):
    class Meter:
        moments = 0

        def measure(self) -> None:
            self.moments += 1

    meter, questions = Meter(), QUESTIONS * (latency.LIMITS_INTERVAL // 2 + 1)
    latency.measure(
        {"plain": Timed("plain", clock, 0.1)}, questions, tiny_models.tokenizer(), 64, GREEDY, 1, lambda _: None,
        meter=meter,
    )  # fmt: skip
    assert meter.moments == 3
