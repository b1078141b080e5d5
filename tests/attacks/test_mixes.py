"""Random mixes of requests under every drafter are what plain decoding of each request is.

The ordinary run takes small mixes; `make soak` takes larger ones over everything. Other seeds, and one alone:

    MIX_SEEDS=1000:1050 python -m pytest -m soak --timeout 0 tests/attacks/test_mixes.py
    MIX_SEEDS=1017:1018 python -m pytest -m soak --timeout 0 tests/attacks/test_mixes.py -k "int4 and eagle"
"""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from mixing import alone, difference, engine_of, leaks, mix_of, run, run_on
from worlds_mixed import DRAFTERS, WORLDS, world

from foredraft import Sampling
from foredraft.models.window import Window
from kernels.running import NATIVE
from methods_made import MADE, missing

SMALL, LARGE = 5, 24  # requests
SAMPLE = [  # drafters that need no fitting to a target
    ("bfloat16", "draft_model, tree"), ("bfloat16", "compose"), ("bfloat16", "early_exit, tree"),
    ("bfloat16", "draft_model, tli"), ("bfloat16", "suffix, tree"), ("bfloat16", "lookahead"),
    ("float32", "draft_model"), ("int8", "draft_model, tree"), ("int8", "ngram, branches"),
    ("int4", "draft_model, tree"), ("int4", "compose"),
]  # fmt: skip


def seeds() -> range:
    first, _, end = os.environ.get("MIX_SEEDS", "100:104").partition(":")
    return range(int(first), int(end))


def rule(drafter: str, seed: int) -> str:
    """`auto` for half of the seeds; every other rule that is lossless for the rest."""
    is_chain = drafter not in MADE or MADE[drafter].is_chain
    return ("auto", "reject", "match", "block" if is_chain else "reject")[seed % 4]


def test_every_registered_method_is_mixed() -> None:
    assert not missing()
    assert set(DRAFTERS["float64"]) == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_mix_is_plain_decoding(name: str) -> None:
    seed = list(MADE).index(name) % 3
    assert run("float64", name, mix_of("float64", seed, SMALL)).faults == []


@NATIVE
@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_mix_on_the_native_path_is_plain_decoding_bit_for_bit(kind: str, name: str) -> None:
    assert run(kind, name, mix_of(kind, 0, SMALL)).faults == []


@pytest.mark.parametrize("name", ["draft_model, tree", "ngram", "suffix, store"])
def test_a_mix_of_encoder_decoder_requests_is_plain_decoding(name: str) -> None:
    assert run("seq2seq", name, mix_of("seq2seq", 5, SMALL)).faults == []


@pytest.mark.parametrize("verify", ["reject", "block", "match"])
def test_a_mix_under_another_rule_ends_and_leaves_nothing(verify: str) -> None:
    assert run("float64", "draft_model", mix_of("float64", 3, SMALL), verify).faults == []


def test_the_mixes_have_everything_in_them() -> None:
    """Over a few seeds: what a mix is there for does happen."""
    seen: Counter[str] = Counter()
    for seed in (0, 1, 2, 7):
        seen += run("float64", "ngram", mix_of("float64", seed, 12)).seen
    for kind in ("length", "stop", "abort", "compared", "accepted", "rejected", "grammars", "preempted", "recovered"):
        assert seen[kind] > 0, f"no {kind}"


def test_a_pass_that_depends_on_its_rows_is_seen() -> None:
    place, mix = world("float64"), mix_of("float64", 1, SMALL)
    llm = engine_of(place, "draft_model", mix)
    own = llm.target.forward

    def forward(window: Window, taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, Any]:
        logits, features = own(window, taps)
        return (logits.roll(1, dims=-1) if window.num_rows > 1 else logits), features

    llm.target.forward = forward  # type: ignore[method-assign]
    assert run_on(llm, place, mix).faults


def test_a_lost_page_and_a_failed_drafter_are_seen() -> None:
    llm = engine_of(world("float64"), "ngram", mix_of("float64", 1, SMALL))
    assert leaks(llm) == []
    llm.engine.drafter.probation.failed("raised", "for this test")
    assert "failed" in leaks(llm)[0]
    llm.engine.scheduler.allocator.grow([], 1)
    with pytest.raises(AssertionError, match="in no block table"):
        leaks(llm)


def test_every_difference_from_plain_decoding_is_seen() -> None:
    sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    [wanted] = alone("float64", [5, 6, 7], sampling)
    assert difference(wanted, wanted, is_exact=True) is None
    tokens, reasons = wanted.token_ids, wanted.logprobs
    assert reasons is not None
    near = [replace(reasons[0], raw_logprob=reasons[0].raw_logprob * (1 - 2**-52)), *reasons[1:]]
    wrong = [
        replace(wanted, token_ids=[*tokens[:-1], tokens[-1] ^ 1]),
        replace(wanted, token_ids=tokens[:-1]),
        replace(wanted, text=wanted.text + "x"),
        replace(wanted, finish_reason="stop"),
        replace(wanted, finish_reason="error", error="x"),
        replace(wanted, finish_reason="abort", token_ids=tokens[1:3]),
        replace(wanted, logprobs=None),
        replace(wanted, logprobs=near),
        replace(wanted, logprobs=reasons[:-1]),
        replace(wanted, prompt_logprobs=[]),
    ]
    for i, done in enumerate(wrong):
        assert difference(done, wanted, is_exact=True) is not None, i
    assert difference(replace(wanted, logprobs=near), wanted, is_exact=False) is None
    begun = replace(wanted, finish_reason="abort", token_ids=tokens[:3], text="", logprobs=reasons[:3])
    assert difference(begun, wanted, is_exact=True) is None


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in WORLDS for name in DRAFTERS[kind]])
def test_large_mixes_are_plain_decoding(kind: str, name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds():
        outcome = run(kind, name, mix_of(kind, seed, LARGE), rule(name, seed))
        assert outcome.faults == [], f"MIX_SEEDS={seed}:{seed + 1}"
        seen += outcome.seen
    print(f"\n{kind}, {name}: {dict(seen)}")
