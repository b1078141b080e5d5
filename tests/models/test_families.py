"""Every family gives, on scattered pages and along trees, the logits of transformers' own forward pass.

The tolerance is 1e-5 in float32 and 1e-10 in float64, where rounding cannot hide a fault.
"""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import MAX_PADDED_ROWS
from foredraft.models.hidden_states import find_decoder_layers
from foredraft.tree import TokenTree
from tests.support.families import FAMILIES, SLIDING, VOCAB, PagedModel, compute_reference, make_family, tokens

SLIDERS = ["mistral", "qwen2-sliding", "mixtral", "gemma2", "gemma3", "phi3", "starcoder2", "gpt_oss"]
ALL = pytest.mark.parametrize("family", FAMILIES)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    bound = 1e-10 if theirs.dtype == torch.float64 else 1e-5
    assert (ours - theirs).abs().max().item() <= bound


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_a_prompt_in_odd_chunks_on_scattered_pages(family: str, dtype: torch.dtype) -> None:
    model, lm = make_family(family, dtype)
    ids, paged = tokens(50), PagedModel(lm)
    parts = [paged.read({0: ids[a:b]}) for a, b in ((0, 1), (1, 8), (8, 45), (45, 48), (48, 50))]
    close(torch.cat(parts), compute_reference(model, ids))


@ALL
def test_a_ragged_batch_with_one_long_request(family: str) -> None:
    model, lm = make_family(family)
    paged, texts = (
        PagedModel(lm),
        {b: tokens(n, seed=b) for b, n in enumerate((4, MAX_PADDED_ROWS + 9, 1, 17, MAX_PADDED_ROWS))},
    )
    close(paged.read(texts), torch.cat([compute_reference(model, ids) for ids in texts.values()]))
    more = {b: tokens(n, seed=10 + b) for b, n in enumerate((1, 3, 1, MAX_PADDED_ROWS + 1, 2))}
    whole = torch.cat([compute_reference(model, texts[b] + ids)[len(texts[b]) :] for b, ids in more.items()])
    close(paged.read(more), whole)


def random_tree(random: Random, size: int) -> tuple[list[int], list[int]]:
    parents = [-1, *[random.randrange(max(0, node - 4), node) for node in range(1, size)]]
    return [random.randrange(3, VOCAB) for _ in parents], parents


def along_paths(model: Any, prefix: list[int], tree: TokenTree, b: int) -> Tensor:
    """[N, V] logits after every node, from plain passes over the text down to it."""
    nodes, parents, rows = tree.tokens[b], tree.parents[b], {}
    for leaf in range(len(nodes)):
        if leaf not in parents:
            logits = compute_reference(model, prefix + nodes[:1] + tree.get_draft_path(b, leaf))
            while leaf >= 0:
                rows[leaf] = logits[len(prefix) + tree.depths[b][leaf]]
                leaf = parents[leaf]
    return torch.stack([rows[node] for node in range(len(nodes))])


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_every_path_of_a_tree_and_what_follows_the_accepted_one(family: str, dtype: torch.dtype) -> None:
    model, lm = make_family(family, dtype)
    random, paged = Random(family), PagedModel(lm)
    prefixes = {0: tokens(13, seed=3), 1: tokens(5, seed=4), 2: tokens(9, seed=5)}
    paged.read(prefixes, rows=[])
    drawn = [random_tree(random, 14), random_tree(random, 9), ([5], [-1])]
    tree = TokenTree.from_lists([t for t, _ in drawn], [p for _, p in drawn])
    close(paged.verify(tree), torch.cat([along_paths(model, prefixes[b], tree, b) for b in prefixes]))

    paths = []
    for b in prefixes:
        deepest = max(range(tree.sizes[b]), key=tree.depths[b].__getitem__)
        path = [deepest]
        while tree.parents[b][path[0]] >= 0:
            path.insert(0, tree.parents[b][path[0]])
        paths.append(path)
    assert paged.compact(paths) > 0, "a tree whose deepest path lies in front tests no compaction"
    kept = {b: prefixes[b] + [tree.tokens[b][node] for node in paths[b]] for b in prefixes}
    more = {b: tokens(6, seed=20 + b) for b in prefixes}
    close(paged.read(more), torch.cat([compute_reference(model, kept[b] + more[b])[-6:] for b in prefixes]))


@ALL
def test_logits_only_of_the_rows_asked_for(family: str) -> None:
    model, lm = make_family(family)
    first, second = tokens(7), tokens(5, seed=1)
    asked = PagedModel(lm).read({0: first, 1: second}, rows=[3, 6, 11])
    close(
        asked,
        torch.stack(
            [
                compute_reference(model, first)[3],
                compute_reference(model, first)[6],
                compute_reference(model, second)[4],
            ]
        ),
    )
    assert PagedModel(lm).read({0: first}, rows=[]).shape == (0, VOCAB)


@ALL
def test_taps_are_the_states_between_layers(family: str) -> None:
    model, lm = make_family(family)
    first, second, depth = tokens(11), tokens(4, seed=1), lm.num_layers
    _, features = PagedModel(lm).read({0: first, 1: second}, hidden_layers=(depth, 0, 1))
    expected = torch.cat([_boundaries(model, ids, (depth, 0, 1)) for ids in (first, second)])
    close(features, expected)
    assert not [
        hook
        for layer in find_decoder_layers(lm.model)
        for hook in (layer._forward_hooks, layer._forward_pre_hooks)
        if hook
    ]


@torch.no_grad()
def _boundaries(model: Any, ids: list[int], taps: tuple[int, ...]) -> Tensor:
    """From output_hidden_states; its last entry is after the final norm, so that boundary is caught before the norm."""
    decoder, seen = model.get_decoder(), []
    (norm,) = [
        getattr(decoder, name)
        for name in ("norm", "ln_f", "final_layer_norm", "embedding_norm")
        if hasattr(decoder, name)
    ]
    handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    states = list(model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states)
    handle.remove()
    states[-1] = seen[0]
    return torch.cat([states[tap][0] for tap in taps], -1)


def test_a_tap_that_is_no_boundary_is_refused() -> None:
    with pytest.raises(ForedraftError, match="hidden layer 4 is not a boundary of llama: it has 3 layers"):
        PagedModel(make_family("llama")[1]).read({0: [5]}, hidden_layers=(4,))


@pytest.mark.parametrize("family", SLIDERS)
def test_the_sliding_window_of_these_models_matters(family: str) -> None:
    # anti-vacuity: without the window, the same weights give other logits
    model, _ = make_family(family)
    ids = tokens(30)
    config = FAMILIES[family]()
    config.sliding_window = 1000
    blind = type(model)(config).eval()
    blind.set_attn_implementation("eager")
    blind.load_state_dict(model.state_dict())
    difference = (compute_reference(model, ids) - compute_reference(blind, ids)).abs().amax(-1)
    assert difference[:SLIDING].max() <= 1e-5
    assert difference[-1] > 1e-2


@ALL
def test_attention_matters_in_these_models(family: str) -> None:
    # anti-vacuity: a token two positions back, and its position, change what follows
    model, _ = make_family(family)
    ids = tokens(12)
    swapped = [*ids[:8], ids[9], ids[8], *ids[10:]]
    assert (compute_reference(model, ids)[-1] - compute_reference(model, swapped)[-1]).abs().max() > 1e-2


def test_longrope_is_served_as_far_as_its_short_factors_reach() -> None:
    # beyond, transformers turns to the long factors with the longest text of a batch: one request would change another
    lm = make_family("phi3-longrope")[1]
    assert lm.context_length == 64
