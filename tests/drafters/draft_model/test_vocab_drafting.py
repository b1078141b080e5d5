"""Drafting in another vocabulary, as requests live it: real text, full memory, aborts, preemption, what is refused."""

from functools import cache
from pathlib import Path

import pytest
import torch

from foredraft import LLM, ForedraftError, Sampling
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.cross_vocab.base import PAGE_SIZE, CrossVocabDrafter
from foredraft.drafters.draft_model.cross_vocab.select import TRANSLATIONS
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.drafters.method import DrafterContext
from foredraft.llm import MemoryLimits
from foredraft.models.hf import HFModel
from foredraft.tokenization.byte_vocabulary import TokenizerVocabulary
from tests.support import tiny_models, tiny_vocabularies
from tests.support.requests import make_request

TEXTS = [
    "the end and then",
    " 🍣🍣 sushi 👩‍🚀",
    "今天天气很好。",
    "a  b\n\n\n  c <end> <stop>",
    "naïve café Где",
    "\x00\t",
]
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = Sampling(max_tokens=24, temperature=0.7, top_p=0.9, seed=5, repetition_penalty=1.1, ignore_eos=True)
MODES = {"greedy": GREEDY, "seeded": SEEDED}
PROMPTS = [[33], [50] * 5, [61, 62, 63, 64, 61, 62], [(7 * i) % 31 + 4 for i in range(70)]]
DRAFTS = {"bytes": tiny_vocabularies.byte_tokenizer, "pieces": tiny_vocabularies.piece_tokenizer}


@cache
def plain() -> LLM:
    tokenizer = tiny_models.tokenizer()
    return LLM(tiny_models.llama(len(tokenizer), seed=7), None, tokenizer=tokenizer, is_debug=True)


def reader(vocab: str, name: str) -> CrossVocabDrafter:
    """Make a draft that agrees with `plain` on the shared tokens."""
    tokenizer, target = DRAFTS[name](), plain().tokenizer
    pair = VocabMap(TokenizerVocabulary(target, len(target)), TokenizerVocabulary(tokenizer, len(tokenizer)))
    back = {own: token for token, own in pair.shared_tokens.items()}
    made = tiny_models.llama(len(target), seed=7)
    lm = HFModel.wrap_model(
        tiny_vocabularies.remap_vocabulary(made, [back.get(i, -1) for i in range(len(tokenizer))]), "draft"
    )
    context = DrafterContext(vocab_size=len(target), num_speculative_tokens=4, dtype=torch.float64)
    return TRANSLATIONS[vocab](lm, context, pair, None, 8192)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("vocab", TRANSLATIONS)
def test_texts_of_all_kinds_are_those_without_a_draft(vocab: str, name: str, mode: str) -> None:
    """The target is random, so it writes halves of characters, control tokens and unusual token boundaries."""
    made = reader(vocab, name)
    llm = plain().with_drafter(made, verify="match")
    done = llm.generate(TEXTS, MODES[mode])
    assert [c.token_ids for c in done] == [c.token_ids for c in plain().generate(TEXTS, MODES[mode])]
    assert llm.engine.drafter.num_failures == 0
    assert sum(c.stats.num_accepted for c in done) > 0
    assert sum(c.stats.num_drafted - c.stats.num_accepted for c in done) > 0
    assert made.allocator.num_used == 0


@pytest.mark.parametrize("vocab", TRANSLATIONS)
def test_the_kv_that_is_held_right_is_that_of_a_fresh_pass(vocab: str) -> None:
    """After every step, over accepted, rejected and re-cut drafts, trees among them."""
    options = TreeOptions(branching=(2, 2, 1, 1)) if vocab == "tli" else None
    made = tiny_vocabularies.drafter(vocab, 4, options)
    reference = tiny_vocabularies.remap_vocabulary(tiny_models.draft(), tiny_vocabularies.draft_rows())
    llm = tiny_models.plain().with_drafter(made, verify="match")
    transcripts = llm._prepare_requests(list(PROMPTS), GREEDY)
    for transcript in transcripts:
        llm.engine.add(transcript)
    compared = 0
    while llm.engine.has_work:
        llm.engine.step()
        for held in made._states.values():
            count = held.retokenizer.num_valid
            if count:
                tokens = torch.tensor([held.retokenizer.tokens[:count]])
                with torch.inference_mode():
                    cache = reference(tokens, use_cache=True).past_key_values
                slots = [held.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(count)]
                for layer, (keys, values) in made.lm.pool.layers.items():
                    theirs = cache.layers[layer]
                    assert (keys[slots] - theirs.keys[0].transpose(0, 1)).abs().max() < 1e-9
                    assert (values[slots] - theirs.values[0].transpose(0, 1)).abs().max() < 1e-9
                compared += count
    assert compared > 500
    assert sum(t.build_stats().num_accepted for t in transcripts) > 0


@pytest.mark.parametrize("vocab", TRANSLATIONS)
def test_who_finds_no_memory_is_not_drafted_for(vocab: str) -> None:
    """Requests with memory are drafted for, and all memory is free in the end."""
    made = tiny_vocabularies.drafter(vocab, 4, kv_tokens=4 * PAGE_SIZE)
    llm = tiny_models.plain().with_drafter(made, verify="match")
    done = llm.generate(PROMPTS * 2, GREEDY)
    assert [c.token_ids for c in done] == [c.token_ids for c in tiny_models.plain().generate(PROMPTS * 2, GREEDY)]
    drafted = [c.stats.num_drafted for c in done]
    assert 0 in drafted
    assert max(drafted) > 0
    assert llm.engine.drafter.num_failures == 0
    assert made.allocator.num_free == 4


