"""Trees by their published names: their shapes, and the drafts of Medusa and Hydra with them."""

import pytest

from foredraft import LLM, Sampling
from foredraft.drafters.common.published_trees import CHILD_COUNTS, resolve_tree
from foredraft.drafters.common.static_tree import StaticTree, assume_accuracies
from foredraft.drafters.medusa.method import Config
from foredraft.drafters.registry import parse_config, resolve_method
from foredraft.errors import ForedraftError


@pytest.mark.parametrize("name", CHILD_COUNTS)
def test_a_published_tree_has_63_nodes_with_parents_and_elder_siblings(name: str) -> None:
    tree = StaticTree.from_paths(resolve_tree(name), assume_accuracies(4))  # checks parents and siblings
    assert len(tree) == 63
    assert tree.depth == (3 if name == "vicuna_33b_stage1" else 4)
    assert tree.width == 10


def test_the_trees_differ() -> None:
    assert len({frozenset(map(tuple, resolve_tree(name))) for name in CHILD_COUNTS}) == len(CHILD_COUNTS) == 9


def test_the_paths_of_one_tree() -> None:
    """Some nodes of the published list, and some that it does not have."""
    paths = set(map(tuple, resolve_tree("mc_sim_7b_63")))
    assert {(9, 0), (0, 0, 9), (1, 6), (0, 0, 0, 1), (0, 7, 0), (1, 0, 1)} <= paths
    assert not {(9, 1), (1, 7), (0, 0, 0, 2), (0, 0, 1, 0), (0, 8, 0), (1, 1, 0)} & paths


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ForedraftError, match=r"unknown tree 'mc_sim_7b_36'; .* did you mean 'mc_sim_7b_63'") as caught:
        resolve_tree("mc_sim_7b_36")
    assert all(name in str(caught.value) for name in CHILD_COUNTS)
    with pytest.raises(ForedraftError, match="deeper than there are heads"):
        Config(tree="zephyr_stage2").to_static_tree(5, 3, assume_accuracies(3))


@pytest.mark.parametrize(
    ("name", "alias"), [("medusa", "medusa_choices"), ("hydra", "medusa_choices"), ("hydra", "hydra_choices")]
)
def test_the_authors_name_of_the_option_is_ours(name: str, alias: str) -> None:
    """Fault: `hydra` refused medusa_choices, which the changelog named for it."""
    method, _ = resolve_method(name)
    assert parse_config(method, {alias: "zephyr_stage2"}) == method.config(tree="zephyr_stage2")


def test_a_misspelt_alias_is_answered_with_the_alias() -> None:
    method, _ = resolve_method("medusa")
    with pytest.raises(ValueError, match="did you mean 'medusa_choices'"):
        parse_config(method, {"medusa_choice": "zephyr_stage2"})


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_a_drafter_with_a_published_tree_leaves_the_output_unchanged(method: str) -> None:
    spec = {"method": method, "tree": "vicuna_33b_stage1", "num_speculative_tokens": 3}
    llm, sampling = LLM(drafter=spec), Sampling(temperature=0, max_tokens=24)
    assert llm.engine.drafter.spec.max_nodes == 63
    [one], [plain] = (each.generate("class Queue:", sampling) for each in (llm, llm.with_drafter(None)))
    assert one.token_ids == plain.token_ids
    assert one.stats.num_drafted > 3 * one.stats.num_drafts
