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

from foredraft import Sampling
from foredraft.models.forward_batch import ForwardBatch
from tests.support.attacks.mix_targets import DRAFTERS, MIX_TARGETS, get_mix_target
from tests.support.attacks.request_mixes import (
    create_llm,
    describe_difference,
    find_leaks,
    generate_plain,
    make_mix,
    run_mix,
    run_mix_on,
)
from tests.support.library_setups import NATIVE
from tests.support.method_cases import METHOD_CASES, list_missing_methods

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
    is_chain = drafter not in METHOD_CASES or METHOD_CASES[drafter].is_chain
    return ("auto", "reject", "match", "block" if is_chain else "spectr")[seed % 4]


def test_every_registered_method_is_mixed() -> None:
    assert not list_missing_methods()
    assert set(DRAFTERS["float64"]) == set(METHOD_CASES)


@pytest.mark.parametrize("name", METHOD_CASES)
def test_a_mix_is_plain_decoding(name: str) -> None:
    seed = list(METHOD_CASES).index(name) % 3
    assert run_mix("float64", name, make_mix("float64", seed, SMALL)).faults == []


@NATIVE
@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_mix_on_the_native_path_is_plain_decoding_bit_for_bit(kind: str, name: str) -> None:
    assert run_mix(kind, name, make_mix(kind, 0, SMALL)).faults == []


@pytest.mark.parametrize("name", ["draft_model, tree", "ngram", "suffix, store"])
def test_a_mix_of_encoder_decoder_requests_is_plain_decoding(name: str) -> None:
    assert run_mix("seq2seq", name, make_mix("seq2seq", 5, SMALL)).faults == []


@pytest.mark.parametrize("verify", ["reject", "block", "match"])
def test_a_mix_under_another_rule_ends_and_leaves_nothing(verify: str) -> None:
    assert run_mix("float64", "draft_model", make_mix("float64", 3, SMALL), verify).faults == []


def test_the_mixes_have_everything_in_them() -> None:
    """Over a few seeds: what a mix is there for does happen."""
    seen: Counter[str] = Counter()
    for seed in (0, 1, 2, 7):
        seen += run_mix("float64", "ngram", make_mix("float64", seed, 12)).seen
    for kind in ("length", "stop", "abort", "compared", "accepted", "rejected", "grammars", "preempted", "recovered"):
        assert seen[kind] > 0, f"no {kind}"


def test_a_pass_that_depends_on_its_rows_is_seen() -> None:
    place, mix = get_mix_target("float64"), make_mix("float64", 1, SMALL)
    llm = create_llm(place, "draft_model", mix)
    own = llm.target.forward

    def forward(window: ForwardBatch, taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, Any]:
        logits, features = own(window, taps)
        return (logits.roll(1, dims=-1) if window.num_rows > 1 else logits), features

    llm.target.forward = forward  # type: ignore[method-assign]
    assert run_mix_on(llm, place, mix).faults


def test_a_lost_page_and_a_failed_drafter_are_seen() -> None:
    llm = create_llm(get_mix_target("float64"), "ngram", make_mix("float64", 1, SMALL))
    assert find_leaks(llm) == []
    llm.engine.drafter.backoff.record_failure("raised", "for this test")
    assert "failed" in find_leaks(llm)[0]
    llm.engine.scheduler.allocator.grow([], 1)
    with pytest.raises(AssertionError, match="in no block table"):
        find_leaks(llm)


def test_every_difference_from_plain_decoding_is_seen() -> None:
    sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    [wanted] = generate_plain("float64", [5, 6, 7], sampling)
    assert describe_difference(wanted, wanted, is_exact=True) is None
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
        assert describe_difference(done, wanted, is_exact=True) is not None, i
    assert describe_difference(replace(wanted, logprobs=near), wanted, is_exact=False) is None
    begun = replace(wanted, finish_reason="abort", token_ids=tokens[:3], text="", logprobs=reasons[:3])
    assert describe_difference(begun, wanted, is_exact=True) is None


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MIX_TARGETS for name in DRAFTERS[kind]])
def test_large_mixes_are_plain_decoding(kind: str, name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds():
        outcome = run_mix(kind, name, make_mix(kind, seed, LARGE), rule(name, seed))
        assert outcome.faults == [], f"MIX_SEEDS={seed}:{seed + 1}"
        seen += outcome.seen
    print(f"\n{kind}, {name}: {dict(seen)}")
