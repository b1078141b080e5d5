"""Models that compute whole sequences in every pass: their logits and their text are those of transformers' `generate`.

Guards against a token that was lost with a preemption, moved to a wrong place, or taken from another request's page.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.small_families import make_model
from foredraft import LLM, ForedraftError, MemoryLimits, Sampling
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel, get_packed_weights
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.models.recomputation_examination import examine_recomputed_pass
from foredraft.models.recomputed_pass import RecomputedPass, make_inputs
from foredraft.tree import TokenTree
from tests.support.families import PagedModel, compute_reference, list_path, tokens

# no cache; a place after the text; states outside the cache; a cache of its own; a bias added to the scores
FAMILIES = ["openai-gpt", "xlm", "rwkv", "recurrent_gemma", "deepseek_v4", "inkling_text"]
SMALL_VOCAB = 61  # token ids below the vocabulary
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 3]
LENGTH = 12
PROMPTS = [[token % SMALL_VOCAB for token in tokens(count, count)] for count in (5, 27, 14, 9)]
TIGHT = MemoryLimits(kv_tokens=56, page_size=4, max_batch=3, max_step_tokens=24)
TREE = {"drafter": {"method": "ngram", "branches": 2}, "num_speculative_tokens": 4}
CHAIN = {"drafter": "ngram", "num_speculative_tokens": 3}


@cache
def make_recomputed(family: str) -> tuple[Any, HFModel]:
    model = make_model(family)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    lm = HFModel.wrap_model(model, family)
    assert isinstance(lm.module_pass, RecomputedPass)
    return model, lm


@cache
def generate_expected(family: str) -> list[list[int]]:
    """Decode with transformers' own `generate`, every prompt alone."""
    model, texts = make_recomputed(family)[0], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        texts.append(made[0, len(prompt) :].tolist())
    return texts


def make_ids(count: int, seed: int = 0) -> list[int]:
    return [token % SMALL_VOCAB for token in tokens(count, seed)]


@torch.no_grad()
def read_last(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [V] after a text, with the inputs of `generate`."""
    return model(**make_inputs(model, torch.tensor([list(ids)]))).logits[0, -1]


def check_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp_min(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_requests_with_different_lengths(family: str) -> None:
    model, lm = make_recomputed(family)
    paged, first, second = PagedModel(lm), make_ids(20), make_ids(9, seed=1)
    paged.read({0: first[:8]}, rows=[])
    both = paged.read({0: first[8:11], 1: second[:7]})
    rest = paged.read({0: first[11:], 1: second[7:]}, rows=[8, 10])
    check_close(both[2], read_last(model, first[:11]))
    check_close(torch.stack([both[3], both[9]]), torch.stack([read_last(model, second[:n]) for n in (1, 7)]))
    check_close(rest, torch.stack([read_last(model, first), read_last(model, second)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_and_what_follows_its_accepted_path(family: str) -> None:
    model, lm = make_recomputed(family)
    paged, prefix, nodes = PagedModel(lm), make_ids(13, seed=3), make_ids(len(PARENTS), seed=4)
    paged.read({0: prefix}, rows=[])
    paths = [list_path(PARENTS, node) for node in range(len(PARENTS))]
    expected = [read_last(model, prefix + [nodes[n] for n in path]) for path in paths]
    check_close(paged.verify(TokenTree.from_lists([nodes], [PARENTS])), torch.stack(expected))
    accepted = paths[6]
    assert paged.compact([accepted]) > 0
    more = make_ids(3, seed=6)
    whole = prefix + [nodes[n] for n in accepted] + more
    check_close(paged.read({0: more}, rows=[2])[0], read_last(model, whole))


@pytest.mark.parametrize("options", [{}, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_that_of_transformers_with_preemptions_and_chunks(family: str, options: dict[str, Any]) -> None:
    llm = LLM(make_recomputed(family)[0], tokenizer=None, limits=TIGHT, is_debug=True, **options)
    sampling = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    completions = llm.generate(PROMPTS, sampling)
    assert [completion.token_ids for completion in completions] == generate_expected(family)
    assert llm.engine.scheduler.num_preempted > 0
    for _ in range(2):  # the pages of the first time are there for the second
        [again] = llm.generate([PROMPTS[1]], sampling)
        assert again.token_ids == generate_expected(family)[1]
    assert llm.engine.scheduler.prefix_hits > 0


@pytest.mark.parametrize("family", ["openai-gpt", "xlm", "recurrent_gemma"])
def test_samples_of_a_seed_are_the_same_with_drafts(family: str) -> None:
    sampling = Sampling(temperature=1, max_tokens=LENGTH, ignore_eos=True, seed=7)
    plain, drafted = (
        LLM(make_recomputed(family)[0], tokenizer=None, **options).generate(PROMPTS, sampling) for options in ({}, TREE)
    )
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


@pytest.mark.parametrize("family", ["openai-gpt", "rwkv"])
def test_hidden_states_of_all_rows_in_their_order(family: str) -> None:
    model, lm = make_recomputed(family)
    boundaries = (2, 0, 1, AFTER_FINAL_NORM)
    texts = {0: make_ids(11), 1: make_ids(4, seed=1), 2: make_ids(7, seed=2)}
    _, features = PagedModel(lm).read(texts, rows=[3], hidden_layers=boundaries)
    expected = []
    for ids in texts.values():
        with capture_hidden_states(model, boundaries) as captured, torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
        expected.append(torch.cat([captured[boundary][0] for boundary in boundaries], -1))
    check_close(features, torch.cat(expected))


def test_a_place_after_the_text_has_no_hidden_states() -> None:
    with pytest.raises(ForedraftError, match="use a method that reads no hidden states"):
        PagedModel(make_recomputed("xlm")[1]).read({0: [5, 6]}, hidden_layers=(1,))


def test_quantized_weights_are_those_of_its_own_pass() -> None:
    lm = HFModel.wrap_model(make_model("rwkv"), "rwkv", True, True, "int8")
    assert get_packed_weights(lm)
    ids = make_ids(20)
    check_close(PagedModel(lm).read({0: ids}), compute_reference(lm.model, ids))


def test_token_ids_of_large_vocabularies_are_kept_in_every_dtype() -> None:
    model = make_model("openai-gpt").bfloat16()
    model.resize_token_embeddings(70000)
    lm = HFModel.wrap_model(model, "openai-gpt")
    ids = [69999, 65537, 257, 1025]
    assert torch.equal(PagedModel(lm).read({0: ids}), compute_reference(model, ids))


def test_the_cost_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    HFModel.wrap_model(make_model("openai-gpt"), "org/tiny-gpt")
    assert "org/tiny-gpt (OpenAIGPTLMHeadModel) computes all tokens of a request again in every pass" in caplog.text


@pytest.mark.parametrize("family", ["xlnet", "cpmant", "prophetnet", "reformer", "blt"])
def test_a_model_with_other_logits_than_generate_or_without_layers_does_not_run_so(family: str) -> None:
    assert examine_recomputed_pass(make_model(family)) is None
