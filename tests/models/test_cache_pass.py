"""Models that compute attention in code of their own: their logits over paged KV are those of their own pass."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import foredraft
from benchmarks.small_families import make_model
from foredraft import LLM, Sampling
from foredraft.models.cache_pass import CachePass
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel, get_packed_weights
from foredraft.models.hidden_states import capture_hidden_states
from foredraft.tree import TokenTree
from tests.support.families import PagedModel, compute_reference, tokens

# bias by distance; the same added to the mask; chunks; positions by index, so no padding; keys chosen by an indexer;
# two softmaxes over one set of keys; a local window in a buffer; layers that run several times
FAMILIES = ["bloom", "falcon-alibi", "llama4_text", "roformer", "deepseek_v32", "diffllama", "gpt_neo", "hrm_text"]
FLOAT32_ALONE = ("deepseek_v32",)  # its indexer casts to float32
SMALL_VOCAB = 61  # token ids of `tokens` below the vocabulary
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 3]


@cache
def make_cached(family: str) -> tuple[Any, HFModel]:
    model = make_falcon() if family == "falcon-alibi" else make_model(family)
    if family not in FLOAT32_ALONE:
        model = model.double()  # layers that run several times amplify the rounding of float32 beyond the bound
    lm = HFModel.wrap_model(model, family)
    assert isinstance(lm.module_pass, CachePass)
    return model, lm


def make_falcon() -> Any:
    config = hf.FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True, initializer_range=0.2
    )
    torch.manual_seed(0)
    return hf.FalconForCausalLM(config).eval()


def make_ids(count: int, seed: int = 0) -> list[int]:
    return [token % SMALL_VOCAB for token in tokens(count, seed)]


def check_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp_min(1)


def list_paths(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*list_paths(parents, parents[node]), node]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_requests_with_different_lengths(family: str) -> None:
    model, lm = make_cached(family)
    paged, first, second = PagedModel(lm), make_ids(50), make_ids(13, seed=1)
    parts = [paged.read({0: first[a:b]}) for a, b in ((0, 1), (1, 8), (8, 45))]
    both = paged.read({0: first[45:48], 1: second[:11]})
    parts += [both[:3], paged.read({0: first[48:], 1: second[11:]})]
    check_close(torch.cat([*parts[:-1], parts[-1][:2]]), compute_reference(model, first))
    check_close(torch.cat([both[3:], parts[-1][2:]]), compute_reference(model, second))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_and_what_follows_its_accepted_path(family: str) -> None:
    model, lm = make_cached(family)
    paged, prefix, nodes = PagedModel(lm), make_ids(13, seed=3), make_ids(len(PARENTS), seed=4)
    other = make_ids(6, seed=5)
    paged.read({0: prefix, 1: other[:5]}, rows=[])
    tree = TokenTree.from_lists([nodes, other[5:]], [PARENTS, [-1]])
    paths = [list_paths(PARENTS, node) for node in range(len(PARENTS))]
    expected = [compute_reference(model, prefix + [nodes[n] for n in path])[-1] for path in paths]
    check_close(paged.verify(tree), torch.stack([*expected, compute_reference(model, other)[-1]]))
    accepted = paths[6]
    assert paged.compact([accepted, [0]]) > 0
    more = make_ids(3, seed=6)
    whole = prefix + [nodes[n] for n in accepted] + more
    check_close(paged.read({0: more}), compute_reference(model, whole)[-3:])


@pytest.mark.parametrize("family", ["bloom", "roformer"])
def test_hidden_states_of_all_rows_in_their_order(family: str) -> None:
    model, lm = make_cached(family)
    boundaries = (2, 0, 1, AFTER_FINAL_NORM)
    texts = {0: make_ids(11), 1: make_ids(4, seed=1), 2: make_ids(7, seed=2)}
    _, features = PagedModel(lm).read(texts, rows=[3], hidden_layers=boundaries)
    expected = []
    for ids in texts.values():
        with capture_hidden_states(model, boundaries) as captured, torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
        expected.append(torch.cat([captured[boundary][0] for boundary in boundaries], -1))
    check_close(features, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "is_padded"), [("roformer", False), ("bart", False), ("bloom", True)])
def test_rounding_does_not_hide_what_padding_changes(family: str, is_padded: bool, dtype: torch.dtype) -> None:
    module_pass = HFModel.wrap_model(make_model(family).to(dtype), family).module_pass
    assert isinstance(module_pass, CachePass)
    assert module_pass.is_padded == is_padded


def test_quantized_weights_are_those_of_its_own_pass() -> None:
    lm = HFModel.wrap_model(make_model("bloom"), "bloom", True, True, "int8")
    assert get_packed_weights(lm)
    ids = make_ids(20)
    check_close(PagedModel(lm).read({0: ids}), compute_reference(lm.model, ids))


def test_speculate_runs_in_generate_again_and_again() -> None:
    model = make_model("bloom")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    loop = foredraft.speculate()
    for _ in range(2):
        assert torch.equal(model.generate(ids, custom_generate=loop, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("draft", ["bloom", "roformer"])
def test_such_a_model_drafts_for_another(draft: str) -> None:
    target = make_model("gpt_neo")
    sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [make_ids(9), make_ids(4, seed=1)]
    drafter = {"method": "draft_model", "model": make_model(draft)}
    plain, drafted = (LLM(target, d, tokenizer=None).generate(prompts, sampling) for d in (None, drafter))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


def test_positions_that_generate_counts_otherwise_than_the_model_are_a_warning(caplog: Any) -> None:
    HFModel.wrap_model(make_model("roberta"), "org/tiny-roberta")
    assert "org/tiny-roberta: its own pass counts positions from its padding token" in caplog.text


def test_a_mask_that_keeps_the_highest_scores_ends_the_context_where_ties_begin_to_matter() -> None:
    config = hf.DogeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, keep_window_size=50,
    )  # fmt: skip
    assert HFModel.wrap_model(hf.DogeForCausalLM(config).eval(), "doge").context_length == 50
