"""End of an output and its statistics: the engine against the one-token-at-a-time oracle.

Guards against an EOS inside an accepted path that is ignored, a cap checked before a stop, tokens after the stop that
are counted or leak, a stop string that straddles tokens, half a character at the end, logprobs of the wrong row or
number, and min_tokens counted in steps.
"""

import itertools
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from foredraft import Completion, Sampling
from foredraft.outputs import Delta
from tests.support import engine_fakes, engine_oracle, tiny_models
from tests.support.engine_fakes import PERIOD, TableLM

EOS = 0
PER_BATCH = 16


@cache
def lm() -> TableLM:
    """Make a model with a likely successor for every token in text of multi-byte characters, and enough uncertainty."""
    tokenizer = tiny_models.tokenizer()
    size = len(tokenizer)
    made = TableLM.from_seed(size, seed=4, sharpness=1.2)
    ids = tokenizer(tiny_models.TEXT).input_ids
    follows = torch.zeros(size, size, dtype=torch.float64)
    for a, b in itertools.pairwise(ids):
        follows[a, b] += 6.0
    made.table += follows.repeat_interleave(PERIOD, 0)
    made.table[:, EOS] += 1.5
    made.table[:, 1] += 1.0  # another special token, at times a stop id
    return made


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    sampling: Sampling
    seed: int
    max_length: int
    verify: str

    def compute_expected(self) -> engine_oracle.ExpectedCompletion:
        tokenizer = tiny_models.tokenizer()
        return engine_oracle.complete(
            lm().compute_logits, tokenizer, self.prompt, self.sampling, self.seed, frozenset({EOS}), self.max_length
        )


def case(r: random.Random) -> Case:
    tokenizer, text = tiny_models.tokenizer(), tiny_models.TEXT
    at = r.randrange(len(text) - 12)
    prompt = tokenizer(text[at : at + r.randint(1, 10)]).input_ids
    max_tokens = r.randint(1, 24)
    stops = []
    for _ in range(r.choice([0, 0, 1, 2, 3])):
        begin = r.randrange(len(text) - 6)
        stops.append(text[begin : begin + r.choice([1, 1, 2, 2, 3, 5])])
    temperature = r.choice([0.0, 0.5, 1.0])
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=r.choice([0, 0, 0, r.randint(0, max_tokens)]),
        temperature=temperature,
        top_p=r.choice([1.0, 0.9]),
        top_k=r.choice([0, 0, 12]),
        frequency_penalty=r.choice([0.0, 0.0, 0.7]),
        repetition_penalty=r.choice([1.0, 1.0, 1.2]),
        stop=tuple(stops),
        stop_token_ids=tuple(r.sample(range(1, len(tokenizer)), r.choice([0, 0, 1, 4]))),
        ignore_eos=r.random() < 0.3,
        logprobs=r.choice([None, 0, 3]),
        seed=r.randrange(1 << 62),
    )
    room = len(prompt) + r.randint(1, 30)
    verify = r.choice(["match", "reject", "block"]) if temperature == 0 else "match"
    return Case(prompt, sampling, sampling.seed or 0, r.choice([1 << 20, 1 << 20, room]), verify)


