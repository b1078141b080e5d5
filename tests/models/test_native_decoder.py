"""Decoders as one native call per pass: the results of transformers, with no worse rounding, and the same bits however
a sequence is cut, whatever the rest of the batch is, along a tree or alone.

Biases, norms and multipliers are random: transformers starts them at zero and one, and a missing one would not show.
"""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from foredraft import LLM, Sampling
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.native.decoder import explain_unsupported
from foredraft.tree import TokenTree
from tests.models.test_families import _boundaries, along_paths, random_tree
from tests.support import families
from tests.support.families import ALTERNATING, EXACT, SLIDING, TINY, VOCAB, PagedModel, compute_reference, tokens
from tests.support.library_setups import EACH_SET, NATIVE, THREAD_SETUPS, ThreadSetup, run_concurrently, use_library

pytestmark = NATIVE


def _tiny(config: Callable[..., Any], **more: Any) -> Callable[[], Any]:
    return lambda: config(**TINY | {"initializer_range": 0.15} | more)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32} | more


LLAMA3 = _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
FUSED: dict[str, Callable[[], Any]] = {
    "llama, 16": _tiny(hf.LlamaConfig, head_dim=16),
    "llama, 32, tied, biases": _tiny(
        hf.LlamaConfig, head_dim=32, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama, 64, rope llama3": _tiny(hf.LlamaConfig, head_dim=64, rope_parameters=LLAMA3),
    "llama, 48, yarn": _tiny(hf.LlamaConfig, head_dim=48, rope_parameters=_rope("yarn")),
    "llama, 16, linear rope": _tiny(hf.LlamaConfig, head_dim=16, rope_parameters=_rope("linear")),
    "llama, 16, gelu, odd sizes": _tiny(
        hf.LlamaConfig, hidden_size=44, head_dim=16, intermediate_size=41, hidden_act="gelu_pytorch_tanh"
    ),
    "mistral, 80, sliding": _tiny(hf.MistralConfig, head_dim=80, sliding_window=SLIDING),
    "ministral, 32, some sliding": _tiny(
        hf.MinistralConfig, head_dim=32, sliding_window=SLIDING, layer_types=ALTERNATING
    ),
    "qwen2, 16": _tiny(hf.Qwen2Config, hidden_size=64),
    "qwen2, 16, some sliding": _tiny(
        hf.Qwen2Config, hidden_size=64, use_sliding_window=True, sliding_window=SLIDING, max_window_layers=1
    ),
    "qwen3, 64, one key head": _tiny(hf.Qwen3Config, head_dim=64, num_key_value_heads=1),
    "qwen3, 128, as many key heads": _tiny(hf.Qwen3Config, head_dim=128, num_key_value_heads=4, num_hidden_layers=2),
    "granite, 16": _tiny(
        hf.GraniteConfig, head_dim=16, embedding_multiplier=2.5, residual_multiplier=0.4, attention_multiplier=0.2,
        logits_scaling=3.0,
    ),
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EACH = pytest.mark.parametrize("family", FUSED)
EACH_TYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
IDS = tokens(70)


@cache
def original(family: str, dtype: torch.dtype) -> Any:
    """Make the model for transformers."""
    torch.manual_seed(0)
    config = FUSED[family]() if family in FUSED else families.FAMILIES[family]()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model.to(dtype)


@cache
def exact(family: str, dtype: torch.dtype) -> Any:
    """Make the model of these weights in float64."""
    model = copy.deepcopy(original(family, dtype)).double()
    model.set_attn_implementation(EXACT)
    return model


@cache
def make_fused(family: str, dtype: torch.dtype) -> HFModel:
    lm = HFModel.wrap_model(copy.deepcopy(original(family, dtype)), family, is_fused=True)
    assert lm.fused is not None
    return lm


def size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def as_right(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """Check that our rounding is at most twice that of transformers in the same type."""
    assert ours.shape == theirs.shape == truth.shape
    bound = 2 * size(theirs - truth)
    assert 0 < bound < 0.05 * size(truth), "the reference says nothing"
    assert size(ours - truth) <= bound


@EACH
@EACH_TYPE
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    ours = PagedModel(make_fused(family, dtype)).read({0: IDS})
    assert ours.dtype == torch.float32
    as_right(ours, compute_reference(original(family, dtype), IDS), compute_reference(exact(family, dtype), IDS))


@EACH
@EACH_TYPE
def test_taps_are_the_states_between_layers(family: str, dtype: torch.dtype) -> None:
    """The list may have any order and repetitions, and changes nothing else. It was once freed before it was read."""
    lm = make_fused(family, dtype)
    depth = lm.num_layers
    taps = (depth, 0, 1, depth, depth - 1, 0)
    plain = PagedModel(lm).read({0: IDS})
    logits, features = PagedModel(lm).read({0: IDS}, hidden_layers=taps)
    assert torch.equal(logits, plain)
    assert features.dtype == dtype
    states = [_boundaries(model(family, dtype), IDS, taps) for model in (original, exact)]
    as_right(features, *states)
    embedded = lm.model.get_input_embeddings()(torch.tensor(IDS)) * getattr(
        lm.model.config, "embedding_multiplier", 1.0
    )
    assert torch.equal(features.chunk(len(taps), -1)[1], embedded)


@EACH
@EACH_TYPE
@torch.inference_mode()
def test_the_normed_tap_is_the_last_hidden_state(family: str, dtype: torch.dtype) -> None:
    """It has every row, whatever rows have logits, and may come with other hidden layers."""
    lm = make_fused(family, dtype)
    depth = lm.num_layers
    taps = (AFTER_FINAL_NORM, depth, 0, AFTER_FINAL_NORM)
    logits, features = PagedModel(lm).read({0: IDS}, rows=[3], hidden_layers=taps)
    assert features.dtype == dtype
    first, last, _, again = features.chunk(4, -1)
    assert torch.equal(first, again)
    assert torch.equal(last, PagedModel(lm).read({0: IDS}, hidden_layers=(depth,))[1])
    truth, theirs = (_last_hidden(model(family, dtype)) for model in (exact, original))
    as_right(first, theirs, truth)
    plain = HFModel.wrap_model(copy.deepcopy(original(family, dtype)), family)
    as_right(first, PagedModel(plain).read({0: IDS}, hidden_layers=(AFTER_FINAL_NORM,))[1], truth)
    assert torch.equal(logits[0], PagedModel(lm).read({0: IDS})[3])
    as_right(lm.compute_logits(first), PagedModel(plain).read({0: IDS}), compute_reference(exact(family, dtype), IDS))


def _last_hidden(model: Any) -> Tensor:
    return model.model(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state[0]


@EACH
@EACH_TYPE
def test_a_text_has_the_same_bits_however_it_is_cut(family: str, dtype: torch.dtype) -> None:
    lm = make_fused(family, dtype)
    whole = PagedModel(lm).read({0: IDS})
    for cuts in (range(71), (0, 1, 8, 45, 48, 70), (0, 33, 70), (0, 69, 70)):
        paged = PagedModel(lm)
        parts = [paged.read({0: IDS[a:b]}) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


@EACH
@EACH_TYPE
def test_a_text_has_the_same_bits_in_any_company(family: str, dtype: torch.dtype) -> None:
    """Ragged batches, twice, on pages of their own; one of the company sees another after another."""
    lm = make_fused(family, dtype)
    first = {b: tokens(n, seed=b) for b, n in enumerate((4, 41, 1, 17, 32))}
    more = {b: tokens(n, seed=10 + b) for b, n in enumerate((1, 3, 1, 33, 2))}
    paged = PagedModel(lm)
    together = [paged.read(first), paged.read(more)]
    alone = [[], []]
    for b in first:
        paged = PagedModel(lm)
        alone[0].append(paged.read({0: first[b]}))
        alone[1].append(paged.read({0: more[b]}))
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(together, alone, strict=True))


@EACH
@EACH_TYPE
def test_every_node_of_a_tree_has_the_bits_of_its_own_text(family: str, dtype: torch.dtype) -> None:
    """And so has what follows the accepted path, once it was moved to the front."""
    lm, random, paged = make_fused(family, dtype), Random(family), PagedModel(make_fused(family, dtype).with_new_kv())
    prefixes = {0: tokens(13, seed=3), 1: tokens(5, seed=4), 2: tokens(9, seed=5)}
    paged.read(prefixes, rows=[])
    drawn = [random_tree(random, 14), random_tree(random, 9), ([5], [-1])]
    tree = TokenTree.from_lists([t for t, _ in drawn], [p for _, p in drawn])
    ours, at, paths = paged.verify(tree), 0, []
    for b, prefix in prefixes.items():
        for node in range(tree.sizes[b]):
            path = [node]
            while tree.parents[b][path[0]] >= 0:
                path.insert(0, tree.parents[b][path[0]])
            text = prefix + [tree.tokens[b][n] for n in path]
            assert torch.equal(ours[at], PagedModel(lm).read({0: text})[-1]), f"request {b}, node {node}"
            at += 1
        deepest = max(range(tree.sizes[b]), key=tree.depths[b].__getitem__)
        paths.append([deepest])
        while tree.parents[b][paths[b][0]] >= 0:
            paths[b].insert(0, tree.parents[b][paths[b][0]])
    assert paged.compact(paths) > 0
    more = {b: tokens(6, seed=20 + b) for b in prefixes}
    after = paged.read(more)
    kept = {b: prefixes[b] + [tree.tokens[b][node] for node in paths[b]] + more[b] for b in prefixes}
    assert torch.equal(after, torch.cat([PagedModel(lm).read({0: text})[-6:] for text in kept.values()]))


@EACH_SET
@EACH_TYPE
@pytest.mark.parametrize("family", ["llama, 32, tied, biases", "qwen2, 16, some sliding", "llama, 16, gelu, odd sizes"])
def test_on_every_instruction_set_and_every_team(instruction_set: str, dtype: torch.dtype, family: str) -> None:
    lm = make_fused(family, dtype)
    with use_library(instruction_set):
        one = PagedModel(lm).read({0: IDS})
        as_right(one, compute_reference(original(family, dtype), IDS), compute_reference(exact(family, dtype), IDS))
        single = PagedModel(lm)
        assert torch.equal(torch.cat([single.read({0: [token]}) for token in IDS]), one)
    for way in THREAD_SETUPS[1:]:
        with use_library(instruction_set, way):
            assert torch.equal(PagedModel(lm).read({0: IDS}), one)


@EACH
def test_logits_only_of_the_rows_asked_for(family: str) -> None:
    """An empty selection works, too: an empty product once divided by the number of its rows."""
    lm = make_fused(family, torch.bfloat16)
    whole = PagedModel(lm).read({0: IDS[:7], 1: IDS[7:12]})
    assert torch.equal(PagedModel(lm).read({0: IDS[:7], 1: IDS[7:12]}, rows=[3, 6, 11]), whole[[3, 6, 11]])
    assert PagedModel(lm).read({0: IDS[:7]}, rows=[]).shape == (0, VOCAB)


@EACH
@EACH_TYPE
def test_states_of_the_rows_with_logits_alone(family: str, dtype: torch.dtype) -> None:
    """Rows of prompts end in the last layer if their states are not read, and those of the others keep their bits."""
    lm, rows = make_fused(family, dtype), [40, 52]
    chunks = {0: IDS[:41], 1: IDS[41:53]}
    taps = (AFTER_FINAL_NORM, 0, lm.num_layers)
    logits, whole = PagedModel(lm).read(chunks, rows, taps)
    same, states = PagedModel(lm).read(chunks, rows, taps, reads_all_states=False)
    assert torch.equal(same, logits)
    assert torch.equal(states[rows], whole[rows])
    assert torch.equal(states.chunk(3, -1)[1], whole.chunk(3, -1)[1]), "the input of the first layer has every row"
    others = [row for row in range(53) if row not in rows]
    assert not states.chunk(3, -1)[0][others].any()
    assert whole.chunk(3, -1)[0][others].any()


@EACH_SET
def test_few_states_on_every_instruction_set_and_every_team(instruction_set: str) -> None:
    lm, rows = make_fused("llama, 32, tied, biases", torch.bfloat16), [3, 40]
    expected = PagedModel(lm).read({0: IDS[:41]}, hidden_layers=(AFTER_FINAL_NORM,))[1][rows]
    for way in THREAD_SETUPS:
        with use_library(instruction_set, way):
            whole = PagedModel(lm).read({0: IDS[:41]}, rows, (AFTER_FINAL_NORM,))[1]
            states = PagedModel(lm).read({0: IDS[:41]}, rows, (AFTER_FINAL_NORM,), reads_all_states=False)[1]
            assert torch.equal(states[rows], whole[rows])
            torch.testing.assert_close(states[rows], expected, rtol=0.05, atol=0.05)


def long_lm() -> tuple[Any, HFModel]:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**TINY | {"max_position_embeddings": 4096, "head_dim": 16, "num_hidden_layers": 1})
    model = hf.LlamaForCausalLM(config).eval()
    return model, HFModel.wrap_model(copy.deepcopy(model), "long", is_fused=True)


class Deep(PagedModel):
    """With tables for long texts."""

    def get_table(self, request: int) -> list[int]:
        return self.tables.setdefault(request, list(range(1 + 700 * request, 701 + 700 * request)))


def test_positions_beyond_the_first_table_of_rotary_factors() -> None:
    """Which grows, and what was read before keeps its bits."""
    model, lm = long_lm()
    ids = tokens(2200)
    paged = Deep(lm)
    parts = [paged.read({0: ids[a:b]}) for a, b in ((0, 1000), (1000, 1030), (1030, 2200))]
    assert torch.equal(parts[0], Deep(lm).read({0: ids[:1000]}))
    assert (torch.cat(parts) - compute_reference(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("has_own_pool", [False, True], ids=["shared pool", "own pool"])
def test_siblings_in_several_threads_share_weights_and_nothing_else(has_own_pool: bool) -> None:
    """The lengths differ, so that the rotary tables grow during the pass of another thread."""
    lengths = (40, 1100, 300, 2200)
    texts = [tokens(n, seed=i) for i, n in enumerate(lengths)]
    _, lm = long_lm()
    expected = [Deep(lm).read({0: text}, rows=[0, len(text) - 1]) for text in texts]
    for _ in range(2):
        _, fresh = long_lm()
        siblings = [fresh.with_new_kv() for _ in texts]
        assert all(one.fused is fresh.fused for one in siblings)

        def run(number: int, siblings: list[HFModel] = siblings) -> bool:
            text = texts[number]
            return torch.equal(Deep(siblings[number]).read({0: text}, rows=[0, len(text) - 1]), expected[number])

        with use_library(way=ThreadSetup(2, has_own_pool)):
            assert all(run_concurrently(run))


@pytest.mark.parametrize("ids", [[5, VOCAB], [-1], [1 << 30]])
def test_a_token_outside_the_vocabulary_is_refused(ids: list[int]) -> None:
    """As torch does, instead of reading whatever lies behind the embeddings."""
    with pytest.raises(IndexError, match=f"outside the vocabulary of {VOCAB} tokens"):
        PagedModel(make_fused("llama, 16", torch.float32)).read({0: [3, 4], 1: ids})


def test_a_draft_of_a_narrower_vocabulary_is_not_asked_beyond_it() -> None:
    """Padded widths differ within a family: a token that only the target has costs the draft, and no text."""
    config = FUSED["llama, 16"]()
    config.vocab_size = VOCAB - 7
    draft = HFModel.wrap_model(hf.LlamaForCausalLM(config), "narrow", is_fused=True)
    assert draft.fused is not None
    target = LLM(copy.deepcopy(original("llama, 16", torch.float32)), None, fused=True)
    llm = target.with_drafter(DraftModel(draft, DrafterContext(vocab_size=VOCAB, num_speculative_tokens=3)))
    for prompt in ([5, 6, 7], [5, VOCAB - 1, 7]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the drafter failed
            done = llm.generate([prompt], GREEDY)
        assert [c.token_ids for c in done] == [c.token_ids for c in target.generate([prompt], GREEDY)]
        assert (llm.engine.drafter.num_failures > 0) == (VOCAB - 1 in prompt)


# what is not recognised


class Adapted(nn.Linear):
    """A linear layer with an addition, as adapters have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.sum(-1, keepdim=True)


def _with(change: Callable[[Any], None]) -> Any:
    model = copy.deepcopy(original("llama, 16", torch.float32))
    change(model)
    return model


def _adapt(model: Any) -> None:
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Adapted(old.in_features, old.out_features, bias=False)


def _adapt_head(model: Any) -> None:
    model.lm_head = Adapted(model.lm_head.in_features, model.lm_head.out_features, bias=False)


class Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 0.1


def _shift(model: Any) -> None:
    model.model.embed_tokens = Shifted(VOCAB, model.config.hidden_size)


def _llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM._from_config(_tiny(hf.LlamaConfig, **more)(), attn_implementation="eager").eval()


def _family(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = families.FAMILIES[name]()
    for key, value in more.items():
        setattr(config, key, value)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "gemma2 with narrow heads": (lambda: _family("gemma2"), "heads of width 8"),
    "gemma3 with narrow heads": (lambda: _family("gemma3"), "heads of width 8"),
    "olmo2 with narrow heads": (lambda: _family("olmo2"), "heads of width 8"),
    "gpt2": (lambda: _family("gpt2"), "models of type gpt2"),
    "phi3-longrope": (
        lambda: _family("phi3-longrope"),
        "rotary factors that change with the sequence length",
    ),
    "starcoder2": (lambda: _family("starcoder2", hidden_size=64), "models of type starcoder2"),
    "dynamic rope": (
        lambda: _llama(head_dim=16, rope_parameters=_rope("dynamic")),
        "rotary factors that change with the sequence length",
    ),
    "float64": (lambda: _with(lambda model: model.double()), "torch.float64 on cpu"),
    "an adapter": (lambda: _with(_adapt), "linear layers that were replaced"),
    "an adapter on the head": (lambda: _with(_adapt_head), "linear layers that were replaced"),
    "embeddings of another kind": (lambda: _with(_shift), "embeddings that were replaced"),
    "narrow heads": (lambda: _llama(head_dim=8), "heads of width 8"),
    "another activation": (lambda: _llama(head_dim=16, hidden_act="relu"), "the activation relu"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_recognised_keeps_the_plain_path_and_says_why(name: str) -> None:
    """Native attention is used if its shapes allow: soft-caps, sliding windows and sinks included."""
    make, why = PLAIN[name]
    model = make()
    assert explain_unsupported(model) == why
    lm = HFModel.wrap_model(copy.deepcopy(model), name, is_fused=True)
    assert lm.fused is None
    assert lm.pool.is_native
    ids, paged = tokens(30), PagedModel(lm)
    parts = torch.cat([paged.read({0: ids[a:b]}) for a, b in ((0, 1), (1, 9), (9, 27), (27, 30))])
    assert (parts - compute_reference(model, ids)).abs().max() < 2e-5
    drawn = random_tree(Random(name), 12)
    tree = TokenTree.from_lists([drawn[0]], [drawn[1]])
    assert (paged.verify(tree) - along_paths(model, ids, tree, 0)).abs().max() < 2e-5


# owner of the weights


def projections(model: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if name.endswith("_proj.weight")}


@EACH
def test_a_model_that_is_ours_gives_up_the_weights_that_were_packed(family: str) -> None:
    """Or a machine holds every model twice."""
    model = copy.deepcopy(original(family, torch.bfloat16))
    count = sum(weight.numel() for weight in model.parameters())
    lm = HFModel.wrap_model(model, family, is_fused=True, is_owned=True)
    assert len(projections(model)) == 7 * lm.num_layers
    assert all(weight.numel() == 0 for weight in projections(model).values())
    assert lm.num_parameters == count
    assert (lm.vocab_size, lm.context_length) == (VOCAB, TINY["max_position_embeddings"])
    kept = PagedModel(make_fused(family, torch.bfloat16)).read({0: IDS})
    assert torch.equal(PagedModel(lm).read({0: IDS}), kept)


@EACH
def test_the_packed_head_can_be_shared(family: str) -> None:
    lm = make_fused(family, torch.bfloat16)
    assert lm.fused is not None
    assert torch.equal(lm.fused.head.unpack(), lm.model.lm_head.weight)


@EACH
def test_a_model_that_was_handed_over_keeps_its_weights(family: str) -> None:
    """They are its owner's; what runs is a copy of them as they were."""
    model = copy.deepcopy(original(family, torch.float32))
    lm = HFModel.wrap_model(model, family, is_fused=True, is_owned=False)
    before = {name: weight.clone() for name, weight in original(family, torch.float32).named_parameters()}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    model.set_attn_implementation("eager")
    assert torch.equal(compute_reference(model, IDS), compute_reference(original(family, torch.float32), IDS))
    model.set_attn_implementation("foredraft")
    once = PagedModel(lm).read({0: IDS})
    for weight in projections(model).values():
        weight.data.zero_()
    assert torch.equal(PagedModel(lm).read({0: IDS}), once)


GREEDY = Sampling(max_tokens=20, temperature=0, ignore_eos=True)


def theirs(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(GREEDY.max_tokens):
        ids.append(int(compute_reference(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_a_model_that_was_handed_over_runs_fused_when_asked() -> None:
    model = copy.deepcopy(original("llama, 16", torch.float32))
    asked, unasked = LLM(model, None, fused=True), LLM(copy.deepcopy(model), None)
    assert asked.target.fused is not None
    assert unasked.target.fused is None
    assert LLM(copy.deepcopy(model), None, fused=False).target.fused is None
    expected = theirs(original("llama, 16", torch.float32), IDS[:9])
    for llm in (asked, unasked):
        assert llm.generate([IDS[:9], IDS[:4]], GREEDY)[0].token_ids == expected


def test_a_model_from_a_folder_runs_fused_by_default(tmp_path: Any) -> None:
    original("llama, 16", torch.float32).save_pretrained(tmp_path)
    llm, plain = LLM(str(tmp_path), None), LLM(str(tmp_path), None, fused=False)
    assert llm.target.fused is not None
    assert all(weight.numel() == 0 for weight in projections(llm.target.model).values())
    assert (plain.target.fused, plain.target.pool.is_native) == (None, False)
    assert all(weight.numel() > 0 for weight in projections(plain.target.model).values())
    other = llm.with_drafter("ngram", 4)
    assert other.target.fused is llm.target.fused
    assert other.target.pool is not llm.target.pool
    draft = llm.with_drafter({"method": "draft_model", "model": str(tmp_path)}, 4)
    assert draft.drafter is not None
    expected = theirs(original("llama, 16", torch.float32), IDS[:9])
    for each in (llm, plain, other, draft):
        assert each.generate([IDS[:9]], GREEDY)[0].token_ids == expected
    assert draft.generate([IDS[:9]], GREEDY)[0].stats.acceptance_rate == 1.0


@NATIVE
def test_asking_for_what_cannot_be_had_is_an_error() -> None:
    """Guards against an option that is taken and ignored."""
    model, _ = families.make_family("gpt2")
    with pytest.raises(ForedraftError, match=r"models of type gpt2.*leave fused out"):
        LLM(copy.deepcopy(model), None, fused=True)
