"""Fields of vLLM's SpeculativeConfig: each is honoured, or refused with what to use instead; the page lists all."""

import re
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Sampling
from foredraft.drafters.registry import load_methods, parse_config, resolve_method
from foredraft.drafters.user_spec import COMMON_FIELDS, MethodSpec, parse_rule
from foredraft.drafters.vllm_fields import MISSING_FIELDS
from foredraft.errors import ForedraftError
from foredraft.verification.rules import BLOCK, REJECT
from tests.support import tiny_models

PAGE = Path(__file__).parents[2] / "docs/reference/speculative-config.md"
# vllm/config/speculative.py, with the fields of earlier releases
FIELDS = """method model num_speculative_tokens draft_tensor_parallel_size tensor_parallel_size quantization moe_backend
attention_backend kv_cache_dtype max_model_len revision code_revision enforce_eager disable_padded_drafter_batch
disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min
parallel_drafting num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config
rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
draft_sample_method dspark_draft_topk disable_by_batch_size disable_mqa_scorer disable_logprobs posterior_threshold
posterior_alpha""".split()
RULE_FIELDS = {"posterior_threshold", "posterior_alpha"}  # options of the rule, not of the drafter


def parse(method: str, **options: Any) -> Any:
    entry, implied = resolve_method(method)
    return parse_config(entry, implied | options)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_place_and_a_line_of_the_page(name: str) -> None:
    options = set().union(
        *({*vars(m.config)["__dataclass_fields__"], *m.option_aliases} for m in load_methods().values())
    )
    known = options | set(MISSING_FIELDS) | set(COMMON_FIELDS) | RULE_FIELDS | {"method", "model", "revision"}
    assert name in known
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in row.split("|")[1] for row in rows), "the page has no line for it"


