"""Encoder-decoder models give the text that transformers' own generate() gives, whatever the batch and the draft."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Grammar, MemoryLimits, RequestOptions, Sampling, Seq2Seq, speculate
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span
from foredraft.source import EncoderSource
from tests.support import tiny_models, tiny_seq2seq
from tests.support.families import list_path
from tests.support.tiny_seq2seq import FAMILIES, make_model, reference, sources

GREEDY = Sampling(temperature=0.0, max_tokens=24)
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    ("t5", {"feed_forward_proj": "gated-gelu"}),
    ("t5", {"tie_word_embeddings": False}),
    ("bart", {"scale_embedding": True}),
    ("marian", {"scale_embedding": True, "activation_function": "swish"}),
]
names = [family + "".join(f"-{value}" for value in options.values()) for family, options in VARIANTS]


def window(
    sizes: list[int], given: list[EncoderSource], start: int = 0, parents: list[int] | None = None
) -> ForwardBatch:
    generator = torch.Generator().manual_seed(5)
    spans = []
    for i, (size, source) in enumerate(zip(sizes, given, strict=True)):
        tokens = torch.randint(4, tiny_seq2seq.VOCAB, (size,), generator=generator).tolist()
        spans.append(Span(list(range(1 + 10 * i, 11 + 10 * i)), start, tokens, range(size), parents, 0, source))
    return ForwardBatch.build(spans, range(sum(sizes)), 16, "cpu")


def source_of(prompt: Any) -> EncoderSource:
    return (
        EncoderSource(features=prompt.features) if isinstance(prompt, Seq2Seq) else EncoderSource(tokens=tuple(prompt))
    )


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=names)
def test_greedy_text_is_that_of_transformers(family: str, options: dict[str, Any]) -> None:
    model = make_model(family, **options)
    prompts = sources(family)
    wanted = [reference(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    for drafter in (None, "ngram"):
        completions = LLM(model, drafter, is_debug=True).generate(prompts, GREEDY)
        assert [completion.token_ids for completion in completions] == wanted
    assert len({tuple(text) for text in wanted}) > 1, "the sources make no difference"


@pytest.mark.skipif(load_library() is None, reason="no native kernels")
@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=names)
def test_the_native_pass_is_the_same_model(family: str, options: dict[str, Any]) -> None:
    model = make_model(family, **options).float()
    torch_lm = EncoderDecoder.wrap_model(model, "torch")
    native = EncoderDecoder.wrap_model(model, "native", is_fused=True)
    assert native.native is not None
    given = [source_of(prompt) for prompt in sources(family, (5, 11, 7))]
    taps = (0, 1, 2, AFTER_FINAL_NORM)
    with torch.inference_mode():
        logits, features = torch_lm.forward(window([4, 40, 9], given), taps)
        ours, seen = native.forward(window([4, 40, 9], given), taps)
    assert features is not None
    assert seen is not None
    torch.testing.assert_close(ours, logits, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(seen, features, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(load_library() is None, reason="no native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_native_row_does_not_depend_on_the_others(family: str, dtype: torch.dtype) -> None:
    lm = EncoderDecoder.wrap_model(make_model(family).to(dtype), family, is_fused=True)
    given = [source_of(prompt) for prompt in sources(family, (5, 11, 7))]
    with torch.inference_mode():
        together, _ = lm.forward(window([4, 40, 9], given))
        lm.pool.clear()
        offset = 0
        for span in window([4, 40, 9], given).spans:
            alone = []
            for i, token in enumerate(span.tokens):
                one = Span(span.pages, i, [token], [0], None, 0, span.source)
                alone.append(lm.forward(ForwardBatch.build([one], [0], 16, "cpu"))[0])
            assert torch.equal(torch.cat(alone), together[offset : offset + len(span.tokens)])
            offset += len(span.tokens)


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("family", ["t5", "umt5", "bart"])
def test_a_branch_of_a_tree_is_computed_as_if_it_were_the_text(family: str, is_native: bool) -> None:
    if is_native and load_library() is None:
        pytest.skip("no native kernels")
    model = make_model(family)
    lm = EncoderDecoder.wrap_model(model.float() if is_native else model, family, is_fused=is_native)
    source = source_of(sources(family)[0])
    tokens, parents = [9, 10, 11, 12, 13, 14], [-1, 0, 0, 1, 2, 4]
    depths = [0, 1, 1, 2, 2, 3]
    with torch.inference_mode():
        tree = Span([1, 2], 0, tokens, depths, parents, 0, source)
        logits, _ = lm.forward(ForwardBatch.build([tree], range(6), 16, "cpu"))
        for node in range(6):
            path = list_path(parents, node)
            text = Span([3], 0, [tokens[i] for i in path], range(len(path)), None, 0, source)
            alone, _ = lm.forward(ForwardBatch.build([text], [len(path) - 1], 16, "cpu"))
            torch.testing.assert_close(alone[0], logits[node], rtol=1e-9, atol=0 if is_native else 1e-9)


@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1)}, {"branching": (3, 1)}])
def test_a_smaller_pair_drafts_and_the_text_stays(options: dict[str, Any]) -> None:
    prompts = sources("t5")
    drafter = tiny_seq2seq.draft_model(6 if options else 3, **options)
    llm = LLM(tiny_seq2seq.t5(), drafter, is_debug=True)
    wanted = [reference(tiny_seq2seq.t5(), prompt, GREEDY.max_tokens) for prompt in prompts]
    completions = llm.generate(prompts, GREEDY)
    assert [c.token_ids for c in completions] == wanted
    assert sum(c.stats.num_accepted for c in completions) > 0
    seeded = Sampling(temperature=1.0, max_tokens=24, seed=7, n=2)
    plain = tiny_seq2seq.plain().generate(prompts, seeded)
    assert [c.token_ids for c in llm.generate(prompts, seeded)] == [c.token_ids for c in plain]


def test_a_draft_may_have_other_dimensions() -> None:
    small = make_model("t5", seed=3, layers=1, width=16)
    llm = LLM(tiny_seq2seq.t5(), tiny_seq2seq.draft_model(3, model=small), is_debug=True)
    prompts = sources("t5")
    plain = tiny_seq2seq.plain().generate(prompts, GREEDY)
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [c.token_ids for c in plain]


def test_preempted_and_recomputed_requests_keep_their_source() -> None:
    prompts = sources("t5", (5, 11, 7, 20, 9, 13))
    sampling = replace(GREEDY, max_tokens=60, ignore_eos=True)
    limits = MemoryLimits(kv_tokens=16 * 14, max_batch=6)
    llm = LLM(tiny_seq2seq.t5(), tiny_seq2seq.draft_model(3), limits=limits, is_debug=True)
    wanted = tiny_seq2seq.plain().generate(prompts, sampling)
    assert [c.token_ids for c in llm.generate(prompts, sampling)] == [c.token_ids for c in wanted]
    assert llm.engine.scheduler.num_preempted > 0


def test_what_a_source_takes_is_freed_with_its_requests() -> None:
    llm = LLM(tiny_seq2seq.t5(), tiny_seq2seq.draft_model(3), is_debug=True)
    memories = [llm.target.cross_kv, llm.drafter.lm.cross_kv]  # type: ignore[attr-defined]
    stream = llm.stream(sources("t5"), replace(GREEDY, n=2, ignore_eos=True))
    for _ in range(12):
        next(stream)
    assert [memory.num_sources for memory in memories] == [4, 4], "samples of one prompt share its source"
    stream.close()  # aborts
    gc.collect()
    assert [memory.num_sources for memory in memories] == [0, 0]


def test_idle_sources_give_way_and_are_read_again() -> None:
    model = tiny_seq2seq.t5()
    llm = LLM(model, None, limits=MemoryLimits(kv_tokens=64, max_batch=2), is_debug=True)
    prompts = sources("t5", (20, 18, 30, 25, 16))
    held = [llm.prepare(prompt, GREEDY)[0].request.spec.source for prompt in prompts]
    memory = llm.target.cross_kv  # type: ignore[attr-defined]
    with torch.inference_mode():
        first = [llm.target.forward(window([4], [source]))[0] for source in held]  # type: ignore[list-item]
        assert memory.num_slots <= 64 + 2 * 16
        assert memory.num_sources < 5
        again = [llm.target.forward(window([4], [source]))[0] for source in held]  # type: ignore[list-item]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_pages_are_shared_among_requests_of_one_source_only() -> None:
    llm = LLM(tiny_seq2seq.t5(), None, is_debug=True)
    prefix = list(range(4, 44))
    one, other = sources("t5", (9, 9))
    sampling = replace(GREEDY, max_tokens=8, ignore_eos=True)
    wanted = llm.with_drafter(None).generate([Seq2Seq(other, prefix)], sampling)[0].token_ids

    def hits() -> int:
        return llm.engine.scheduler.prefix_hits

    llm.generate([Seq2Seq(one, prefix)], sampling)
    assert hits() == 0
    assert llm.generate([Seq2Seq(other, prefix)], sampling)[0].token_ids == wanted
    assert hits() == 0
    llm.generate([Seq2Seq(list(one), prefix)], sampling)
    assert hits() == 32
    options = RequestOptions(salt=b"another tenant")
    assert llm.prepare(Seq2Seq(one, prefix), sampling, options)[0].request.spec.page_salt != b"another tenant"


def test_what_the_configuration_forces_is_part_of_the_decoders_prompt() -> None:
    model = make_model("bart", ids={"forced_bos_token_id": 7})
    prompts = sources("bart")
    wanted = [reference(model, prompt, 12) for prompt in prompts]
    completions = LLM(model, None).generate(prompts, replace(GREEDY, max_tokens=11))
    assert [c.prompt_token_ids for c in completions] == [[tiny_seq2seq.START, 7]] * 4
    assert [[7, *c.token_ids] for c in completions] == wanted
    own = LLM(model, None).generate(Seq2Seq(prompts[0], prefix=[9, 8]), GREEDY)[0]
    assert own.prompt_token_ids == [tiny_seq2seq.START, 9, 8]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        (Seq2Seq(()), "empty"),
        ([4, 61], "outside the vocabulary of 61"),
        (Seq2Seq([4], prefix=[99]), "outside the vocabulary of 61"),
        (Seq2Seq([4], features=torch.zeros(8, 60)), "a source or features, not both"),
        (Seq2Seq(features=torch.zeros(8, 60)), "reads text"),
        ([4] * 20000, "encoder takes 16384"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(ForedraftError, match=words):
        tiny_seq2seq.plain().generate(prompt if isinstance(prompt, Seq2Seq) else [prompt], GREEDY)


def test_sound_is_refused_by_its_shape() -> None:
    llm = LLM(make_model("whisper"), None)
    with pytest.raises(ForedraftError, match=r"shape \[8, 60\], got \[8, 61\]"):
        llm.generate(Seq2Seq(features=torch.zeros(8, 61)), GREEDY)
    with pytest.raises(ForedraftError, match="reads audio"):
        llm.generate([[4, 5]], GREEDY)


def test_a_model_of_another_kind_says_so() -> None:
    import transformers as hf

    config = hf.LEDConfig(vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, attention_window=8)
    with pytest.raises(ForedraftError, match="of type 'led'; supported types are: bart"):
        LLM(hf.LEDForConditionalGeneration(config), None)


def test_a_model_that_is_not_computed_as_its_type_is_refused() -> None:
    model = make_model("bart")
    model.model.decoder.layernorm_embedding.register_forward_hook(lambda *args: 2 * args[-1])
    with pytest.raises(ForedraftError, match="is not computed as models of its type are"):
        LLM(model, None)


@pytest.mark.parametrize("family", ["t5", "marian", "whisper"])
def test_transformers_own_generate_with_our_loop(family: str) -> None:
    import transformers as hf

    model, prompts = make_model(family), sources(family)
    if family == "whisper":
        given = {"input_features": torch.stack([prompt.features for prompt in prompts])}
    else:
        longest = max(map(len, prompts))
        padded = [[*prompt, *[tiny_seq2seq.PAD] * (longest - len(prompt))] for prompt in prompts]
        given = {"input_ids": torch.tensor(padded)}
        given["attention_mask"] = (given["input_ids"] != tiny_seq2seq.PAD).long()
    plan = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    wanted = hf.GenerationMixin.generate(model, **given, **plan).sequences
    ours = hf.GenerationMixin.generate(model, **given, **plan, custom_generate=speculate("ngram")).sequences
    assert ours.tolist() == wanted.tolist()


def test_a_draft_of_another_kind_is_refused(tmp_path: Path) -> None:
    tiny_models.llama(tiny_seq2seq.VOCAB).save_pretrained(tmp_path / "decoder")
    tiny_seq2seq.t5().save_pretrained(tmp_path / "pair")
    with pytest.raises(ForedraftError, match=r"is a decoder alone and .* an encoder-decoder model; use a draft"):
        LLM(tiny_seq2seq.t5(), {"method": "draft_model", "model": str(tmp_path / "decoder")})
    with pytest.raises(ForedraftError, match=r"is an encoder-decoder model and .* a decoder alone; use a draft"):
        LLM(tiny_models.llama(tiny_seq2seq.VOCAB), {"method": "draft_model", "model": str(tmp_path / "pair")})
    with pytest.raises(ForedraftError, match="has no encoder"):
        tiny_models.plain().generate(Seq2Seq([4, 5]), GREEDY)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_a_folder_loads_as_what_it_is(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    draft = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    prompts = sources(family)
    llm = LLM(tmp_path, draft, is_debug=True)
    completions = llm.generate(prompts, GREEDY)
    assert [c.token_ids for c in completions] == [reference(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    assert all(c.stats.acceptance_rate == 1.0 or c.finish_reason == "stop" for c in completions)
    assert llm.calibrate(0.05)


@pytest.mark.skipif(load_library() is None, reason="no native kernels")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_drafts_change_nothing_in_low_precision(family: str, dtype: str, tmp_path: Path) -> None:
    """On the native path a text does not depend on the batch, the draft or the chunks, in any precision."""
    make_model(family).save_pretrained(tmp_path / "target")
    tiny_seq2seq.perturb(make_model(family)).save_pretrained(tmp_path / "draft")
    prompts = sources(family)
    plain = LLM(tmp_path / "target", None, dtype=dtype)
    draft = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 4}
    for sampling in (GREEDY, Sampling(temperature=1.0, seed=3, max_tokens=24)):
        wanted = [plain.generate([prompt], sampling)[0].token_ids for prompt in prompts]
        for drafter in (None, draft, "ngram"):
            found = plain.with_drafter(drafter).generate(prompts, sampling)
            assert [c.token_ids for c in found] == wanted


@pytest.mark.skipif(load_library() is None, reason="no native kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights(quantization: str, tmp_path: Path) -> None:
    model = make_model("bart", width=64)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.4 if weight.dim() > 1 else 1.0
    model.save_pretrained(tmp_path)
    exact = LLM(tmp_path, None, dtype="float32").target
    rounded = LLM(tmp_path, None, dtype="float32", quantization=quantization).target
    given = [source_of(prompt) for prompt in sources("bart", (5, 11, 7))]
    with torch.inference_mode():
        logits, near = (lm.forward(window([4, 6, 9], given))[0] for lm in (exact, rounded))
    likeness = torch.nn.functional.cosine_similarity(logits, near, dim=-1).min()
    assert (0.98 if quantization == "int8" else 0.8) < likeness < 0.9999999


def test_heads_read_the_decoders_states() -> None:
    """Boundaries of the decoder are there for drafters that read them."""
    target = LLM(tiny_seq2seq.t5(), None).target
    with torch.inference_mode():
        given = [source_of(prompt) for prompt in sources("t5", (5, 11, 7))]
        logits, features = target.forward(window([4, 6, 9], given), (0, AFTER_FINAL_NORM))
        assert features is not None
        assert features.shape == (19, 2 * target.hidden_size)
        torch.testing.assert_close(target.compute_logits(features[:, target.hidden_size :]), logits)


def test_text_in_text_out_streams_stops_and_grammars() -> None:
    tokenizer = tiny_models.tokenizer()
    model = make_model("t5", vocab=len(tokenizer))
    llm = LLM(model, "ngram", tokenizer=tokenizer, is_debug=True)
    plain = LLM(model, None, tokenizer=tokenizer)
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=20, n=2, logprobs=2, ignore_eos=True)
    (one, two), again = llm.generate("the end", sampling), plain.generate("the end", sampling)
    assert [one.text, two.text] == [c.text for c in again]
    assert one.prompt == "the end"
    assert one.text != two.text
    assert [entry.raw_logprob for entry in one.logprobs or []] == pytest.approx(
        [entry.raw_logprob for entry in again[0].logprobs or []]
    )
    assert "".join(delta.text for delta in llm.stream("the end", replace(sampling, n=1))) == one.text
    stop = one.text[3:5]
    assert llm.generate("the end", replace(sampling, n=1, stop=(stop,)))[0].text == one.text[: one.text.index(stop)]
    shaped = Sampling(temperature=1.0, seed=5, max_tokens=20, grammar=Grammar("regex", "[ab]{4}"))
    found = llm.generate("the end", shaped)[0].text
    assert len(found) == 4
    assert set(found) <= set("ab")


@pytest.mark.skipif(load_library() is None, reason="no native kernels")
def test_two_llms_of_one_model_encode_at_the_same_time() -> None:
    """They share the encoder, whose memory grows with the longest source."""
    model = make_model("t5").float()
    lm = EncoderDecoder.wrap_model(model, "t5", is_fused=True)
    encoder = lm.encoder.native
    assert encoder is not None
    lengths = [1 + 37 * step % 400 for step in range(60)]
    expected = {n: encoder.encode_sources([[3 + i % 40 for i in range(n)]])[0] for n in sorted(set(lengths))}
    fresh = EncoderDecoder.wrap_model(make_model("t5").float(), "t5", is_fused=True).encoder.native
    assert fresh is not None
    inside, overlaps = threading.Lock(), []
    run_layers = fresh._run_layers

    def watch(*args: Any) -> Tensor:
        overlaps.append(not inside.acquire(blocking=False))
        time.sleep(0.001)
        try:
            return run_layers(*args)
        finally:
            if not overlaps[-1]:
                inside.release()

    fresh._run_layers = watch  # type: ignore[method-assign]

    def encode(own: list[int]) -> list[bool]:
        return [torch.equal(fresh.encode_sources([[3 + i % 40 for i in range(n)]])[0], expected[n]) for n in own]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(encode, (lengths, lengths[::-1])))
    assert all(map(all, results))
    assert not any(overlaps), "two calls used the memory of the encoder at once"