@pytest.mark.parametrize("vocab", TRANSLATIONS)
def test_a_reader_who_leaves_gives_the_memory_back(vocab: str) -> None:
    made = tiny_vocabularies.drafter(vocab, 4)
    llm = tiny_models.plain().with_drafter(made, verify="match")
    stream = llm.stream(PROMPTS, GREEDY)
    for _ in range(6):
        next(stream)
    assert made.allocator.num_used > 0
    stream.close()
    assert made.allocator.num_used == 0
    assert not made._states


@pytest.mark.parametrize("vocab", TRANSLATIONS)
def test_a_text_of_its_own_after_another_in_the_same_slot(vocab: str) -> None:
    """Preempted, and back in the slot of somebody else."""
    made = tiny_vocabularies.drafter(vocab, 4)
    limits = MemoryLimits(kv_tokens=100, page_size=4, max_batch=4, max_step_tokens=48)
    llm = tiny_models.limit_memory(tiny_models.plain(), made, limits, max_chunk=5)
    for mode in MODES.values():
        done = llm.generate(PROMPTS * 3, mode)
        assert [c.token_ids for c in done] == [c.token_ids for c in tiny_models.plain().generate(PROMPTS, mode)] * 3
    assert llm.engine.scheduler.num_preempted > 0
    assert llm.engine.drafter.num_failures == 0
    assert made.allocator.num_used == 0


def test_a_text_longer_than_the_drafts_context_is_drafted_for_no_more() -> None:
    short = tiny_vocabularies.remap_vocabulary(tiny_models.draft(), tiny_vocabularies.draft_rows())
    short.config.max_position_embeddings = 24
    context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=4, dtype=torch.float64)
    for vocab, kind in TRANSLATIONS.items():
        made = kind(HFModel.wrap_model(short, "draft"), context, tiny_vocabularies.letters(), None, 8192)
        llm = tiny_models.plain().with_drafter(made, verify="match")
        [done] = llm.generate([[61, 62, 63]], Sampling(max_tokens=60, temperature=0, ignore_eos=True))
        [alone] = tiny_models.plain().generate([[61, 62, 63]], Sampling(max_tokens=60, temperature=0, ignore_eos=True))
        assert done.token_ids == alone.token_ids, vocab
        assert 0 < done.stats.num_drafted < 200
        assert llm.engine.drafter.num_failures == 0


def test_slem_drops_the_last_token_unless_the_text_ends() -> None:
    """It may merge with what comes next; nothing comes after the end."""
    from foredraft.drafters.common.tree_builder import TreeSpec
    from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabState
    from foredraft.drafters.draft_model.cross_vocab.retokenizer import IncrementalRetokenizer
    from foredraft.drafters.draft_model.cross_vocab.slem import SlemChain

    pair = tiny_vocabularies.letters()
    a, b, end = pair.draft.token_by_bytes[b"a"], pair.draft.token_by_bytes[b"b"], pair.draft.eos
    request = make_request(0, [], GREEDY)
    line = SlemChain(CrossVocabState(request, IncrementalRetokenizer(pair), TreeSpec(4, 4)), pair)
    line.push(a)
    assert line.target_tokens == []
    line.push(b)
    assert line.target_tokens == [pair.target.token_by_bytes[b"a"]]
    line.push(end)  # type: ignore[arg-type]
    assert line.target_tokens == [pair.target.token_by_bytes[b"a"], pair.target.token_by_bytes[b"b"], pair.target.eos]
    assert line.is_finished


# made from a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_vocabularies.remap_vocabulary(tiny_models.draft(), tiny_vocabularies.draft_rows()).save_pretrained(tmp_path)
    tiny_vocabularies.letter_tokenizer(tiny_vocabularies.DRAFT_NAMES, tiny_vocabularies.DRAFT_PAIRS).save_pretrained(
        tmp_path
    )
    return tmp_path


@cache
def make_letter_llm() -> LLM:
    tokenizer = tiny_vocabularies.letter_tokenizer(tiny_vocabularies.TARGET_NAMES, tiny_vocabularies.PAIRS)
    return LLM(tiny_models.target(), None, tokenizer=tokenizer, verify="match")


@pytest.mark.parametrize("vocab", ["tli", "slem"])
def test_a_draft_of_another_vocabulary_is_loaded_and_reported(
    folder: Path, vocab: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.drafters.draft_model.cross_vocab.vocab_map.SAMPLE_TEXT", "abcXYZ" * 20)
    llm = make_letter_llm().with_drafter({"method": "draft_model", "model": str(folder), "vocab": vocab})
    assert llm.drafter.vocab_option == vocab  # type: ignore[union-attr]
    assert llm.generate(["abcabc"], GREEDY)[0].token_ids == make_letter_llm().generate(["abcabc"], GREEDY)[0].token_ids
    auto = make_letter_llm().with_drafter({"method": "draft_model", "model": str(folder)})
    assert auto.drafter.vocab_option == "tli"  # type: ignore[union-attr]


def refusal(**options: object) -> str:
    with pytest.raises(ForedraftError) as caught:
        make_letter_llm().with_drafter({"method": "draft_model", **options})
    return str(caught.value)


def test_what_is_refused_and_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(folder)
    assert refusal(model=place, vocab="both") == "unknown vocab 'both'; use one of: auto, slem, tli"
    # the sample has spaces, and these two have letters alone
    assert "cannot spell each other's text; use a draft with the target's tokenizer" in refusal(model=place)
    monkeypatch.setattr("foredraft.drafters.draft_model.cross_vocab.vocab_map.SAMPLE_TEXT", "abcXYZ" * 20)
    assert "is a chain; leave tree_nodes, top_k and branching out, or give vocab tli" in refusal(
        model=place, vocab="slem", tree_nodes=8
    )
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer, and a draft of another vocabulary needs both" in refusal(model=place, vocab="tli")