def check(found: Completion, deltas: list[Delta], case: Case) -> None:
    wanted = case.compute_expected()
    assert found.token_ids == wanted.token_ids
    assert found.text == wanted.text
    assert (found.finish_reason, found.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    assert found.stats.num_tokens == len(wanted.token_ids)
    check_stream(found, deltas)
    check_stats(found, deltas)
    check_logprobs(found, wanted, case.sampling.logprobs)


def check_stream(found: Completion, deltas: list[Delta]) -> None:
    assert "".join(delta.text for delta in deltas) == found.text
    assert [token for delta in deltas for token in delta.token_ids] == found.token_ids
    for delta in deltas:
        assert len(delta.origins) == len(delta.token_ids) == len(delta.pieces)
        assert "".join(delta.pieces) == delta.text
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [found.finish_reason]


def check_stats(found: Completion, deltas: list[Delta]) -> None:
    stats, origins = found.stats, [origin for delta in deltas for origin in delta.origins]
    assert stats.target_passes == len(deltas), "every pass that emits is one delta"
    assert origins.count("accepted") == stats.num_accepted == sum(stats.accepted_at)
    assert stats.num_accepted <= stats.num_drafted
    assert stats.num_drafts <= stats.target_passes
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    for delta in deltas:
        assert all(origin == "accepted" for origin in delta.origins[:-1]), (
            "only the last token of a pass is the target's"
        )


def check_logprobs(found: Completion, wanted: engine_oracle.ExpectedCompletion, count: int | None) -> None:
    if count is None:
        assert found.logprobs is None
        return
    assert found.logprobs is not None
    assert [entry.token_id for entry in found.logprobs] == wanted.token_ids
    for entry, log_probs, raw in zip(found.logprobs, wanted.logprobs, wanted.raw, strict=True):
        assert entry.logprob == pytest.approx(float(log_probs[entry.token_id]), abs=1e-9)
        assert entry.raw_logprob == pytest.approx(float(raw[entry.token_id]), abs=1e-9)
        check_top(entry.top, log_probs, count)
        check_top(entry.raw_top, raw, count)


def check_top(found: tuple[tuple[int, float], ...], log_probs: torch.Tensor, count: int) -> None:
    possible = int((log_probs > -torch.inf).sum())
    assert len(found) == min(count, possible)
    best = log_probs.topk(len(found)).values.tolist()
    assert [value for _, value in found] == pytest.approx(best, abs=1e-9)
    assert all(value == pytest.approx(float(log_probs[i]), abs=1e-9) for i, value in found)


def fuzz(num_cases: int, seed: int) -> dict[Any, int]:
    """Compare that many cases in batches, under one drafter after the other; how often each kind of end occurred."""
    r = random.Random(seed)
    ends: dict[Any, int] = {}
    drafters = [
        engine_fakes.make_drafter(lm().perturb(0.8), 5),
        engine_fakes.make_drafter(lm().perturb(0.8), 3, (3, 2, 1)),
        engine_fakes.make_drafter(lm().perturb(0.2), 8),
        None,
    ]
    for i in range(0, num_cases, PER_BATCH):
        cases = [case(r) for _ in range(PER_BATCH)]
        engine = engine_fakes.make_engine(
            lm(), drafters[i // PER_BATCH % 4], max_batch=PER_BATCH, max_chunk=r.choice([3, 100])
        )
        transcripts = [
            engine_fakes.make_transcript(
                c.prompt, c.sampling, n, tiny_models.tokenizer(), c.verify, [EOS], c.max_length
            )
            for n, c in enumerate(cases)
        ]
        for (found, deltas), c in zip(engine_fakes.run(engine, transcripts), cases, strict=True):
            check(found, deltas, c)
            kind = type(found.stop_reason).__name__, found.finish_reason
            ends[kind] = ends.get(kind, 0) + 1
            ends["accepted"] = ends.get("accepted", 0) + found.stats.num_accepted
            ends["rejected"] = ends.get("rejected", 0) + found.stats.num_drafted - found.stats.num_accepted
        assert engine.drafter.num_failures == 0
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_texts_end_where_the_oracle_ends_them(seed: int) -> None:
    """1,504 random cases over all seeds: text, ids, reasons, counts, logprobs, stream. Every kind of end occurs, drafts
    accepted and rejected."""
    ends = fuzz(376, seed)
    assert ends["NoneType", "stop"] > 12, "end of text"
    assert ends["str", "stop"] > 12, "stop string"
    assert ends["int", "stop"] > 5, "stop id"
    assert ends["NoneType", "length"] > 12
    assert min(ends["accepted"], ends["rejected"]) > 250


@pytest.mark.soak
def test_a_hundred_thousand_texts_end_where_the_oracle_ends_them() -> None:
    fuzz(100_000, seed=4)
