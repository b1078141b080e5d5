"""Drafts copied from the prediction of a request: never another text, and few passes if the prediction is right.

Guards against a cursor that is lost for good after an edit, reading an output twice or from its middle after a
preemption, and draft nodes reserved for requests without a prediction.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foredraft import LLM, Completion, ForedraftError, Sampling
from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.drafter_factory import MAX_PREDICTION_TOKENS
from foredraft.drafters.aggressive.copy_cursor import FULL_MATCH, TOKENS_PER_MATCH, CopyCursor
from foredraft.drafters.aggressive.predicted_outputs import PredictedOutputDrafter
from foredraft.llm import MemoryLimits
from foredraft.request import Batch
from foredraft.request_options import RequestOptions
from foredraft.tree import Commit
from tests.support import tiny_models
from tests.support.requests import change_spec, make_request

GREEDY = Sampling(max_tokens=100, temperature=0, ignore_eos=True)
SEEDED = Sampling(max_tokens=100, temperature=0.8, top_p=0.95, seed=3, repetition_penalty=1.1, ignore_eos=True)
PROMPT = [5, 6, 7]
TEXT = random.Random(0).sample(range(1000), 400)  # no token twice


def generate(
    llm: LLM, sampling: Sampling, predictions: Sequence[Sequence[int]], prompts: Sequence[list[int]] | None = None
) -> list[Completion]:
    """Generate for all prompts in one batch."""
    options = [RequestOptions(prediction=prediction) for prediction in predictions]
    return llm.generate(prompts or [PROMPT] * len(predictions), sampling, options=options)


def count_passes(
    prediction: Sequence[int], output: Sequence[int], length: int = MAX_PREDICTION_TOKENS
) -> tuple[int, int]:
    """Count the passes for an output under greedy decoding, and the wrong draft tokens."""
    follower, at, passes, wrong = CopyCursor(tuple(prediction)), 0, 0, 0
    while at < len(output):
        follower.read(output[follower.num_read : at])
        draft = follower.draft(length)
        good = 0
        while good < len(draft) and at + good < len(output) and draft[good] == output[at + good]:
            good += 1
        passes, wrong, at = passes + 1, wrong + len(draft) - good, at + good + 1
    return passes, wrong


# position of an output in its prediction


def test_a_right_prediction_takes_the_fewest_passes():
    assert count_passes(TEXT, TEXT) == (-(-len(TEXT) // (MAX_PREDICTION_TOKENS + 1)), 0)


EDITS = {
    "a token exchanged": [*TEXT[:150], 5000, *TEXT[151:]],
    "tokens inserted": [*TEXT[:150], *range(5000, 5010), *TEXT[150:]],
    "tokens deleted": [*TEXT[:150], *TEXT[190:]],
    "tokens replaced": [*TEXT[:150], *range(5000, 5025), *TEXT[165:]],
    "a part moved to the end": [*TEXT[:100], *TEXT[150:], *TEXT[100:150]],
    "something before it": [*range(5000, 5020), *TEXT],
    "something behind it": [*TEXT, *range(5000, 5020)],
}


@pytest.mark.parametrize("name", EDITS)
def test_after_an_edit_the_prediction_is_found_again(name):
    """An edit costs its new tokens, which were not predicted, and a few passes around it."""
    output = EDITS[name]
    new = len(set(output) - set(TEXT))
    fewest = len(output) / (MAX_PREDICTION_TOKENS + 1)
    passes, _ = count_passes(TEXT, output)
    assert passes <= fewest + new + 9
    if not new:
        assert passes < len(output) / 6


def test_of_equal_matches_the_first_ahead_counts():
    """A block that stands three times, left in its second copy and taken up again behind the edit."""
    block = list(range(50))
    prediction = [*block, 100, *block, 101, *block, 102]
    output = [*block, 100, *block[:20], 900, *block[25:], 101, *block, 102]
    passes, wrong = count_passes(prediction, output)
    assert passes <= len(output) / (MAX_PREDICTION_TOKENS + 1) + 9
    assert wrong < 5 * MAX_PREDICTION_TOKENS


def test_weak_evidence_drafts_few_tokens():
    """A token that is frequent everywhere is no evidence."""
    prediction = [0, 1, 2] * 50
    follower = CopyCursor(tuple(prediction))
    follower.read([7, 8, 0])
    assert len(follower.draft(MAX_PREDICTION_TOKENS)) == TOKENS_PER_MATCH
    follower.read([1])
    assert follower.draft(MAX_PREDICTION_TOKENS) == (2, 0, 1, 2)


def test_a_wrong_prediction_drafts_little():
    output = list(range(2000, 2400))
    passes, wrong = count_passes(TEXT, output)
    assert passes == len(output)
    assert wrong <= MAX_PREDICTION_TOKENS + TOKENS_PER_MATCH * len(output)


def test_reading_costs_the_same_for_every_token():
    """Steps of the search, counted: they do not grow with the text."""
    looked = []
    for size in (1000, 4000):
        prediction = tuple(range(size))
        follower = CopyCursor(prediction)
        counted = _Counted()
        output = [token for i in range(0, size, 10) for token in (*range(i, i + 9), 10_000 + i)]
        for token in output:
            follower.read([token])
            if not isinstance(follower._ngram_positions, _Counted) and follower._ngram_positions:
                counted.update(follower._ngram_positions)
                follower._ngram_positions = counted
            follower.draft(4)
        assert len(follower.recent_tokens) == FULL_MATCH
        looked.append(counted.num_gets / size)
    assert looked[0] == pytest.approx(looked[1], rel=0.1)


class _Counted(dict):  # type: ignore[type-arg]
    num_gets = 0

    def get(self, *args):  # type: ignore[no-untyped-def]
        self.num_gets += 1
        return super().get(*args)


# texts


@pytest.mark.parametrize("mode", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("main", [None, "draft"])
def test_predictions_change_the_passes_and_not_the_text(mode, main):
    plain = tiny_models.plain().generate([PROMPT], mode)[0]
    llm = tiny_models.plain().with_drafter(None if main is None else tiny_models.draft_model(3), verify="match")
    llm.engine.length_policy = FixedLengthPolicy()  # the adaptive policies depend on the clock
    right, rng = plain.token_ids, random.Random(1)
    without = generate(llm, mode, [()])[0].stats.target_passes
    edited = [*right[:40], 96, *right[41:70], *right[75:]]
    for prediction in (right, edited, right[::-1], [rng.randrange(97) for _ in right], right[:7]):
        done = generate(llm, mode, [prediction])[0]
        assert done.token_ids == right
        if prediction is right:
            assert done.stats.target_passes < without / 3
            assert done.stats.acceptance_rate > 0.95
        elif prediction is edited:
            assert done.stats.target_passes < without / 2
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("main", [None, "draft"])
def test_what_a_prediction_drafted_is_counted_apart(main):
    output = tiny_models.plain().generate([PROMPT], GREEDY)[0].token_ids
    llm = tiny_models.plain().with_drafter(None if main is None else tiny_models.draft_model(3), verify="match")
    llm.engine.length_policy = FixedLengthPolicy()
    edited = [*output[:40], 96, *output[41:]]
    right, wrong, none = (c.stats for c in generate(llm, GREEDY, [output, edited, ()]))
    copied = len(output) - right.target_passes  # every pass adds one token of the target's own
    assert (right.num_predicted, right.num_predicted_accepted) == (copied, copied)
    assert 0 < wrong.num_predicted_accepted < wrong.num_predicted
    assert (none.num_predicted, none.num_predicted_accepted) == (0, 0)
    assert (none.num_drafted > 0) == (main is not None)
    for stats in (right, wrong) if main is None else ():
        assert (stats.num_predicted, stats.num_predicted_accepted) == (stats.num_drafted, stats.num_accepted)


def test_a_preempted_request_finds_its_place_again():
    limits = MemoryLimits(kv_tokens=140, page_size=4, max_batch=8, max_step_tokens=64)
    plain = tiny_models.plain().generate([PROMPT], GREEDY)[0]
    llm = tiny_models.limit_memory(tiny_models.plain(), None, limits, max_chunk=5)
    llm.engine.length_policy = FixedLengthPolicy()
    done = generate(llm, GREEDY, [plain.token_ids] * 3 + [()])
    assert llm.engine.scheduler.num_preempted > 0
    assert all(c.token_ids == plain.token_ids for c in done)
    assert sum(c.stats.num_accepted for c in done) > 200
    assert llm.engine.drafter.num_failures == 0


def test_no_room_is_reserved_without_predictions():
    """A step without predictions is the step it was: no budgets, no pages for drafts."""
    drafter = PredictedOutputDrafter(9)
    request = make_request(2, PROMPT, GREEDY)
    batch, commit = Batch((request,), (3,), (0,)), Commit.from_lists([[0]], [[1]])
    drafter.observe(batch, commit)
    assert drafter.spec.max_nodes == 0
    change_spec(request, prediction=(1, 2))
    drafter.observe(batch, commit)
    assert drafter.spec.max_nodes == 9
    drafter.forget([2])
    assert drafter.spec.max_nodes == 0
    assert tiny_models.plain().engine.drafter.spec.max_nodes == 0


def test_a_slot_that_another_request_got_is_read_from_its_own_beginning():
    drafter, commit = PredictedOutputDrafter(4), Commit.from_lists([[0]], [[1]])
    first = make_request(0, PROMPT, GREEDY, output=[1, 2], num_computed=4, prediction=(1, 2, 3))
    batch = Batch((first,), (1,), (4,))
    drafter.observe(batch, commit)
    assert drafter.propose(batch).tokens == [[2, 3]]
    other = make_request(0, PROMPT, GREEDY, output=[1], num_computed=3, prediction=(1, 2, 4, 5))
    batch = Batch((other,), (1,), (4,))
    drafter.observe(batch, commit)
    assert drafter.propose(batch).tokens == [[1, 2, 4, 5]]
    cut = replace(other, output=[])
    batch = Batch((cut,), (3,), (4,))
    cut.num_computed = 0
    drafter.observe(batch, commit)
    assert drafter.propose(batch).tokens == [[7, 1, 2, 4, 5]]


def test_a_prediction_of_other_tokens_is_refused():
    with pytest.raises(ForedraftError, match="prediction holds 97"):
        tiny_models.plain().prepare(PROMPT, GREEDY, RequestOptions(prediction=(5, 97)))
    with pytest.raises(ForedraftError, match="prediction must be text or token ids, got 7"):
        tiny_models.plain().prepare(PROMPT, GREEDY, RequestOptions(prediction=7))
    with pytest.raises(ForedraftError, match="no tokenizer: give the prediction as token ids"):
        tiny_models.plain().prepare(PROMPT, GREEDY, RequestOptions(prediction="the end"))