def test_the_page_has_no_other_field() -> None:
    table = PAGE.read_text("utf-8").split("## Options of the server")[0]
    names = [
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert sorted(names) == sorted(FIELDS)


@pytest.mark.parametrize("name", sorted(MISSING_FIELDS))
def test_a_field_that_no_method_has_is_refused_with_what_to_use(name: str) -> None:
    field = MISSING_FIELDS[name]
    method = next(m.name for m in (load_methods()[n] for n in ("lookahead", "medusa")) if name not in m.option_aliases)
    with pytest.raises(ForedraftError) as caught:
        parse(method, **{name: "some other value"})
    assert str(caught.value) == f"there is no {name} here: {field.advice}"
    for value in (None, *field.neutral):
        assert parse(method, **{name: value}) == parse(method)


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("suffix", {"suffix_decoding_max_spec_factor": 1.5}, {"tokens_per_match": 1.5, "free_tokens": 0}),
        ("suffix", {"suffix_decoding_min_token_prob": 0.2}, {"min_confidence": 0.2}),
        ("suffix", {"suffix_decoding_max_cached_requests": 20}, {"store_outputs": 20}),
        ("suffix", {"suffix_decoding_max_cached_requests": None}, {}),
        ("ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 5}, {"prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ("draft_model", {"use_heterogeneous_vocab": True}, {"vocab": "tli"}),
        ("draft_model", {"use_heterogeneous_vocab": False}, {}),
        ("draft_model", {"max_model_len": 128, "quantization": "int8"}, {"max_model_len": 128, "quantization": "int8"}),
    ],
)
def test_a_field_of_a_method_is_its_option(method: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse(method, **given) == parse(method, **expected)
    assert not expected or parse(method, **given) != parse(method)


def test_an_option_in_both_words_is_refused() -> None:
    with pytest.raises(ValueError, match="suffix_decoding_min_token_prob is min_confidence here, which is given too"):
        parse("suffix", suffix_decoding_min_token_prob=0.2, min_confidence=0.1)


def test_members_of_an_ensemble_take_the_fields_too() -> None:
    llm = LLM(drafter={"method": "suffix+ngram", "suffix_decoding_max_cached_requests": 3, "prompt_lookup_max": 4,
                       "draft_tensor_parallel_size": 1, "num_speculative_tokens": 4})  # fmt: skip
    suffix, ngram = (member.drafter for member in llm.drafter.members)  # type: ignore[union-attr]
    assert suffix.config.store_outputs == 3  # type: ignore[union-attr]
    assert ngram.config.prompt_lookup_max == 4  # type: ignore[union-attr]
    with pytest.raises(ForedraftError, match="there is no draft_tensor_parallel_size here"):
        LLM(drafter={"method": "suffix+ngram", "draft_tensor_parallel_size": 2})


@pytest.mark.parametrize(("value", "rule"), [("standard", REJECT), ("block", BLOCK)])
def test_the_rejection_sample_method_is_a_rule(value: str, rule: object) -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": value}
    assert LLM(drafter=spec).rule is rule
    assert tiny_models.plain().with_drafter(spec).rule is rule
    assert parse_rule(spec, rule.name) is rule  # type: ignore[attr-defined]
    with pytest.raises(ForedraftError, match="give one of them"):
        parse_rule(spec, "match")


def test_another_rejection_sample_method_is_refused() -> None:
    with pytest.raises(
        ForedraftError, match=r"takes standard or block, got .synthetic.; --spec-simulate RATE simulates"
    ):
        LLM(drafter={"method": "ngram", "rejection_sample_method": "synthetic"})


def test_a_rule_of_the_drafter_reaches_its_requests() -> None:
    llm = LLM(drafter={"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "block"})
    [completion] = llm.generate("def f(", Sampling(max_tokens=4, seed=1))
    assert completion.verification == "block"


def test_a_revision_needs_a_hub_id() -> None:
    with pytest.raises(ForedraftError, match="give the hub id of the model too"):
        MethodSpec.parse({"method": "ngram", "revision": "main"})
    with pytest.raises(ForedraftError, match=r"a revision each; give it as draft_model\.revision"):
        MethodSpec.parse({"model": ["a", "b"], "revision": "main"})


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "auto"])
@pytest.mark.parametrize("verify", ["match", "reject"])
def test_a_draft_model_of_another_dtype_leaves_the_output_unchanged(tmp_path: Path, dtype: str, verify: str) -> None:
    tiny_models.draft().save_pretrained(tmp_path)
    plain = tiny_models.plain()
    spec = {"method": "draft_model", "model": str(tmp_path), "dtype": dtype, "num_speculative_tokens": 3}
    llm = plain.with_drafter(spec, verify=verify)
    sampling = Sampling(temperature=0, max_tokens=16)
    [one], [other] = llm.generate([[5, 6, 7]], sampling), plain.generate([[5, 6, 7]], sampling)
    assert one.token_ids == other.token_ids
    assert one.stats.num_accepted > 0
    assert llm.engine.drafter.num_failures == 0  # type: ignore[attr-defined]


def test_a_draft_model_of_float16_and_on_another_device_is_refused(tmp_path: Path) -> None:
    tiny_models.draft().save_pretrained(tmp_path)
    for option, words in (({"dtype": "float16"}, "float16 is slow"), ({"device": "cuda:9"}, "torch sees")):
        with pytest.raises(ForedraftError, match=words):
            tiny_models.plain().with_drafter({"method": "draft_model", "model": str(tmp_path), **option})
    tiny_models.plain().with_drafter({"method": "draft_model", "model": str(tmp_path), "device": "cpu"})


def test_a_draft_model_drafts_up_to_its_length(tmp_path: Path) -> None:
    tiny_models.draft().save_pretrained(tmp_path)
    plain, sampling = tiny_models.plain(), Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    spec = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    whole, short = (
        plain.with_drafter(s).generate([[5, 6, 7]], sampling)[0] for s in (spec, {**spec, "max_model_len": 12})
    )
    assert whole.token_ids == short.token_ids
    assert 0 < short.stats.num_drafts <= 12 - 3 < whole.stats.num_drafts
    with pytest.raises(ForedraftError, match=r"max_model_len must lie in 2\.\."):
        plain.with_drafter({**spec, "max_model_len": 100_000})
